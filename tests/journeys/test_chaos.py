"""kill -9 of everything, again and again, under load: nobody dies with it, records come true, no token is lost."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until

KILLS = int(os.environ.get("HIVE_CHAOS_KILLS", "20"))
WORKERS = [("unix", 25), ("tcp", 25), ("unix", 25), ("tcp", 25), ("unix", 25)]
SLEEPERS = 3
STEADY_S = 3.2
"""Between kills: a process that lived for 3 s is started again at once, one that keeps ending with a delay."""


def agents(hive: Stack) -> dict[str, Any]:
    return {view["name"]: view for view in hive.get("/api/agents")["agents"]}


def is_frozen(pid: int) -> bool:
    """Ground truth, past Hive: the process's own cgroup, or the state letter where it has none."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0" and "hive-up" in path:
            for mount in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
                events = Path(mount + path, "cgroup.events")
                if events.exists():
                    return "frozen 1" in events.read_text()
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def agrees(hive: Stack, pids: dict[str, int]) -> bool:
    """Recorded state and ground truth, for every agent."""
    views = agents(hive)
    for name, pid in pids.items():
        view = views[name]
        if view["status"] not in ("running", "paused") or view["pid"] != pid:
            return False
        if is_frozen(pid) != (view["status"] == "paused"):
            return False
    health = hive.health()
    return bool(health["proxy"]["connected"] and health["helper"]["connected"] and health["redis"]["up"])


def received(hive: Stack) -> tuple[int, int, int]:
    """(answers, tokens in, tokens out) of all the agents received whole, as the backend counted them."""
    lines = [line for number in range(len(WORKERS)) for line in hive.agent_lines(f"worker-{number}")]
    whole = [line for line in lines if "tokens_in" in line]
    return len(whole), sum(line["tokens_in"] for line in whole), sum(line["tokens_out"] for line in whole)


def recorded(hive: Stack) -> tuple[int, int, int]:
    """(rows, tokens in, tokens out) without `cut`, read past the daemon."""
    with sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True) as database:
        query = (
            "SELECT count(*), total(tokens_in), total(tokens_out) FROM inference_usage WHERE cut = 0 AND status = 200"
        )
        rows, tokens_in, tokens_out = database.execute(query).fetchone()
    database.close()
    return int(rows), int(tokens_in), int(tokens_out)


def one_kill(hive: Stack, victim: str, chance: random.Random) -> None:
    """Kills at a random moment of the load, while some agents go to sleep or wake."""
    sleeper = f"sleeper-{chance.randrange(SLEEPERS)}"
    verb = chance.choice(("pause", "resume"))
    time.sleep(chance.uniform(STEADY_S, STEADY_S + 0.5))
    try:
        hive.client().post(f"/api/agents/{sleeper}/{verb}", {"timeout_s": 0.5})
    except Exception as error:  # an earlier kill may not be over for this verb
        print(f"{verb} {sleeper}: {error}")
    if victim == "up":
        hive.kill_up()
        hive.start()
    else:
        killed = hive.kill(victim)
        until(lambda: hive.pid_of(victim) != killed, within_s=60, what=f"a new {victim}")


@pytest.mark.redis
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["daemon", "proxy", "sandbox", "redis", "up"])
def test_kill_9_under_load(victim: str) -> None:
    chance = random.Random(victim)
    with (
        fake_backend("llama", "--token-delay", "0.002") as backend,
        stack(url=backend.url) as hive,
    ):
        for number, (kind, rate) in enumerate(WORKERS):
            hive.create(f"worker-{number}", "worker.py", kind, str(rate), tier="high")
        for number in range(SLEEPERS):
            hive.create(f"sleeper-{number}", "idler.py")
        pids = {name: view["pid"] for name, view in agents(hive).items()}
        before = received(hive)[0]
        for kill in range(KILLS):
            one_kill(hive, victim, chance)
            until(lambda: agrees(hive, pids), within_s=5, what=f"record and truth agree after kill {kill} of {victim}")
        load = (received(hive)[0] - before) / KILLS
        print(f"{victim}: {KILLS} kills, {load:.0f} whole answers between two")
        for number in range(len(WORKERS)):
            hive.post(f"/api/agents/worker-{number}/stop")
        sums = received(hive)
        assert load >= 50, "the load is no load"
        until(lambda: recorded(hive) == sums, within_s=20, what=f"rows {recorded(hive)} = answers {sums}")
        for name, pid in pids.items():
            if name.startswith("sleeper"):
                assert psutil.pid_exists(pid), f"{name} died"
