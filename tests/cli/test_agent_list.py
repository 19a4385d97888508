"""`hive ps` as a person sees it: on narrow terminals, in colour, empty, filtered, again and again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hive.cli import text
from hive.cli.agents.list import DROPPED, HEADERS
from hive.domain import AT_REST, AgentStatus

Hive = Any
"""conftest.Hive: test modules import no siblings."""
Terminal = Callable[[int], None]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes stdout a terminal that is so many columns wide, without colours."""

    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")

    return make


@pytest.mark.parametrize("columns", [80, 60, 40, 24])
def test_the_table_is_as_wide_as_the_terminal_and_no_wider(hive: Hive, terminal: Terminal, columns: int) -> None:
    """`hive ps` was 140 columns wide: at 80 every line was two."""
    terminal(columns)
    lines = hive("ps").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines] == ["NAME", "alice", "busy-bob"]


def test_a_name_is_never_cut(hive: Hive, terminal: Terminal) -> None:
    terminal(10)
    hive("agent", "create", "a" * 40, "--", "sleep", "9")
    assert "a" * 40 in hive("ps").out


def test_what_matters_least_gives_way_first(hive: Hive, terminal: Terminal) -> None:
    seen = []
    for columns in (200, 90, 60, 30):
        terminal(columns)
        seen.append([header for header in HEADERS if header in hive("ps").out.splitlines()[0]])
    assert seen[0] == list(HEADERS)
    for wider, narrower in pairwise(seen):
        gone = [header for header in wider if header not in narrower]
        assert gone
        assert all(DROPPED.index(one) < DROPPED.index(kept) for one in gone for kept in narrower if kept != "NAME")


@pytest.mark.parametrize(
    ("columns", "words", "said"),
    [
        (200, (), "since Hive was started: WAKES; since the agent was created: REQUESTS, TOKENS\n"),
        (60, (), "since the agent was created: REQUESTS\n"),
        (30, (), ""),
        (200, ("-q",), ""),
        (200, ("--json",), ""),
    ],
)
def test_a_terminal_is_told_since_when_the_columns_count(
    hive: Hive, terminal: Terminal, columns: int, words: tuple[str, ...], said: str
) -> None:
    """WAKES began anew with each start of Hive and REQUESTS beside them did not; nothing said so."""
    assert hive("ps").err == ""
    terminal(columns)
    assert hive("ps", *words).err == said


def test_what_goes_into_a_pipe_is_complete_however_narrow_the_terminal(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert all(header in hive("ps").out for header in HEADERS)
    assert "\x1b" not in hive("ps").out


def test_states_are_coloured_for_a_terminal_that_wants_it(
    hive: Hive, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    hive("agent", "pause", "alice")
    terminal(120)
    plain = hive("ps").out
    assert "\x1b" not in plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    coloured = hive("ps").out
    assert "\x1b[36mpaused (light)\x1b[0m" in coloured
    assert "\x1b[32mrunning\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in hive("ps").out


def test_an_empty_list_says_how_to_begin_and_a_pipe_gets_no_talk(hive: Hive) -> None:
    """A new user's first `hive ps` was a line of headers."""
    hive("agent", "remove", "--all", "--yes")
    said = hive("ps")
    assert said.out.startswith("NAME")
    assert said.err == "there is no agent yet: hive agent create NAME -- COMMAND makes one (hive agent create --help)\n"
    assert hive("ps", "--json").err == ""


def test_filters_are_by_state_and_by_tenant(hive: Hive) -> None:
    hive("agent", "create", "carol", "--tenant", "acme", "--", "sleep", "9")
    hive("agent", "stop", "carol", "alice")
    assert hive("ps", "-q", "--state", "stopped").out == "alice\ncarol\n"
    assert hive("ps", "-q", "--state", "stopped", "--state", "running").out == "alice\nbusy-bob\ncarol\n"
    assert hive("ps", "-q", "--tenant", "acme").out == "carol\n"
    told = hive("ps", "--json", "--tenant", "default", "--state", "running").json
    assert [agent["name"] for agent in told["agents"]] == ["busy-bob"]
    said = hive("ps", "--tenant", "acme", "--state", "paused")
    assert (said.code, said.err) == (0, "no agent of tenant acme is paused; there are 3 in all\n")
    assert hive("ps", "--state", "pausd").err.endswith("hint: did you mean `paused`?\n")


def test_the_states_are_those_of_the_domain() -> None:
    assert tuple(AgentStatus) == text.STATES
    assert set(AT_REST) == text.AT_REST


@pytest.mark.parametrize("words", [["--watch"], ["--watch", "--json"], ["--watch", "-q"]])
def test_watch_without_a_terminal_says_what_to_take_instead(hive: Hive, words: list[str]) -> None:
    said = hive("ps", *words)
    assert (said.code, said.out) == (2, "")
    assert "hive events --follow" in said.err


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_watch_follows_what_happens_and_leaves_the_terminal_as_it_was(hive: Hive) -> None:
    """The real program in a terminal of 80 by 24, ended by Ctrl-C."""
    server = ["tmux", "-L", f"hive-test-{os.getpid()}", "-f", "/dev/null"]
    program = f"{sys.executable} -m hive ps --watch; echo code $?; sleep 60"
    environment = {**os.environ, "HIVE_SOCKET": str(hive.socket)}

    def shown(*, until: str) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            text = subprocess.run([*server, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
            if until in text:
                return text
            time.sleep(0.1)
        raise AssertionError(text)

    subprocess.run([*server, "new-session", "-d", "-x", "80", "-y", "24", program], check=True, env=environment)
    try:
        first = shown(until="busy-bob")
        assert "2 agents; Ctrl-C ends this" in first
        assert "since the agent was created: REQUESTS" in first
        assert first.count("running") == 2
        hive("agent", "stop", "alice")
        assert "alice     stopped" in shown(until="stopped")
        subprocess.run([*server, "send-keys", "C-c"], check=True)
        assert "busy-bob" not in shown(until="code 130")
    finally:
        subprocess.run([*server, "kill-server"], check=False)
