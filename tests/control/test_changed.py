"""A reader that follows the log knows the present state, at any pace and after anything was forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.control import changed
from hive.control.changed import ChangeLog, Ration

WORLDS = st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2)), max_size=12)


class Follower:
    """Keeps what the log told it. `log.since` names agents; what they are it sees at that moment."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.cursor = ""

    def ask(self, log: ChangeLog, world: dict[str, int], most: int) -> None:
        told = log.since(self.cursor, most)
        assert not {*told.there} & {*told.gone}
        assert told.is_whole or len(told.there) + len(told.gone) <= most
        if told.is_whole:
            self.known = {}
        self.known |= {agent: world[agent] for agent in told.there}
        for agent in told.gone:
            self.known.pop(agent, None)
        self.cursor = told.cursor


@given(WORLDS, st.integers(1, 4), st.integers(0, 3), st.data())
def test_who_asks_long_enough_knows_everybody(
    worlds: list[dict[str, int]], most: int, remembered: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed, "GONE_MAX", remembered)
        log, follower, world = ChangeLog("x"), Follower(), {}
        for world in worlds:
            log.note(world)
            for _ in range(data.draw(st.integers(0, 2))):
                follower.ask(log, world, most)
        for _ in range(len(log._numbers) + 1):
            follower.ask(log, world, most)
    assert follower.known == world
    assert log.since(follower.cursor).there == log.since(follower.cursor).gone == []


@pytest.mark.parametrize("cursor", ["", "x", "y-1", "x-", "x-2", "x--1", "x-1e0", "x-¹", "x-" + "1" * 5000])
def test_a_cursor_nobody_gave_out_is_told_everything(cursor: str) -> None:
    log = ChangeLog("x")
    log.note({"ann": 1})
    assert log.since(cursor) == changed.Changed(["ann"], [], "x-1", is_whole=True)
    assert not log.since("x-1").is_whole


def test_the_longest_unknown_come_first() -> None:
    log = ChangeLog("x")
    log.note({"ann": 1, "bob": 1, "cid": 1})
    log.note({"ann": 2, "bob": 1, "cid": 1})
    assert log.since("x-0", most=2) == changed.Changed(["bob", "cid"], [], "x-3", is_whole=False)
    assert log.since("x-3", most=2) == changed.Changed(["ann"], [], "x-4", is_whole=False)


def test_what_is_quick_is_asked_as_often_as_may_be_and_what_is_slow_not_for_ever() -> None:
    ration = Ration(share=0.01, least_s=0.5, most_s=10.0)
    assert ration.is_due(0.0)
    for took_s, pause_s in ((0.0001, 0.5), (0.02, 2.0), (5.0, 10.0)):
        ration.took(took_s, now=100.0)
        assert not ration.is_due(100.0 + pause_s - 0.01)
        assert ration.is_due(100.0 + pause_s)
