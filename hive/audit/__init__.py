"""The record of the daemon: its callers, what was ordered and what became of it, the events and the jobs.

May import: leaves, agents, store, host.
Begin with audit_log.py.
"""
