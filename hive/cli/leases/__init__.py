"""The commands of `hive lease`: orders.py shows, takes and ends leases; run.py becomes the program that holds one."""
