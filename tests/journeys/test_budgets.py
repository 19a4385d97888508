"""Budgets of tokens in a whole Hive: crossed by many at once, and kept over the end of every part of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.journeys.sdk import Door, door_of
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis]
LIMIT = 3000
ASKED: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack(config=f"[proxy]\ntier_high_concurrency = 50\n[tenant acme]\ntokens_per_day = {LIMIT}\n") as hive:
        for name in ("ann", "bob"):
            hive.create(name, "idler.py", tier="high", tenant="acme")
        hive.create("carl", "idler.py", tier="high", tokens_per_day=1)
        yield hive


def ask(door: Door) -> httpx.Response:
    return door.post("/v1/chat/completions", {"model": "hive-demo", **ASKED})


def used(hive: Stack, name: str = "acme") -> int:
    budgets = hive.get("/api/budgets")["budgets"]
    return next(int(budget["used"]) for budget in budgets if budget["name"] == name)


def rows_used(hive: Stack, tenant: str) -> int:
    costs = hive.get("/api/usage", by="tenant")["tenants"]
    return sum(cost["tokens_in"] + cost["tokens_out"] for cost in costs if cost["tenant"] == tenant)


def is_refused(door: Door) -> bool:
    answer = ask(door)
    return answer.status_code == 429 and answer.json()["error"]["code"] == "budget_exceeded"


def test_50_at_once_cross_it_by_no_more_than_was_in_flight(hive: Stack) -> None:
    """In waves, until it is spent: the last one was in flight when it was crossed."""
    doors = [door_of(hive, name) for name in ("ann", "bob")]
    costs: list[int] = []
    last: list[int] = []
    total = 0
    with ThreadPoolExecutor(50) as threads:
        for _ in range(60):
            answers = list(threads.map(ask, doors * 25))
            assert {answer.status_code for answer in answers} <= {200, 429}
            costs = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
            if not costs:
                break
            last, total = costs, total + sum(costs)
    assert not costs
    assert LIMIT <= total < LIMIT + sum(last)
    until(lambda: used(hive) == rows_used(hive, "acme") == total, within_s=5, what="the rows")
    assert all(is_refused(door) for door in doors)
    assert ask(door_of(hive, "carl")).status_code == 200, "another tenant's"


def test_it_is_kept_when_proxy_and_daemon_are_killed(hive: Stack) -> None:
    door, before = door_of(hive, "ann"), used(hive)
    for name in ("proxy", "daemon", "proxy"):
        hive.restart(name)
        until(lambda: is_refused(door), within_s=60, what=f"refused after the end of the {name}")
        assert used(hive) == before


def test_each_event_comes_once_in_its_day(hive: Stack) -> None:
    """Daemons have come and gone in between."""
    time.sleep(1.5)
    hive.post("/api/agents/ann/stop")

    def told(act: str) -> list[tuple[str, str]]:
        rows = hive.get("/api/audit", act=act)["rows"]
        return [(row["target"], row["detail"]["budget"]) for row in rows if row["target"] == "acme"]

    assert told("budget.soft") == told("budget.spent") == [("acme", "tokens_per_day")]


@pytest.mark.wide
def test_people_see_what_is_left(hive: Stack) -> None:
    command = [sys.executable, "-m", "hive", "usage", "--budgets", "--state-dir", str(hive.state)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "tenant acme" in shown
    assert "spent" in shown
    text = b"\n".join(hive.client().lines("/metrics")).decode()
    lines = [line for line in text.splitlines() if line.startswith("hive_budget_limit_tokens{") and "acme" in line]
    assert [line.rpartition(" ")[2] for line in lines] == [f"{LIMIT}.0"]


@pytest.mark.wide
def test_limits_that_change_in_hive_conf_hold_after_a_reload() -> None:
    """The daemon had read them at its start only: `hive usage --budgets`, metrics and events had the old ones."""
    with stack(config="[tenant acme]\ntokens_per_day = 100000\n") as box:
        box.create("ann", "idler.py", tenant="acme")
        door = door_of(box, "ann")
        assert ask(door).status_code == 200
        until(lambda: used(box) == rows_used(box, "acme") > 0, within_s=5, what="the rows")
        text = box._config.read_text()

        def say(limits: str) -> None:
            box._config.write_text(text.replace("tokens_per_day = 100000", limits))
            for name in ("daemon", "proxy"):
                os.kill(box.pid_of(name), signal.SIGHUP)

        def limits() -> dict[str, int]:
            return {one["budget"]: one["limit"] for one in box.get("/api/budgets")["budgets"]}

        say("tokens_per_day = 1\ntokens_per_month = 5")
        until(lambda: limits() == {"tokens_per_day": 1, "tokens_per_month": 5}, within_s=5, what="the new limits")
        until(lambda: is_refused(door), within_s=5, what="the request is refused")

        def spent() -> list[str]:
            return [row["target"] for row in box.get("/api/audit", act="budget.spent")["rows"]]

        until(lambda: spent() == ["acme", "acme"], within_s=5, what="both are told of")
        say("tokens_per_day = nonsense")
        until(lambda: box.log.count("config_reload_failed") == 2, within_s=5, what="daemon and proxy refuse it")
        assert limits() == {"tokens_per_day": 1, "tokens_per_month": 5}
        say("")
        until(lambda: limits() == {}, within_s=5, what="no limit is left")
        until(lambda: ask(door).status_code == 200, within_s=5, what="and none is enforced")
