"""The data path: from an agent's request to the model and back.

May import: leaves, endpoints, routing, metering, queue, bodies, wire, dialects, link, models, backends, store (the
spool), pool (the ladder), host (decision 004). Begin with forward.py, from top to bottom.
"""
