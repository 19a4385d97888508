"""`hive install` and `hive uninstall`: named steps that are asked, done, repeated and undone.

May import: leaves, files, host, store, client, the helper's client.
Begin with install.py.
"""
