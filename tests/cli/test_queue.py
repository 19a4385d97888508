"""`hive queue`: what is under way on one screen, and ending it."""

from __future__ import annotations

from typing import Any

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_without_a_command_it_lists_what_runs_and_what_waits(hive: Hive) -> None:
    said = hive("queue")
    lines = said.out.splitlines()
    assert (said.code, lines[0]) == (0, "1 of 4 running, 1 waiting, 0.25 turns a second")
    assert [line.split() for line in lines[2:4]] == [
        ["TENANT", "WEIGHT", "RUNNING", "WAITING", "TOKENS", "AHEAD"],
        ["acme", "2", "1", "1", "1,234"],
    ]
    assert lines[6].split()[:3] == ["p1-1", "alice", "acme"]
    assert lines[6].endswith("streaming  1,234 ms  2.5 ms")
    assert lines[-1] == "and 3 more"
    assert "\x1b" not in said.out
    assert hive("queue", "list").out == said.out
    assert [request["id"] for request in hive("queue", "--json").json["requests"]] == ["p1-1", "p1-2"]


def test_its_help_is_about_the_group(hive: Hive) -> None:
    assert "cancel" in hive("queue", "--help").out


def test_a_request_under_way_is_shown_and_ended(hive: Hive) -> None:
    assert "State: queued" in hive("queue", "show", "p1-2").out
    assert hive("queue", "cancel", "p1-2").out == "p1-2 is ended\n"
    assert hive("queue", "cancel", "p1-2").code == 3
    assert hive("queue", "cancel", "").code == 2


def test_an_ended_request_says_what_it_cost_and_that_it_was_cut(hive: Hive) -> None:
    shown = hive("queue", "show", "p1-0").out
    assert "ended with 200, its client did not get a whole answer" in shown
    assert "Agent: id-gone (removed)" in shown
    assert "Tokens: 1,200 tokens in, 8 tokens out (estimated)" in shown
    assert "\x1b" not in shown
