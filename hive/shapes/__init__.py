"""The answers of the API as types: the API makes them, its clients read them.

May import: leaves.
Begin with system.py and agents.py.
"""
