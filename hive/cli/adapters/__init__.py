"""The commands of `hive adapter`: one file per subject. Those that need no daemon are in signing.py and trust.py; orders.py
asks it."""
