"""Programs that hold a lease: how the helper lets one in, knows all that comes of it, and ends it.

May import: leaves, host, link.
Begin with lease_holders.py.
"""
