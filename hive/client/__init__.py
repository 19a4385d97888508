"""The client of the API: what CLI and `hive top` use, and what other programs may import.

May import: leaves.
Begin with client.py.
"""
