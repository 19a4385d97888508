"""`hive up` on the same state directory once more: the agents that run again, and those that do not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from tests.up.test_up import HIVE, SLEEPER, HiveUp, until
from tests.up.test_up import hive as hive

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A machine of its own as far as processes go: they all end with its pid 1, and the kernel's boot id is the host's."""

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.timeout(180),
]


def some_agents(hive: HiveUp) -> None:
    """Two that run, one that sleeps, one that an operator stopped."""
    for name, restart in (("plain", "no"), ("failing", "on-failure"), ("sleeper", "no"), ("stopped", "unless-stopped")):
        hive.client.post("/api/agents", {"name": name, "command": SLEEPER, "restart": restart})
        hive.client.post(f"/api/agents/{name}/start")
    hive.client.post("/api/agents/sleeper/pause", {"timeout_s": 20})
    hive.client.post("/api/agents/stopped/stop")
    assert statuses(hive) == {
        "plain": "running",
        "failing": "running",
        "sleeper": "paused",
        "stopped": "stopped",
    }


def statuses(hive: HiveUp) -> dict[str, str]:
    return {view["name"]: view["status"] for view in hive.client.get("/api/agents")["agents"]}


BACK = {"plain": "running", "failing": "running", "sleeper": "running", "stopped": "stopped"}


def run_again(hive: HiveUp, beside: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Those that ran are back, the one that was stopped is not, those `beside` are as they were. The views of four."""
    until(lambda: statuses(hive) == {**BACK, **beside}, lambda: f"{statuses(hive)}\n{hive.said()}")
    views = {name: hive.client.get(f"/api/agents/{name}") for name in BACK}
    assert all(psutil.pid_exists(views[name]["pid"]) for name in ("plain", "failing", "sleeper"))
    return views


@pytest.mark.wide
def test_what_hive_stopped_when_it_ended_runs_again_and_what_ended_by_itself_stays_as_it_is(hive: HiveUp) -> None:
    """After Ctrl-C and another `hive up` every agent with the default policy stayed stopped.

    Of those that Hive did not stop, `hive agent show` says how they ended after the restart, too.
    """
    hive.start().until_up()
    some_agents(hive)
    for name, code in (("bad", "3"), ("good", "0")):
        hive.client.post("/api/agents", {"name": name, "command": ["/bin/sh", "-c", f"exit {code}"]})
        hive.client.post(f"/api/agents/{name}/start")
    ended = {"bad": "error", "good": "stopped"}
    until(lambda: ended.items() <= statuses(hive).items(), hive.said)
    assert hive.end() == 0
    hive.start().until_up()
    run_again(hive, beside=ended)
    assert hive.client.get("/api/agents/bad")["reason"] == "exited with 3"
    assert hive.end() == 0


@pytest.mark.wide
def test_what_hive_stopped_without_its_daemon_runs_again_too(hive: HiveUp) -> None:
    """Stopped by the helper, because no daemon answered, they came back as `error: exited with 143`."""
    hive.start().until_up()
    some_agents(hive)
    hive.children()["daemon"].kill()
    assert hive.end() == 0
    hive.start().until_up()
    run_again(hive)
    assert hive.end() == 0


@pytest.mark.wide
def test_what_ran_when_a_backup_was_made_runs_again_once_it_is_restored(hive: HiveUp, tmp_path: Path) -> None:
    """They came back as `error: ended, how is unknown`, or `exited with 143`, and stayed so."""
    hive.start().until_up()
    some_agents(hive)
    run(hive, "backup", str(tmp_path / "b.tar"))
    hive.client.post("/api/agents/stopped/start")
    assert hive.end() == 0
    run(hive, "restore", str(tmp_path / "b.tar"), "--yes")
    hive.start().until_up()
    run_again(hive)
    assert hive.end() == 0


class InContainer(HiveUp):
    """`hive up` as the first process of a container of its own."""

    @property
    def prefix(self) -> list[str]:
        return CONTAINER


@pytest.fixture
def contained(passable: Path) -> Iterator[InContainer]:
    contained = InContainer(passable / "state")
    yield contained
    if contained.process is not None and contained.process.poll() is None:
        contained.process.kill()
        contained.process.communicate()
    until(lambda: not contained.processes(), contained.said)


def can_make_one() -> bool:
    return os.getuid() == 0 and subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(not can_make_one(), reason="needs root and a pid namespace")
def test_a_container_that_is_rebooted_is_a_machine_that_was(contained: InContainer) -> None:
    """The boot id is the host's, so no boot was seen: what ran ended as `error: ended, how is unknown`."""
    contained.start().until_up()
    some_agents(contained)
    assert contained.process is not None
    contained.process.send_signal(signal.SIGKILL)
    contained.process.communicate()
    until(lambda: not contained.processes(), contained.said)
    contained.start().until_up()
    until(lambda: statuses(contained) == BACK, lambda: f"{statuses(contained)}\n{contained.said()}")
    assert "is_new_boot=True" in contained.said()


def test_a_crash_loop_is_seen_in_list_show_and_events(hive: HiveUp) -> None:
    """One that fell over every few seconds looked like any other that runs, or starts."""
    hive.start().until_up()
    looping = {"name": "loop", "command": ["/bin/sh", "-c", "sleep 0.2; exit 3"], "restart": "always"}
    hive.client.post("/api/agents", looping)
    until(lambda: hive.client.get("/api/agents/loop")["restarts"] >= 3, hive.said)

    def due() -> dict[str, Any] | None:
        view = hive.client.get("/api/agents/loop")
        return view if view["next_start_at"] is not None else None

    until(due, hive.said)
    view = due()
    assert view is not None
    assert (view["status"], view["restart_reason"]) == ("starting", "exited with 3")
    assert 0 < view["next_start_at"] - view["since"] <= 10.5
    said = run(hive, "agent", "show", "loop")
    assert "last: exited with 3; next try " in said
    assert "exited with 3; end " in run(hive, "agent", "list")
    assert "exited with 3; end 2 in a row, started again in 1 s" in run(hive, "events", "-n", "1000")
    hive.client.post("/api/agents/loop/stop")
    assert hive.client.get("/api/agents/loop")["next_start_at"] is None
    assert hive.end() == 0


def run(hive: HiveUp, *words: str) -> str:
    command = [*HIVE, *words, "--state-dir", str(hive.state)]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    ).stdout
