"""The files of a Hive: where they are, its secrets, its logs, hive.conf, the audit table without a daemon.

May import: leaves, host, store.
Begin with layout.py.
"""
