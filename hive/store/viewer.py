"""The part of Redis that people may see, read as its user `viewer`: it changes nothing and delays nothing. Blocking.

`store/live.py` is how Hive's services use it; this is for a command that looks while the daemon is down.
"""

from __future__ import annotations

from typing import NamedTuple

from hive.errors import DependencyDown
from hive.store import keys
from hive.store.redis_client import BlockingRedis, RedisPlace, RedisRefused

VIEWER = "viewer"
"""Of the ACL (files/redis_acl.py): any password is right, and the mode of the socket limits who gets that far."""
ANSWER_S = 0.5
_FIELDS = ("input", "output", "requests")


class AgentCounts(NamedTuple):
    """The usage of an agent in all, as Redis shows it: the truth is in SQLite."""

    tokens_in: int
    tokens_out: int
    requests: int


class SeenLive(NamedTuple):
    """`active_at`: agent id → when it was last active (Unix seconds); `counted`: agent id → what it used."""

    active_at: dict[str, float]
    counted: dict[str, AgentCounts]


NOTHING = SeenLive({}, {})


class Viewer:
    """One Redis at a unix socket, over one connection. `user` empty: it has no users (`hive up`)."""

    def __init__(self, socket: str, *, user: str = VIEWER) -> None:
        self.socket = socket
        self._redis = BlockingRedis(RedisPlace(path=socket, user=user, password=user), within_s=ANSWER_S)
        self._seen = NOTHING

    def __repr__(self) -> str:
        return f"<Viewer of {self.socket}>"

    def close(self) -> None:
        self._redis.close()

    def look(self) -> SeenLive:
        """Looks at the agents active in the last 24 h. Counts are asked only of those active since the last look.

        Raises DependencyDown.
        """
        try:
            [found] = self._redis.ask([("ZRANGE", keys.AGENTS_ACTIVITY, 0, -1, "WITHSCORES")])
            active_at = {agent.decode(): float(at) for agent, at in zip(found[::2], found[1::2], strict=True)}
            before = self._seen.active_at
            moved = [agent for agent, at in active_at.items() if before.get(agent) != at]
            counts = self._redis.ask([("HMGET", keys.agent_tokens(agent), *_FIELDS) for agent in moved])
            fresh = {agent: _counted(row) for agent, row in zip(moved, counts, strict=True)}
        except (RedisRefused, OSError, ValueError, UnicodeDecodeError) as error:
            raise DependencyDown(f"Redis does not answer at {self.socket}: {error}") from error
        kept = {agent: count for agent, count in self._seen.counted.items() if agent in active_at}
        self._seen = SeenLive(active_at, kept | fresh)
        return self._seen


def _counted(row: list[bytes | None]) -> AgentCounts:
    return AgentCounts(*(int(count or 0) for count in row))
