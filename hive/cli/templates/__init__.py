"""The commands of `hive template`: orders.py shows and restarts those of a Hive; check.py starts some without one."""
