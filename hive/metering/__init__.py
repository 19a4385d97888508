"""The tokens and seconds of a request as its answer tells them, its cost, the rows on their way to the daemon.

May import: leaves, endpoints, dialects, link, backends, store (the spool). Begin with metering.py.
"""
