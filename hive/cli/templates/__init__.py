"""The commands of `hive template`: orders.py looks at those of a Hive; check.py starts some without one."""
