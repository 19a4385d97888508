"""Pure deciders about the pool: models that share the memory of one box, and which of them is loaded when.

May import: leaves.
Begin with decider.py; what it is told is in state.py, what it answers in moves.py.
"""
