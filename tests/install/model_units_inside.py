"""Run as root under a real systemd: hive-model@.service with the helper's own code; the server is a stand-in.

Writes what it saw as JSON to the file it is given; test_model_units.py judges that.
"""

# ruff: noqa: ASYNC110, ASYNC240 - other processes send no asyncio events; this loop may wait for its disk
from __future__ import annotations

import asyncio
import json
import os
import signal
import site
import socket
import sys
from pathlib import Path
from typing import Any

from hive.errors import HiveError
from hive.link.slots import AskSlotLog, AskSlots, ProcessState, SlotGrant, SlotPrepare, SlotProcess, SlotStart, SlotStop
from hive.settings.table import Paths
from hive.slots.model_slots import ModelSlots
from hive.slots.slot_units import SlotUnits
from tests.install.inference_units_inside import install, run
from tests.install.lease_scopes_inside import scopes

A, B, C = "model-a-00000001", "b-00000002", "c-00000003"
PATHS = Paths(Path("/var/lib/hive"), Path("/run/hive"), apart=True)
PIDS = Path("/var/lib/hive/inference/pids")
FLAGS = Path("/srv/flags")
WITHIN_S = 240
"""Then what was seen until now is told, with the journal."""
GRANT = SlotGrant(accounts={"cpu": 700})
HIVE = """#!/bin/sh
# A stand-in for `hive run-model`: the real supervisor of a scripted server.
exec python3 -P /srv/hive/tests/install/scripted_model.py "$@"
"""


class Told:
    """A daemon that hears everything. `moved` is what it was told."""

    def __init__(self) -> None:
        self.moved: list[SlotProcess] = []
        self.is_there = True

    def __call__(self, process: SlotProcess) -> bool:
        if self.is_there:
            self.moved.append(process)
        return self.is_there

    async def until(self, slot: str, state: ProcessState) -> SlotProcess:
        while True:
            for process in reversed(self.moved):
                if (process.id, process.state) == (slot, state):
                    return process
                if (process.id, process.state) == (slot, ProcessState.ENDED):
                    raise AssertionError(f"{slot} has ended: {process}")
            await asyncio.sleep(0.05)


async def helper(told: Told) -> ModelSlots:
    slots = ModelSlots(PATHS, SlotUnits(PATHS), lambda: {A, B, C})
    await slots.open(told)
    return slots


async def ask(slots: ModelSlots, message: Any) -> Any:
    return await slots.do(message, for_daemon=True)


async def start(slots: ModelSlots, slot: str) -> SlotProcess:
    """The process that the answer to its start tells of."""
    process: SlotProcess = (await ask(slots, SlotStart(id=slot, grant=GRANT))).process
    return process


async def comes_up(told: Told, begun: SlotProcess) -> SlotProcess:
    """The process once it serves. The daemon is told of that only where the answer to its start did not say so."""
    return begun if begun.state is ProcessState.SERVING else await told.until(begun.id, ProcessState.SERVING)


def flags(slot: str, *words: str) -> None:
    (FLAGS / slot).write_text(" ".join(words))


def alive() -> list[int]:
    """Servers and what came of them, of those that ever ran."""
    pids = [int(line) for line in PIDS.read_text().split()] if PIDS.exists() else []
    return [pid for pid in pids if Path("/proc", str(pid)).exists()]


def state(slot: str) -> str:
    return run("systemctl", "is-active", f"hive-model@{slot}.service")


def say(slot: str, script: str) -> None:
    """Sends the server a message, and does not wait for its answer."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(PATHS.slot_socket(slot)))
        body = json.dumps({"messages": [{"role": "user", "content": script}]}).encode()
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        caller.recv(1)


def told_of(process: SlotProcess) -> dict[str, Any]:
    return {"state": str(process.state), "code": process.exit_code, "why": process.why, "last": process.last} | {
        "was_oom": process.was_oom,
        "pid": process.pid,
        "pids": process.pids,
        "bytes": process.bytes,
        "cpu_s": process.cpu_s,
        "run": process.run,
        "age_s": process.age_s,
        "grant": None if process.grant is None else process.grant.accounts,
    }


def writes(pid: int) -> dict[str, str]:
    """Outcomes of writing in the directories of sockets as the unit of this process sees them, its own and others: as
    root there, so that only what it cannot see or change keeps it off."""
    other = PATHS.slot_sockets / "other"
    other.mkdir()
    there = [PATHS.slot_socket(A).parent, other, PATHS.slot_sockets, PATHS.slot_socket_before(A).parent]
    said = {
        str(path): run(
            "nsenter", "-t", str(pid), "-m", "sh", "-c", f"touch {path}/new 2>&1 && rm {path}/new && echo yes"
        )
        for path in there
    }
    other.rmdir()
    return said


async def life(slots: ModelSlots, told: Told, seen: dict[str, Any]) -> None:
    """Start, serve, look, log, stop."""
    flags(A, "--child", "setsid")
    begun = await start(slots, A)
    serving = await comes_up(told, begun)
    (now,) = (await ask(slots, AskSlots())).processes
    seen["life"] = {"begun": told_of(begun), "serving": told_of(serving), "now": told_of(now), "unit": state(A)}
    seen["life"]["again"] = told_of(await start(slots, A))
    seen["life"]["log"] = (await ask(slots, AskSlotLog(id=A, lines=50))).text
    seen["life"]["socket"] = oct(PATHS.slot_socket(A).stat().st_mode)
    seen["life"]["writes"] = writes(now.pid)
    await ask(slots, SlotStop(id=A, grace_s=20))
    seen["life"]["directories"] = sorted(path.name for path in PATHS.slot_sockets.iterdir())
    seen["life"]["ended"] = told_of(await told.until(A, ProcessState.ENDED))
    seen["life"]["left"] = [alive(), state(A), sorted(path.name for path in PATHS.slot_grants.iterdir())]


async def ends(slots: ModelSlots, told: Told, seen: dict[str, Any]) -> None:
    """A crash, a server that does not come up, a kill of the supervisor."""
    flags(A)
    for name, what in (("crash", "server"), ("killed", "supervisor")):
        told.moved.clear()
        serving = await comes_up(told, await start(slots, A))
        os.kill(serving.pid if what == "supervisor" else alive()[0], signal.SIGKILL)
        seen[name] = told_of(await told.until(A, ProcessState.ENDED)) | {"left": alive()}
        seen[name]["restarts"] = run("systemctl", "show", f"hive-model@{A}", "--property=NRestarts", "--value")
    flags(B, "--crash-at-start", "3")
    await start(slots, B)
    seen["not up"] = told_of(await told.until(B, ProcessState.ENDED)) | {
        "states": [str(process.state) for process in told.moved if process.id == B]
    }


async def stops(slots: ModelSlots, told: Told, seen: dict[str, Any]) -> None:
    """One that ignores SIGTERM behind a supervisor that stands still; one that is just starting."""
    flags(A, "--ignore-term", "--child", "setsid", "--child", "double")
    told.moved.clear()
    serving = await comes_up(told, await start(slots, A))
    os.kill(serving.pid, signal.SIGSTOP)
    await ask(slots, SlotStop(id=A, grace_s=0.2))
    seen["stubborn"] = [alive(), state(A)]
    os.mkfifo("/srv/gate", 0o666)
    os.chmod("/srv/gate", 0o666)
    flags(A, "--wait-for", "/srv/gate")
    told.moved.clear()
    await start(slots, A)
    await ask(slots, SlotStop(id=A, grace_s=5))
    seen["while it starts"] = [alive(), state(A), [str(process.state) for process in told.moved]]


async def memory(slots: ModelSlots, told: Told, seen: dict[str, Any]) -> None:
    """A limit on the unit, and a server that needs more."""
    flags(A)
    told.moved.clear()
    await comes_up(told, await start(slots, A))
    group = Path("/sys/fs/cgroup" + run("systemctl", "show", f"hive-model@{A}", "--property=ControlGroup", "--value"))
    if not (group / "memory.max").exists():
        seen["oom"] = None
        await ask(slots, SlotStop(id=A, grace_s=5))
        return
    run("systemctl", "set-property", "--runtime", f"hive-model@{A}", "MemoryMax=96M", "MemorySwapMax=0")
    await asyncio.to_thread(say, A, "eat 300")
    seen["oom"] = told_of(await told.until(A, ProcessState.ENDED)) | {"left": alive()}


async def helpers(first: ModelSlots, seen: dict[str, Any]) -> None:
    """The helper goes, the server stays; one serves, one is loading, one ends meanwhile."""
    flags(A)
    flags(B, "--wait-for", "/srv/gate")
    flags(C)
    for slot in (A, B, C):
        await start(first, slot)
    while state(A) != "active" or state(C) != "active":
        await asyncio.sleep(0.05)
    first.close()
    before = {
        slot: run("systemctl", "show", f"hive-model@{slot}", "--property=MainPID", "--value") for slot in (A, B, C)
    }
    os.kill(int(before[C]), signal.SIGKILL)
    while state(C) != "failed":
        await asyncio.sleep(0.05)
    told = Told()
    second = await helper(told)
    found = {process.id: told_of(process) for process in (await ask(second, AskSlots())).processes}
    ended = await told.until(C, ProcessState.ENDED) if C not in found or found[C]["state"] != "ended" else None
    Path("/srv/gate").write_text("go")
    await told.until(B, ProcessState.SERVING)
    seen["adopted"] = {
        "before": before,
        "found": found,
        "C": found[C] if ended is None else told_of(ended),
        "grants": sorted(path.name for path in PATHS.slot_grants.iterdir()),
    }
    for slot in (A, B):
        await ask(second, SlotStop(id=slot, grace_s=5))
    seen["adopted"]["left"] = alive()
    second.close()


async def prepared(first: ModelSlots, told: Told, seen: dict[str, Any]) -> None:
    """One that waits: started, forgotten, killed, and left by its helper."""
    flags(A)
    told.moved.clear()
    waiting = await waits(first, A)
    begun = await start(first, A)
    serving = await comes_up(told, begun)
    log = (await ask(first, AskSlotLog(id=A, lines=50))).text
    await ask(first, SlotStop(id=A, grace_s=5))
    seen["prepared"] = {
        "waiting": waiting,
        "pids": [begun.pid, serving.pid],
        "grant": told_of(begun)["grant"],
        "log": log,
        "left": [alive(), state(A)],
    }
    await waits(first, A)
    await ask(first, SlotPrepare(id=B))  # another one instead
    seen["prepared"]["replaced"] = state(A)
    await ask(first, SlotPrepare(id=""))
    seen["prepared"]["dropped"] = [state(B), names()]
    ended = {}
    for name in ("without its mark", "killed"):
        pid = (await waits(first, A))["pid"]
        if name == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            (PATHS.slot_grants / f"{A}.awaited").unlink()
        while state(A) == "activating" or names():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        ended[name] = state(A)
    seen["prepared"]["ended"] = ended
    await waits(first, A)
    for task in [each for each in asyncio.all_tasks() if each.get_name() in ("prepared slot", "start model")]:
        task.cancel()  # as with kill -9: its mark stays
    second = await helper(told)
    seen["prepared"]["next helper"] = [(await ask(second, AskSlots())).processes, state(A), names()]
    second.close()


async def waits(slots: ModelSlots, slot: str) -> dict[str, Any]:
    """Has one wait for its grant."""
    await ask(slots, SlotPrepare(id=slot))
    pid = int(run("systemctl", "show", f"hive-model@{slot}", "--property=MainPID", "--value"))
    return {"pid": pid, "unit": state(slot), "grants": names(), "told": (await ask(slots, AskSlots())).processes}


def names() -> list[str]:
    return sorted(path.name for path in PATHS.slot_grants.iterdir())


async def refused(slots: ModelSlots, seen: dict[str, Any]) -> None:
    Path("/etc/systemd/system/hive-model@.service").unlink()
    run("systemctl", "daemon-reload")
    try:
        await start(slots, C)
    except HiveError as error:
        seen["no unit"] = [type(error).__name__, error.message, list(PATHS.slot_grants.iterdir())]


async def all_of_it(seen: dict[str, Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        await _all_of_it(seen)


async def _all_of_it(seen: dict[str, Any]) -> None:
    await scopes(PATHS, seen)
    told = Told()
    slots = await helper(told)
    await life(slots, told, seen)
    await ends(slots, told, seen)
    await stops(slots, told, seen)
    await memory(slots, told, seen)
    other = Told()
    await prepared(await helper(other), other, seen)
    await helpers(slots, seen)
    told = Told()
    await refused(await helper(told), seen)


def main(report: Path) -> None:
    install()
    Path("/opt/hive/current/bin/hive").write_text(HIVE)
    # The warden is started with -I, which knows no PYTHONPATH.
    Path(site.getsitepackages()[0], "hive.pth").write_text("/srv/packages\n/srv/hive\n")
    FLAGS.mkdir()
    seen: dict[str, Any] = {}
    try:
        asyncio.run(all_of_it(seen))
    finally:
        seen["journal"] = run("journalctl", "--boot", "--no-pager", "-o", "cat")
        report.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
