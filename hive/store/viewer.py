"""The part of Redis that people may see, read as its user `viewer`: it changes nothing and delays nothing. Blocking.

`store/live.py` is how Hive's services use it; this is for a command that looks while the daemon is down.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from hive.errors import DependencyDown
from hive.store import keys

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
        self._redis = redis.Redis(
            unix_socket_path=socket,
            username=user or None,
            password=user or None,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._seen = NOTHING

    def __repr__(self) -> str:
        return f"<Viewer of {self.socket}>"

    def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            self._redis.close()

    def look(self) -> SeenLive:
        """Looks at the agents active in the last 24 h. Counts are asked only of those active since the last look.

        Raises DependencyDown.
        """
        try:
            found: Any = self._redis.zrange(keys.AGENTS_ACTIVITY, 0, -1, withscores=True)
            active_at = {agent.decode(): float(at) for agent, at in found}
            before = self._seen.active_at
            moved = [agent for agent, at in active_at.items() if before.get(agent) != at]
            pipeline = self._redis.pipeline(transaction=False)
            for agent in moved:
                pipeline.hmget(keys.agent_tokens(agent), *_FIELDS)
            counts = pipeline.execute() if moved else []
            fresh = {agent: _counted(row) for agent, row in zip(moved, counts, strict=True)}
        except (RedisError, OSError, ValueError, UnicodeDecodeError) as error:
            raise DependencyDown(f"Redis does not answer at {self.socket}: {error}") from error
        kept = {agent: count for agent, count in self._seen.counted.items() if agent in active_at}
        self._seen = SeenLive(active_at, kept | fresh)
        return self._seen


def _counted(row: list[bytes | None]) -> AgentCounts:
    return AgentCounts(*(int(count or 0) for count in row))
