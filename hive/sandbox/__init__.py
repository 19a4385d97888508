"""The helper, as root: starts, stops, freezes and thaws agents; owns their sockets.

May import: leaves, host, link, slots, holders, runtimes.
Begin with server.py.
"""
