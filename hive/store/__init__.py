"""SQLite (truth and history) and Redis (a mirror that may be lost).

May import: leaves.
Begin with database.py; keys.py for Redis.
"""
