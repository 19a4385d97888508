"""HTTP/1.1: bytes and sockets, no policy.

May import: leaves.
Begin with http1.py.
"""
