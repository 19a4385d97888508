"""The wait of a request before its server: gates, limits, the shares of agents and tenants, the lines for a place.

May import: leaves, link, models.
Begin with queue.py; gate.py holds the requests of an agent that sleeps.
"""
