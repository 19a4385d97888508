"""The helper's verbs for inference servers: run by test_unit.py in a machine with systemd as PID 1.

The services have Hive's names and are stand-ins: one shell command each. What Hive's own unit files say is tested in
tests/install/test_inference_units.py.
"""

# ruff: noqa: ASYNC110, ASYNC240 - a test's loop may wait for its disk and for systemctl
from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.backends.launch import unit_of as launched
from hive.control.backend_candidates import ServiceCandidates, service
from hive.domain import BackendKind
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted
from hive.sandbox.client import SandboxClient
from hive.settings.table import InferenceSection
from hive.slots.inference_units import UNITS
from tests.host.unit_agents import PATHS, Connect
from tests.sandbox.harness import Daemon
from tests.waiting import until

OLLAMA, VLLM, LLAMA = BackendKind.OLLAMA, BackendKind.VLLM, BackendKind.LLAMA
FOLDER = Path("/run/systemd/system")
SERVICE = """[Unit]
Conflicts={others}
{after}
StartLimitIntervalSec=120
StartLimitBurst=2
[Service]
Type=exec
ExecStart=/bin/sh -c '{script}'
TimeoutStopSec=60
KillMode=mixed
SyslogIdentifier={name}
"""
RUNS = "echo up; exec sleep 1000"
STUBBORN = 'trap "" TERM; sleep 1000 & while true; do wait; done'
FAILS = "echo no model here; exit 5"
"""Printed at once: journald has no time to look for the process of the line."""


def write(kind: BackendKind, script: str = RUNS) -> None:
    others = " ".join(unit for other, unit in UNITS.items() if other is not kind)
    after = f"After={UNITS[OLLAMA]}" if kind is not OLLAMA else ""
    (FOLDER / UNITS[kind]).write_text(
        SERVICE.format(others=others, after=after, script=script, name=UNITS[kind].removesuffix(".service"))
    )


def reload() -> None:
    subprocess.run(["systemctl", "daemon-reload"], check=True)


@pytest.fixture(autouse=True)
def services() -> Iterator[None]:
    for kind in UNITS:
        write(kind)
    reload()
    yield
    for unit in UNITS.values():
        subprocess.run(["systemctl", "kill", "--signal=SIGKILL", unit], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["systemctl", "stop", unit], check=False)
        (FOLDER / unit).unlink(missing_ok=True)
    reload()


async def states(client: SandboxClient) -> list[str]:
    return [(await client.look_at_backend(kind)).state for kind in UNITS]


def test_the_helper_and_what_starts_the_servers_mean_the_same_units() -> None:
    assert {kind: launched(kind) for kind in UNITS} == UNITS


async def test_starting_one_stops_the_one_before_it(daemon: Daemon) -> None:
    assert await states(daemon.client) == ["inactive"] * len(UNITS)
    await daemon.client.start_backend(VLLM)
    await daemon.client.start_backend(VLLM)
    assert await states(daemon.client) == ["active" if kind is VLLM else "inactive" for kind in UNITS]
    found = await daemon.client.look_at_backend(VLLM)
    assert (found.unit, found.substate, found.restarts) == ("hive-inference-vllm.service", "running", 0)
    assert found.pid > 1
    assert found.active_s is not None
    assert found.active_s < 60
    await daemon.client.start_backend(OLLAMA)
    assert await states(daemon.client) == ["active" if kind is OLLAMA else "inactive" for kind in UNITS]


async def test_however_often_it_is_asked_for(daemon: Daemon) -> None:
    """StartLimitBurst= is 2 here."""
    for _ in range(3):
        await daemon.client.start_backend(LLAMA)
        await daemon.client.start_backend(VLLM)
    assert await states(daemon.client) == ["active" if kind is VLLM else "inactive" for kind in UNITS]


async def test_one_that_does_not_end_is_killed_after_its_grace(daemon: Daemon) -> None:
    """vLLM that works on a request which is no stream waits for ever; the unit would let it for a minute."""
    write(VLLM, STUBBORN)
    reload()
    await daemon.client.start_backend(VLLM)
    pid = (await daemon.client.look_at_backend(VLLM)).pid
    group = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition(":")[2]
    await until(lambda: len(Path(f"/sys/fs/cgroup{group}/cgroup.procs").read_text().split()) == 2)
    await daemon.client.stop_backend(VLLM, grace_s=0.3)
    assert (await daemon.client.look_at_backend(VLLM)).state in ("inactive", "failed")
    assert not Path(f"/proc/{pid}").exists()
    await daemon.client.stop_backend(VLLM, grace_s=0.3)


async def test_what_failed_says_how_and_what_it_wrote(daemon: Daemon) -> None:
    await daemon.client.start_backend(LLAMA)
    while "up\n" not in await daemon.client.backend_log(LLAMA, lines=50):
        await asyncio.sleep(0.01)
    await daemon.client.stop_backend(LLAMA, grace_s=5)
    write(LLAMA, FAILS)
    reload()
    with contextlib.suppress(HiveError):  # it may have ended before systemd has said that it was started
        await daemon.client.start_backend(LLAMA)
    while (found := await daemon.client.look_at_backend(LLAMA)).state == "active":
        await asyncio.sleep(0.01)
    assert (found.state, found.result, found.active_s) == ("failed", "exit-code", None)
    written = await daemon.client.backend_log(LLAMA, lines=20, last_run=True)
    assert "no model here" in written
    assert "up\n" not in written
    assert "up\n" in await daemon.client.backend_log(LLAMA, lines=50)
    assert (
        await ServiceCandidates(daemon.client).why_dead(service(LLAMA))
        == "hive-inference-llama.service failed (exit-code)"
    )


async def test_a_unit_that_is_missing_is_not_found(daemon: Daemon) -> None:
    (FOLDER / UNITS[VLLM]).unlink()
    reload()
    assert (await daemon.client.look_at_backend(VLLM)).state == "missing"
    with pytest.raises(NotFound):
        await daemon.client.start_backend(VLLM)
    await daemon.client.stop_backend(VLLM, grace_s=1)


async def test_there_are_these_and_only_the_daemon_may(
    daemon: Daemon, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hive.sandbox.audit")
    with pytest.raises(BadRequest, match="remote is no service"):
        await daemon.client.start_backend(BackendKind.REMOTE)
    with pytest.raises(BadRequest, match="is not from 0"):
        await daemon.client.stop_backend(VLLM, grace_s=1e9)
    for role in ("proxy", "up"):
        other = Daemon(PATHS, role=role)
        await until(lambda other=other: other.client.connected)  # type: ignore[misc]
        for verb in (
            other.client.start_backend(VLLM),
            other.client.stop_backend(VLLM, grace_s=1),
            other.client.look_at_backend(VLLM),
            other.client.backend_log(VLLM, lines=1),
        ):
            with pytest.raises(NotPermitted):
                await verb
        other.client.close()
    await daemon.client.start_backend(VLLM)
    await until(
        lambda: f"verb=backend_start agent=- name=vllm by=daemon pid={os.getpid()} uid=0 outcome=ok" in caplog.text
    )
    assert "verb=backend_stop agent=- name=vllm by=proxy" in caplog.text


async def test_where_nobody_has_chosen_it_is_the_one_that_runs(daemon: Daemon) -> None:
    services = ServiceCandidates(daemon.client)
    programs = InferenceSection(ollama_program="/none", vllm_program="/bin/true", llama_program="/bin/true")
    found = await services.first(programs)
    assert found is not None
    assert found.kind == VLLM
    await daemon.client.start_backend(LLAMA)
    found = await services.first(programs)
    assert found is not None
    assert found.kind == LLAMA
    await daemon.client.stop_backend(LLAMA, grace_s=1)
    nothing = InferenceSection(ollama_program="/none", vllm_program="/none", llama_program="/none")
    assert await services.first(nothing) is None
    assert [choice.state for choice in await services.listed(None)] == ["inactive"] * len(UNITS)
