"""`hive backup` and `hive restore`: one archive of what a Hive keeps.

May import: leaves, files, host, store, client, the helper's client.
Begin with backup.py and restore.py.
"""
