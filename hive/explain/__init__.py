"""Every code that Hive prints, in words: its meaning, usual causes, and what to do. Pure.

May import: leaves.
Begin with book.py; the texts are in calls.py, models.py, operations.py, box.py and engines.py, page.py shows them.
"""
