"""`python -m hive`: the same as `hive`."""

from hive.cli.main import run

run()
