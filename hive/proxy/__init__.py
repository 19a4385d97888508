"""The data path: from an agent's request to the model and back.

May import: leaves, queue, bodies, wire, dialects, link, models, backends, host (decision 004), store (the spool).
Begin with forward.py, from top to bottom.
"""
