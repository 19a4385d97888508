"""`python -m hive`: the same as `hive`."""

from hive.cli.entry import run

run()
