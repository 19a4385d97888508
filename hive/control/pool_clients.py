"""Temporary."""

from hive.pool.state import Audience


class PoolClients:
    def __init__(self, settings, *, is_awake):
        pass

    def waiting(self, *a):
        pass

    def flows(self, *a):
        pass

    def used(self, *a):
        pass

    def audience(self, model, now):
        return Audience()
