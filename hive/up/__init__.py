"""`hive up`: the processes of Hive in the foreground, supervised, for one user.

May import: leaves, files, host, store, backends, client, demo.
Begin with up.py.
"""
