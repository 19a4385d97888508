"""The connection of proxy, daemon and helper: frames over AF_UNIX that can carry descriptors.

May import: leaves.
Begin with link.py.
"""
