"""The services that run inference servers, started and stopped for the daemon: these and no others.

The message names a kind, never a unit: a daemon that was taken over cannot ask for another one.
"""

from __future__ import annotations

import asyncio
import time

from hive.domain import BackendKind
from hive.errors import BadRequest, DependencyDown
from hive.host import systemd
from hive.link.helper import AskBackend, AskBackendLog, BackendIs, BackendLog, BackendStart, BackendStop
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.slots.unit_groups import UnitGroups

UNITS: dict[BackendKind, str] = {
    BackendKind.OLLAMA: "hive-inference.service",
    BackendKind.VLLM: "hive-inference-vllm.service",
    BackendKind.LLAMA: "hive-inference-llama.service",
    BackendKind.DEMO: "hive-inference-demo.service",
}
VERBS: frozenset[type[LinkMessage]] = frozenset({BackendStart, BackendStop, AskBackend, AskBackendLog})
GRACE_MAX_S = 300.0
LOG_LINES_MAX = 10_000
BEGAN = "InactiveExitTimestampMonotonic"
"""The property with the time of the last start."""
CLOCKS_S = 0.001
"""Two clocks are read one after the other."""
_SHOWN = (
    *("LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "ActiveEnterTimestampMonotonic"),
    "ControlGroup",
)


def unit_of(kind: BackendKind) -> str:
    """Raises BadRequest for a kind that is no service."""
    if kind not in UNITS:
        raise BadRequest(f"{kind} is no service of Hive's; there are {', '.join(UNITS)}")
    return UNITS[kind]


async def do(message: LinkMessage) -> LinkMessage:
    """Carries out one of VERBS. Raises BadRequest, NotFound, DependencyDown, TimedOut, HiveError (systemd's words)."""
    match message:
        case BackendStart(kind=kind):
            await systemd.start_unit(unit_of(kind))
            return Done()
        case BackendStop(kind=kind, grace_s=grace_s):
            if not 0 <= grace_s <= GRACE_MAX_S:
                raise BadRequest(f"a grace of {grace_s:g} s is not from 0 to {GRACE_MAX_S:g}")
            await systemd.end_unit(unit_of(kind), grace_s=grace_s)
            return Done()
        case AskBackend(kind=kind):
            return await _look(unit_of(kind))
        case AskBackendLog(kind=kind, lines=lines, last_run=last_run):
            return BackendLog(text=await _log(unit_of(kind), max(1, min(lines, LOG_LINES_MAX)), last_run=last_run))
    raise BadRequest(f"{type(message).__name__} is not about an inference server")


async def _look(unit: str) -> BackendIs:
    if not systemd.is_booted():
        raise DependencyDown("systemd is not PID 1 here, so no inference server is a service")
    shown = await systemd.show(unit, *_SHOWN)
    state = "missing" if shown.get("LoadState") == "not-found" else shown.get("ActiveState", "")
    since = shown.get("ActiveEnterTimestampMonotonic", "") if state == "active" else ""
    pid, group = int(shown.get("MainPID", "0")), shown.get("ControlGroup", "")
    use = await asyncio.to_thread(UnitGroups.of(group).use, pid) if pid and group else None
    return BackendIs(
        unit=unit,
        state=state,
        substate=shown.get("SubState", ""),
        result=shown.get("Result", ""),
        pid=pid,
        restarts=int(shown.get("NRestarts", "0")),
        active_s=systemd.seconds_since(since),
        pids=[] if use is None else use.pids,
        bytes=None if use is None else use.bytes,
    )


async def _log(unit: str, lines: int, *, last_run: bool) -> str:
    """`last_run`: only of its last start. Where systemd has started it again by itself, why is in what was before."""
    shown = await systemd.show(unit, BEGAN, "NRestarts") if last_run else {}
    ago_s = systemd.seconds_since(shown.get(BEGAN, "")) if shown.get("NRestarts", "0") == "0" else None
    return await systemd.read_service(
        unit, lines=lines, since=None if ago_s is None else time.time() - ago_s - CLOCKS_S
    )
