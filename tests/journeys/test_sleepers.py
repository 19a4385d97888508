"""An operator's work with sleepers, by the command line on a whole Hive: writes to them, and measures them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.journeys.stack import Stack, stack, until
from tests.swapspace import zram_swap

MIB = 1 << 20
pytestmark = pytest.mark.redis


def command(hive: Stack, *words: str, stdin: str = "") -> Any:
    """The JSON a command prints. Raises where its exit code is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "hive", *words, "--json", "--state-dir", str(hive.state)],
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def create_heavy(hive: Stack) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    hive.create("heavy", "heavy.py", "60", port=port, limits={"files": 256})
    until(lambda: hive.agent_lines("heavy"), within_s=20, what="its heap is made")


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    """With an agent of 60 MiB, called heavy."""
    with stack() as hive:
        create_heavy(hive)
        yield hive


def test_a_message_is_accepted_by_a_sleeper_also_while_the_daemon_is_killed(hive: Stack) -> None:
    hive.post("/api/agents/heavy/pause")
    sent = command(hive, "agent", "send", "heavy", "-", "--wait", "--timeout", "20", stdin="good\nmorning")
    assert sent["state"] == "delivered"
    command(hive, "agent", "send", "heavy", "after the kill")
    hive.restart("daemon")
    until(lambda: not hive.get("/api/agents/heavy/messages")["messages"], within_s=30, what="all are delivered")
    said = [json.loads(line["message"]) for line in hive.agent_lines("heavy") if "message" in line]
    texts = {message["id"]: message["text"] for message in said}
    assert list(texts.values()) == ["good\nmorning", "after the kill"]


def test_a_schedule_wakes_a_sleeper(hive: Stack) -> None:
    hive.post("/api/agents/heavy/pause")
    made = command(hive, "agent", "wake-at", "heavy", "+1s", "--note", "test")
    view = until(
        lambda: (found := hive.get("/api/agents/heavy"))["status"] == "running" and found, within_s=10, what="it wakes"
    )
    assert (view["last_wake_cause"], time.time() >= made["at"]) == ("schedule", True)
    # The schedule is over once the wake is in the database: a daemon killed before would wake it again.
    until(lambda: hive.get("/api/agents/heavy")["next_wake_at"] is None, within_s=10, what="the schedule is over")


@pytest.mark.wide
def test_bench_sleep_says_whom_it_could_not_measure(hive: Stack) -> None:
    """An agent that says it listens, and does not: ingress answers in its place."""
    hive.create("deaf", "idler.py", port=1)
    (agent,) = command(hive, "bench", "sleep", "deaf", "--rounds", "1")["agents"]
    assert agent["skipped"] == "ingress answers 502 instead of the agent"
    assert hive.get("/api/agents/deaf")["status"] == "running"


@pytest.mark.wide
@pytest.mark.root
def test_bench_sleep_measures_what_deep_sleep_gains_and_leaves_the_agent_as_it_was(hive: Stack) -> None:
    """Half of its 60 MiB is noise, so k lies about 0.5, and light sleep gains nothing."""
    with zram_swap(256):
        hive.post("/api/agents/heavy/pause")
        answer = command(hive, "bench", "sleep", "heavy", "--rounds", "2")
        assert hive.get("/api/agents/heavy")["status"] == "paused"
        (agent,) = answer["agents"]
        assert (agent["skipped"], agent["deep_note"]) == ("", "")
        assert agent["awake_bytes"] > 60 * MIB
        assert 0.9 < answer["k"]["light"] < 1.1
        assert 0.2 < answer["k"]["deep"] < 0.8
        assert agent["deep"]["bytes"] < agent["light"]["bytes"]
        for depth in ("light", "deep"):
            assert 0 < agent[depth]["wake_ms"] <= agent[depth]["first_turn_ms"]
        tenth = next(row for row in answer["density"] if row["awake"] == 0.1)
        assert tenth["deep"] == pytest.approx(1 / (0.1 + 0.9 * answer["k"]["deep"]), abs=0.001)
        hive.post("/api/agents/heavy/resume")
