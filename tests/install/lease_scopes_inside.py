"""Holders of leases as scopes of a real systemd, with the helper's own code: a part of model_units_inside.py."""

# ruff: noqa: ASYNC110, ASYNC220 - other processes send no asyncio events; this loop may wait for its disk
from __future__ import annotations

import asyncio
import grp
import json
import os
import secrets
import signal
import subprocess
import sys
from typing import Any

from hive.holders.group_places import ScopePlaces, scope_of
from hive.holders.lease_holders import LeaseHolders
from hive.host import systemd_call
from hive.link.leases import AskLeases, HolderState, LeaseEnd, LeaseExpect, LeaseForget, LeaseGrant, LeaseHolder
from hive.settings.table import Paths
from tests.install.inference_units_inside import run

COME_IN = """
import json, os, sys
from pathlib import Path
from hive.client.lease_entry import enter
from hive.errors import HiveError
os.setgroups([int(sys.argv[4])] if int(sys.argv[4]) else [])
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
try:
    answer = enter(Path(sys.argv[1]), sys.argv[2])
except HiveError as error:
    answer = {"code": error.code}
print(json.dumps(answer | {"pid": os.getpid(), "group": open("/proc/self/cgroup").read()}), flush=True)
if "code" in answer:
    sys.exit(9)
os.execvp("python3", ["python3", "-S", "-c", sys.argv[5]])
"""
FAMILY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    held = os.urandom(20 << 20)
time.sleep(1000)
"""
"""Leaves a grandchild in a session of its own whose parent has ended, and which holds memory."""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


class Holders:
    """A helper's part, with what it told."""

    def __init__(self, paths: Paths, group: int) -> None:
        self.told: list[LeaseHolder] = []
        self.holders = LeaseHolders(paths, [ScopePlaces()], group=group)

    async def open(self) -> None:
        await self.holders.open(self.told.append, lambda *_: None)

    async def ask(self, message: Any) -> Any:
        answer = self.holders.do(message)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def until(self, id: str, state: HolderState) -> LeaseHolder:
        while True:
            for holder in (await self.ask(AskLeases())).holders:
                if holder.id == id and holder.state is state:
                    return holder  # type: ignore[no-any-return]
            await asyncio.sleep(0.02)


async def come_in(
    holders: Holders, paths: Paths, id: str, program: str, *, uid: int = 0, group: int = 0, granted: int | None = None
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    nonce = secrets.token_hex(16)
    granted = uid if granted is None else granted
    grant = LeaseGrant(id=id, token=int(id[2:]), nonce=nonce, uid=granted, accounts={"cpu": 100})
    await holders.ask(LeaseExpect(grant=grant))
    words = [sys.executable, "-P", "-c", COME_IN, str(paths.lease_socket), nonce, str(uid), str(group), program]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(await asyncio.to_thread(process.stdout.readline))


def active(id: str) -> str:
    return run("systemctl", "is-active", scope_of(id))


async def scopes(paths: Paths, seen: dict[str, Any]) -> None:
    """A holder of its own user in a scope; its end, an end by force, a stranger, a new helper, a scope that is in the
    way."""
    paths.lease_records.parent.mkdir(parents=True, exist_ok=True)
    paths.lease_socket.parent.mkdir(parents=True, exist_ok=True)
    people = grp.getgrnam("users").gr_gid
    first = Holders(paths, people)
    await first.open()
    found: dict[str, Any] = seen.setdefault("leases", {})
    mode = paths.lease_socket.stat()
    found["socket"] = [oct(mode.st_mode)[-3:], mode.st_gid == people]

    process, answer = await come_in(first, paths, "l-1", FAMILY, uid=1234, group=people)
    found["in"] = answer
    running = await first.until("l-1", HolderState.RUNNING)
    while len(running.pids) < 2 or not running.bytes or running.bytes < 20 << 20:
        await asyncio.sleep(0.05)
        running = await first.until("l-1", HolderState.RUNNING)
    found["running"] = [active("l-1"), running.held_by, running.pid == process.pid, len(running.pids), running.bytes]
    found["tasks"] = run("systemctl", "show", scope_of("l-1"), "--property=TasksMax", "--property=Slice")

    process.kill()
    await asyncio.to_thread(process.wait)
    await asyncio.sleep(0.3)
    left = await first.until("l-1", HolderState.RUNNING)
    found["left"] = len(left.pids)

    first.holders.close()  # a helper that was killed says nothing to anybody
    second = Holders(paths, people)
    await second.open()
    adopted = await second.until("l-1", HolderState.RUNNING)
    found["adopted"] = [adopted.pids == left.pids, adopted.grant == left.grant]
    os.kill(left.pids[0], signal.SIGSTOP)
    await second.ask(LeaseEnd(id="l-1", why="it is over", grace_s=20))
    ended = await second.until("l-1", HolderState.ENDED)
    found["ended"] = [ended.why, active("l-1")]
    await second.ask(LeaseForget(id="l-1"))

    stubborn, _ = await come_in(second, paths, "l-2", STUBBORN)
    await asyncio.sleep(0.3)  # it has to ignore the signal by then; if not, the test is only easier
    await second.ask(LeaseEnd(id="l-2", why="now", grace_s=0.2))
    await second.until("l-2", HolderState.ENDED)
    found["killed"] = [await asyncio.to_thread(stubborn.wait), active("l-2")]

    stranger, refused = await come_in(second, paths, "l-3", FAMILY, uid=1234, group=people, granted=0)
    found["stranger"] = [refused["code"], await asyncio.to_thread(stranger.wait), active("l-3")]
    outsider, refused = await come_in(second, paths, "l-4", FAMILY, uid=1234)
    found["outsider"] = [refused["code"], await asyncio.to_thread(outsider.wait)]

    other = subprocess.Popen(["sleep", "1000"])
    systemd_call.start_scope(scope_of("l-5"), [("Slice", "s", "system.slice"), ("PIDs", "au", [other.pid])])
    while active("l-5") != "active":
        await asyncio.sleep(0.02)
    late, refused = await come_in(second, paths, "l-5", FAMILY)
    found["in the way"] = [refused["code"], await asyncio.to_thread(late.wait), other.poll()]
    other.kill()
    await asyncio.to_thread(other.wait)

    stopped, _ = await come_in(second, paths, "l-6", "import time; time.sleep(1000)")
    run("systemctl", "stop", scope_of("l-6"))
    ended = await second.until("l-6", HolderState.ENDED)
    found["stopped"] = [await asyncio.to_thread(stopped.wait), ended.why]
    second.holders.close()
    found["units"] = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "hive-lease-*.scope")
