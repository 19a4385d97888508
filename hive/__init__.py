"""Hive: many sandboxed agents on one GPU box, asleep while they have nothing to do."""

__version__ = "0.2.0"
