"""The pool in the daemon: facts are gathered, the decider of hive/pool is asked, and its moves are carried out.

May import: leaves, audit, pool, backends, agents, link, store, host, the helper's client.
Begin with pooling.py; slot_steps.py has the steps of one slot.
"""
