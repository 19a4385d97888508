"""Events to readers of any speed."""

from __future__ import annotations

import asyncio

from hive.audit.feed import Events


async def test_each_reader_gets_every_event_published_while_it_reads() -> None:
    events = Events()
    events.publish({"kind": "before"})
    with events.subscribe() as one, events.subscribe() as two:
        events.publish({"kind": "a"})
        assert [await anext(one), await anext(two)] == [{"kind": "a"}, {"kind": "a"}]
        waiting = asyncio.ensure_future(anext(one))
        await asyncio.sleep(0)
        events.publish({"kind": "b"})
        assert await waiting == {"kind": "b"}
    assert repr(events) == "<Events 0 readers>"


async def test_a_reader_that_lags_loses_its_oldest_and_is_told_how_many() -> None:
    events = Events()
    with events.subscribe(limit=2) as slow, events.subscribe() as fast:
        for number in range(5):
            events.publish({"kind": str(number), "at": float(number)})
        assert repr(slow) == "<Feed 2 waiting, 3 dropped>"
        assert [await anext(slow) for _ in range(3)] == [
            {"at": 2.0, "kind": "events.dropped", "agent": "hive", "actor": "hive", "outcome": "ok", "count": 3},
            {"kind": "3", "at": 3.0},
            {"kind": "4", "at": 4.0},
        ]
        assert [(await anext(fast))["kind"] for _ in range(5)] == ["0", "1", "2", "3", "4"]


async def test_a_reader_that_stops_waiting_loses_nothing() -> None:
    events = Events()
    with events.subscribe() as feed:
        waiting = asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        waiting.cancel()
        events.publish({"kind": "a"})
        assert await anext(feed) == {"kind": "a"}
