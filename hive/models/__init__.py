"""Pure deciders about models that both planes need: routing, tiers, salts, capabilities.

May import: leaves.
Begin with routing.py.
"""
