"""`hive queue`: what is under way on one screen, and ending it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hive.link.requests import QueueIs, QueueView, TenantView, UnderWay, WorkView
from tests.cli.conftest import spend

Hive = Any
"""conftest.Hive: test modules import no siblings."""


ENDED: dict[str, Any] = {
    "model": "tiny",
    "tokens_in": 1200,
    "tokens_out": 8,
    "estimated": True,
    "cut": True,
    "queue_ms": 3.0,
    "ttft_ms": 40.0,
    "duration_ms": 900.0,
    "client_request_id": "mine\x1b[2J",
    "asked": "task:plan",
    "rung": 1,
    "far": True,
}


def under_way(**fields: Any) -> UnderWay:
    return UnderWay(agent="a" * 32, name="alice", tenant="acme", endpoint="/v1/chat/completions", **fields)


@pytest.fixture
def hive(hive: Hive) -> Hive:
    """Beside a proxy with two requests and more."""
    hive.box.proxy.queue = QueueIs(
        queue=QueueView(
            running=1,
            waiting=1,
            places=4,
            drain_per_s=0.25,
            tenants=[TenantView("acme", 2.0, 1, 1, 1234.5), TenantView("idle", 1.0, 0, 0, 0.0)],
        ),
        requests=[
            under_way(id="p1-1", state="streaming", age_ms=1234.0, queue_ms=2.5, model="x\x1b[2J"),
            under_way(id="p1-2", state="queued", age_ms=90.0, queue_ms=80.0, model="tiny"),
        ],
        left_out=3,
    )
    return hive


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


def test_how_work_compares_is_said_where_there_is_more_than_text(hive: Hive) -> None:
    work = [WorkView("", "tokens", 100.0, False), WorkView("tiny", "tokens", 240.0, True)]
    view = msgspec.structs.replace(hive.box.proxy.queue.queue, tokens_per_gpu_s=240.0, work=work)
    hive.box.proxy.queue = msgspec.structs.replace(hive.box.proxy.queue, queue=view)
    assert "COUNTS AS" not in hive("queue").out
    view = msgspec.structs.replace(view, work=[*work, WorkView("ear\x1b[2J", "audio_s", 30.0, True)])
    hive.box.proxy.queue = msgspec.structs.replace(hive.box.proxy.queue, queue=view)
    said = hive("queue")
    assert "1 s of a server's work counts as 240 tokens" in said.out
    assert "30 s of audio" in said.out
    assert "1 s of audio = 8" in said.out
    assert "in use" not in said.out, "no server is in use"
    assert "\x1b" not in said.out
    told = hive("queue", "--json").json
    assert told["work"][1] == {"model": "tiny", "unit": "tokens", "per_s": 240.0, "is_measured": True}


def test_seconds_of_loads_are_shown_where_there_are_any(hive: Hive) -> None:
    view = msgspec.structs.replace(hive.box.proxy.queue.queue, tenants=[TenantView("acme", 2.0, 1, 1, 1234.5, 37.6)])
    hive.box.proxy.queue = msgspec.structs.replace(hive.box.proxy.queue, queue=view)
    lines = [line.split() for line in hive("queue").out.splitlines()[2:4]]
    assert [line[-1] for line in lines] == ["LOADS", "s"]
    assert lines[1][-2:] == ["38", "s"]
    assert hive("queue", "--json").json["tenants"][0]["load_s"] == 37.6


def test_its_help_is_about_the_group(hive: Hive) -> None:
    assert "cancel" in hive("queue", "--help").out


def test_a_request_under_way_is_shown_and_ended(hive: Hive) -> None:
    assert "State: queued" in hive("queue", "show", "p1-2").out
    assert hive("queue", "cancel", "p1-2").out == "p1-2 is ended\n"
    assert hive("queue", "cancel", "p1-2").code == 3
    assert hive("queue", "cancel", "").code == 2


def test_an_ended_request_says_what_it_cost_and_that_it_was_cut(hive: Hive) -> None:
    shown = hive("queue", "show", hive.daemon.do(spend(hive.box, "gone", **ENDED))).out
    assert "ended with 200, its client did not get a whole answer" in shown
    assert "Agent: gone (removed)" in shown
    assert "Tokens: 1,200 tokens in, 8 tokens out (estimated)" in shown
    assert "\x1b" not in shown
