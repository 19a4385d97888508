"""The demo backend, the sample agents and their callers: Hive without a model.

May import: leaves, wire, dialects, client.
Begin with server.py.
"""
