"""The commands of `hive agent`: one file per subject. Begin with list.py."""
