"""Request bodies: each field judged by its rule, media and schemas checked, long bodies read in worker processes.

May import: leaves, dialects, models, host.
Begin with body.py; the rules are the table in fields.py.
"""
