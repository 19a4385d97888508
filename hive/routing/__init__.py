"""The inference servers as requests find them: what each offers, the way to it; and the one that a name leads to.

May import: leaves, endpoints, metering, queue, bodies, wire, link, models, backends, host (who may read keys).
Begin with slots.py; slot.py is one server.
"""
