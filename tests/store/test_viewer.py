"""A viewer's sight of a real Redis, and how little that asks of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from hive.errors import DependencyDown
from hive.store import keys
from hive.store.viewer import NOTHING, AgentCounts, Viewer

pytestmark = pytest.mark.redis


@pytest.fixture
def viewer(redis_server: Any) -> Iterator[Viewer]:
    viewer = Viewer(str(redis_server.socket), user="")
    yield viewer
    viewer.close()


@pytest.fixture
def proxy(redis_server: Any) -> Iterator[Any]:
    """A client that writes."""
    with redis.Redis(unix_socket_path=str(redis_server.socket), decode_responses=True) as client:
        yield client


def was_active(proxy: Any, agent: str, at: float, tokens_out: int) -> None:
    proxy.zadd(keys.AGENTS_ACTIVITY, {agent: at})
    proxy.hset(keys.agent_tokens(agent), mapping={"input": 1, "output": tokens_out, "requests": 2})


def test_counts_are_asked_only_of_who_was_active_since(viewer: Viewer, proxy: Any) -> None:
    def asked() -> int:
        return int(proxy.info("commandstats").get("cmdstat_hmget", {}).get("calls", 0))

    assert viewer.look() == NOTHING
    for number in range(50):
        was_active(proxy, f"a{number}", 100.0, number)
    seen = viewer.look()
    assert (len(seen.active_at), seen.counted["a7"], asked()) == (50, AgentCounts(1, 7, 2), 50)
    assert viewer.look() == seen
    was_active(proxy, "a7", 200.0, 70)
    proxy.zrem(keys.AGENTS_ACTIVITY, "a8")
    seen = viewer.look()
    assert (seen.active_at["a7"], seen.counted["a7"], seen.counted["a9"]) == (
        200.0,
        AgentCounts(1, 70, 2),
        AgentCounts(1, 9, 2),
    )
    assert "a8" not in seen.counted
    assert asked() == 51


def test_what_was_never_counted_is_none(viewer: Viewer, proxy: Any) -> None:
    proxy.zadd(keys.AGENTS_ACTIVITY, {"ann": 1.0})
    assert viewer.look().counted == {"ann": AgentCounts(0, 0, 0)}


def test_a_redis_that_is_away_hangs_or_holds_something_else_is_said(
    viewer: Viewer, proxy: Any, redis_server: Any
) -> None:
    was_active(proxy, "ann", 1.0, 1)
    proxy.hset(keys.agent_tokens("ann"), "output", "many")
    assert_down(viewer)
    proxy.set(keys.AGENTS_ACTIVITY, "no sorted set")
    assert_down(viewer)
    proxy.delete(keys.AGENTS_ACTIVITY)
    assert viewer.look() == NOTHING
    redis_server.stop()
    assert_down(viewer)
    redis_server.go_on()
    assert viewer.look() == NOTHING
    redis_server.kill()
    assert_down(viewer)
    with contextlib.suppress(redis.ConnectionError):
        proxy.close()


def assert_down(viewer: Viewer) -> None:
    with pytest.raises(DependencyDown, match="Redis does not answer at"):
        viewer.look()
