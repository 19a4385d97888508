"""One table of settings; hive.conf and the environment become `Settings`.

May import: leaves.
Begin with table.py.
"""
