"""The life of an agent: states, sleep, wake, reconcile, its specification.

May import: leaves, link, store, the helper's client.
Begin with lifecycle.py; state.py alone changes an agent's state.
"""
