"""The `hive` command: one file per noun. A command's module is loaded when it runs.

May import: leaves, client, the specification of an agent; starters import what they start, inside a function.
Begin with main.py.
"""
