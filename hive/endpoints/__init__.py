"""The endpoints of each dialect: their paths, those known but not served, lists of models.

May import: leaves, wire, dialects, models, backends. Begin with endpoints.py.
"""
