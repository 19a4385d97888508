"""`hive bench density`: how many real agents a box of fixed memory holds, for each way to keep them.

May import: leaves, host, client. programs/ and stub.py run by file path and import nothing of Hive.
Begin with density.py.
"""
