"""`hive demo`: a guided tour on a Hive of its own, with everything it shows measured live.

May import: leaves, host, client, demo; of `up` its signals and the clearing of its directories. Begin with tour.py.
"""
