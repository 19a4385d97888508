"""The commands of `hive adapter`: one file per subject. Those in signing.py and trust.py need no daemon."""
