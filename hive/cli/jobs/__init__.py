"""The commands of `hive job`: begun in run.py, looked at and ended in orders.py; output.py writes what a job says."""
