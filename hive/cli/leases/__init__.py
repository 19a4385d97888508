"""The commands of `hive lease`: looked at, taken and ended in orders.py; run.py becomes the program that holds one."""
