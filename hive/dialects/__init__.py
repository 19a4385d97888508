"""Sans I/O: the languages of clients and backends, and the translations between them.

May import: leaves.
Begin with translators.py.
"""
