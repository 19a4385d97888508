"""The data path: from an agent's request to the model and back.

May import: leaves, wire, dialects, link, models, backends, host (decision 004), store (the spool).
Begin with forward.py, from top to bottom.
"""
