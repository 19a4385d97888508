"""`hive agent wake-at` and `hive agent keep-awake` against a real daemon."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hive.cli import text
from hive.domain import AT_REST

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_a_wake_is_scheduled_listed_and_cancelled(hive: Hive) -> None:
    said = hive("agent", "wake-at", "alice", "07:30", "--every", "1d", "--note", "morning round").out
    assert said.startswith("alice is woken at 20")
    assert re.search(r" 07:30:00 \S+, then every 1d \(schedule 1\)\n$", said)
    once = hive("agent", "wake-at", "alice", "+10m", "--json").json
    assert (once["schema"], once["every_s"], once["id"]) == ("agent.wake-at", None, 2)
    lines = hive("agent", "wake-at", "alice", "--list").out.splitlines()
    assert lines[0].split() == ["ID", "NEXT", "EVERY", "LAST", "NOTE"]
    assert {line.split()[0]: "morning round" in line for line in lines[1:]} == {"1": True, "2": False}
    assert "Next wake: 20" in hive("agent", "show", "alice").out
    assert hive("agent", "wake-at", "alice", "--cancel", "1").out == "schedule 1 is cancelled\n"
    gone = hive("agent", "wake-at", "alice", "--cancel", "1")
    assert gone.code == 3
    assert "did you mean" not in gone.err  # of the agent's name, which was right
    assert hive("agent", "wake-at", "busy-bob", "-l").out == "nothing is scheduled for busy-bob\n"


def test_a_schedule_for_who_is_stopped_says_that_it_starts_nobody(hive: Hive) -> None:
    hive("agent", "stop", "alice")
    assert "; alice is stopped, and a schedule starts nobody" in hive("agent", "wake-at", "alice", "+1h").out


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say when, or --list, or --cancel ID"),
        (("+1h", "--list"), "say when, or --list, or --cancel ID"),
        (("tomorrow",), "when: 'tomorrow' is no time"),
        (("25:00",), "25:00 is no time of day"),
        (("2001-01-01T00:00",), "is past"),
        (("+1h", "--every", "often"), "every: expected numbers with s, m, h or d"),
        (("--cancel", "x"), "--cancel"),
    ],
)
def test_a_time_that_makes_no_sense_is_exit_2(hive: Hive, words: tuple[str, ...], said: str) -> None:
    result = hive("agent", "wake-at", "alice", *words)
    assert (result.code, result.out) == (2, "")
    assert said in result.err


def test_an_agent_is_kept_awake_for_a_while(hive: Hive) -> None:
    assert hive("agent", "keep-awake", "alice", "--for", "10m").out in (
        "alice is kept awake for 10m\n",
        "alice is kept awake for 9m 59s\n",  # on a slow host
    )
    assert "Kept awake: 20" in hive("agent", "show", "alice").out
    hive("agent", "pause", "alice")
    assert hive("agent", "keep-awake", "alice", "--for", "1d").out.endswith(
        "; it sleeps, `hive agent resume alice` wakes it\n"
    )
    assert hive("agent", "keep-awake", "alice", "--end").out == "alice may sleep when it is idle\n"
    assert "Kept awake" not in hive("agent", "show", "alice").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say --for, or --end"),
        (("--for", "1h", "--end"), "say --for, or --end"),
        (("--for", "soon"), "for: expected numbers with s, m, h or d"),
        (("--for", "1000d"), "is not from 0 seconds to 30 days"),
    ],
)
def test_a_while_that_makes_no_sense_is_exit_2(hive: Hive, words: tuple[str, ...], said: str) -> None:
    result = hive("agent", "keep-awake", "alice", *words)
    assert result.code == 2
    assert said in result.err


def test_who_is_at_rest_is_the_same_for_command_line_and_daemon() -> None:
    assert text.AT_REST == AT_REST
