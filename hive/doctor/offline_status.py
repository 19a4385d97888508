"""State of a Hive whose daemon does not answer: other sockets that do, what the database says, what systemd says;
and what is wrong by that.

`look_at` looks only: nothing is started, written or waited for longer than a moment. `conditions_of` is pure.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.client.client import Client
from hive.conditions import DISK_LEAST_BYTES, FoundCondition, condition
from hive.doctor.checks.target import Subject, TargetKind, find
from hive.doctor.checks.units import NEEDED
from hive.domain import ALIVE, AgentStatus, RuntimeKind
from hive.errors import HiveError, NotPermitted, TimedOut
from hive.files.layout import TARGET
from hive.host import program, systemd
from hive.host.cgroup import Leaf
from hive.host.files import free_bytes
from hive.paths import api_sockets, runtime_dir
from hive.runtimes.runtime import Run
from hive.sandbox.table import noted_runs
from hive.store import audit, explain, probe, reading
from hive.store.database import plan_of
from hive.terminal_text import counted

ANSWER_S = 1.0
SHOW_S = 2.0
UP, DOWN, UNKNOWN = "up", "down", "unknown"
ENDED = "ended"
"""Status of an agent that the database has as living, and whose process is gone."""
NO_SOCKET = "there is no such socket"
HANGS = "it hangs"
MAY_NOT = "this user may not use it"
DAEMON = "hive-daemon.service"
TARGET_STOPPED = f"{TARGET} is stopped"
SERVICES = {"helper": "sandbox"}
"""Parts whose service has another name."""


class ServicePart(NamedTuple):
    """`state`: `up`, `down`, or `unknown` where this user may not ask. `why`: what came of asking, empty where up.
    `at`: where it was asked."""

    name: str
    state: str
    why: str = ""
    at: str = ""


class UnitStatus(NamedTuple):
    """As systemd has it: `active`, `inactive`, `failed` …; `why`: like `exit-code`, empty for `success`."""

    name: str
    active: str
    why: str


class RecordedStatus(NamedTuple):
    """State by the database. `agents`: status → how many; None where it cannot be read, then `why` says why. What it
    has of those with a process is old, so that is what the kernel says of each: running, paused or `ended`.

    `living`: how many processes of agents live; None where nobody knows, and `agents` is as the database has it.
    `last`: when what happened last, and to whom. `is_cut_short`: a restore of it is to be finished. `may_not`: this
    user may not read it. `damage`: why nobody can, empty where that is not so.
    """

    path: Path
    agents: dict[str, int] | None = None
    living: int | None = None
    last: tuple[float, str, str] | None = None
    why: str = ""
    is_cut_short: bool = False
    may_not: bool = False
    damage: str = ""


class OfflineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`tried`: path of a socket → what came of it. `state`: its directory, None where nobody knows one.

    `held_by`: pid of the `hive up` that runs on it (0: some process of one), None where none does. `units`: None where
    systemd has nothing to do with it. `free_bytes`: for state, None where nobody knows. `is_missing`: the state
    directory that was named is not there. `up_flags`: how a `hive up` of it was started last.
    """

    kind: TargetKind
    tried: dict[str, str] = {}
    state: Path | None = None
    held_by: int | None = None
    parts: list[ServicePart] = []
    units: list[UnitStatus] | None = None
    recorded: RecordedStatus | None = None
    free_bytes: int | None = None
    is_missing: bool = False
    up_flags: str = ""


def look(*, socket: Path | None, state_dir: Path | None, uid: int, env: dict[str, str]) -> OfflineStatus:
    """Of the Hive that is meant (as in hive.paths.api_sockets). Raises nothing."""
    subject = find(socket=socket, state_dir=state_dir, uid=uid, env=env)
    try:
        sockets = api_sockets(socket=socket, state_dir=state_dir, uid=uid, env=env)
    except NotPermitted as error:
        return OfflineStatus(kind=subject.kind, tried={str(runtime_dir(state_dir, uid, env)): error.message})
    return msgspec.structs.replace(look_at(subject), tried={str(path): _try(path) for path in sockets})


def look_at(subject: Subject) -> OfflineStatus:
    """Of one that was found already. Raises nothing."""
    if (paths := subject.paths) is None:
        return OfflineStatus(kind=subject.kind)
    return OfflineStatus(
        kind=subject.kind,
        state=paths.state,
        held_by=None if subject.is_appliance else _holder(paths.state / "up.lock"),
        parts=[_proxy(paths.admin_socket), _part("helper", paths.sandbox_socket), _redis(subject)],
        units=_units() if subject.is_appliance and systemd.is_booted() else None,
        recorded=_recorded(paths.database, paths.sandbox_table),
        free_bytes=free_bytes(paths.state),
        is_missing=subject.is_missing,
        up_flags=subject.up_flags,
    )


def conditions_of(seen: OfflineStatus, code: str) -> list[FoundCondition]:
    """Conditions, a cause before its effects. `code`: of the error with which the daemon did not answer."""
    return list(_conditions_of(seen, code))


def _conditions_of(seen: OfflineStatus, code: str) -> Iterator[FoundCondition]:
    if code == "not_permitted":
        yield condition("daemon_refuses")
        return
    if seen.kind is TargetKind.NONE:
        yield condition("no_hive")
        return
    if seen.is_missing and seen.held_by is None:
        yield condition("no_state_directory", path=seen.state)
        return
    yield from _of_database(seen.recorded)
    if seen.free_bytes is not None and seen.free_bytes < DISK_LEAST_BYTES:
        yield condition("disk_nearly_full", path=seen.state, free_bytes=seen.free_bytes)
    daemon = _of_daemon(seen, code)
    yield daemon
    is_stopped = daemon.code in ("not_running", "daemon_stopped")
    for unit in seen.units or ():
        # Who starts all of it starts those that only do not run.
        is_wrong = unit.active != "active" and not (unit.active == "inactive" and is_stopped)
        if is_wrong and unit.name != DAEMON:
            yield _of_unit("unit_not_active", unit)
    if seen.held_by is None and seen.recorded is not None and seen.recorded.living:
        yield condition("agents_without_hive", count=seen.recorded.living)
    if seen.units is None and seen.held_by is not None:
        for part in seen.parts:
            if part.state == DOWN:
                code = "redis_down" if part.name == "redis" else "part_down"
                service = SERVICES.get(part.name, part.name)
                yield condition(code, part=part.name, service=service, at=part.at, why=part.why)


def _of_daemon(seen: OfflineStatus, code: str) -> FoundCondition:
    unit = next((unit for unit in seen.units or () if unit.name == DAEMON), None)
    if code == "timeout":
        return condition("daemon_hangs", why="")
    if unit is not None and unit.active == "inactive":
        stands_alone = any(other.active == "active" for other in seen.units or ())
        return _of_unit("daemon_stopped", unit) if stands_alone else condition("not_running", why=TARGET_STOPPED)
    if unit is not None:
        return _of_unit("unit_not_active", unit)
    if seen.held_by is not None:
        holder = f"hive up (pid {seen.held_by})" if seen.held_by else "a hive up"
        return condition("daemon_ended", holder=holder)
    if seen.recorded is not None and seen.recorded.may_not:
        return condition("not_running_as_seen")
    return condition("not_running", why=_why_ended(seen.recorded))


def _why_ended(recorded: RecordedStatus | None) -> str:
    """Empty where it was ended in order, as far as one can see: then agents are on record as stopped."""
    ended = 0 if recorded is None or recorded.agents is None else recorded.agents.get(ENDED, 0)
    return f"{counted(ended, 'agent')} ended with it" if ended else ""


def _of_unit(code: str, unit: UnitStatus) -> FoundCondition:
    name = unit.name.removesuffix(".service")
    return condition(code, unit=unit.name, name=name, state=unit.active, why=unit.why)


def _of_database(recorded: RecordedStatus | None) -> Iterator[FoundCondition]:
    if recorded is None or not recorded.why or recorded.may_not:
        return
    if recorded.is_cut_short:
        yield condition("restore_cut_short", path=recorded.path)
    elif recorded.damage:
        yield condition("database_damaged", path=recorded.path, why=recorded.damage)
    else:
        yield condition("database_unreadable", path=recorded.path, why=recorded.why)


def _try(path: Path) -> str:
    return _silent(path) or "somebody listens there"


def _silent(path: Path) -> str:
    """Reason that this user cannot connect to a socket; empty if there is none. An installed Hive has a link to
    the daemon's socket there."""
    try:
        path.stat()
    except PermissionError:
        return MAY_NOT
    except OSError:
        return NO_SOCKET
    if not os.access(path, os.W_OK):
        return MAY_NOT
    return "" if Client(path).answers(within_s=ANSWER_S) else "nobody listens there"


def _part(name: str, path: Path) -> ServicePart:
    why = _silent(path)
    return ServicePart(name, {"": UP, MAY_NOT: UNKNOWN}.get(why, DOWN), why, str(path))


def _proxy(path: Path) -> ServicePart:
    part = _part("proxy", path)
    if part.why:
        return part
    try:
        Client(path, timeout_s=ANSWER_S).get("/readyz")
    except TimedOut:
        return part._replace(state=DOWN, why=HANGS)
    except HiveError:
        return part._replace(why="it drains, or does not listen yet")
    return part


def _redis(subject: Subject) -> ServicePart:
    if subject.env.get("REDIS_URL"):
        return ServicePart("redis", UNKNOWN, "it is that of REDIS_URL")
    assert subject.redis_socket is not None
    part = _part("redis", subject.redis_socket)
    if part.why:
        return part
    try:
        (said,) = probe.ask(subject.redis_socket, ["PING"], within_s=ANSWER_S)
    except OSError:
        return part._replace(state=DOWN, why=HANGS)
    is_up = said == "+PONG" or said.startswith("-NOAUTH")
    return part if is_up else part._replace(state=DOWN, why=said[1:61])


def _units() -> list[UnitStatus] | None:
    """None where systemd cannot be asked."""
    properties = ("Id", "ActiveState", "Result")
    try:
        ran = program.run(
            ["systemctl", "show", *NEEDED, *(f"--property={name}" for name in properties)], limit_s=SHOW_S
        )
    except HiveError:
        return None
    shown = [systemd.parse_show(block) for block in ran.text.split("\n\n")] if ran.code == 0 else []
    found = [UnitStatus(*(unit.get(name, "") for name in properties)) for unit in shown]
    return [unit._replace(why="" if unit.why == "success" else unit.why) for unit in found] or None


def _holder(lock: Path) -> int | None:
    """Pid of the `hive up` that has it, 0 where that is not known; None where nobody has."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
    finally:
        os.close(fd)
    return None


def _recorded(path: Path, table: Path) -> RecordedStatus | None:
    """None where there is no database."""
    try:
        if not path.exists():
            return None
        if plan_of(path).exists():
            return RecordedStatus(path, why="a restore of it was cut short", is_cut_short=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with reading.opened(path) as conn:
            agents = conn.execute("SELECT id, runtime, status FROM agents").fetchall()
            acts = audit.tail(conn, 1)
    except PermissionError:
        return RecordedStatus(path, why="this user may not read it", may_not=True)
    except sqlite3.Error as error:
        damage = str(error) if explain.is_corrupt(error) else ""
        return RecordedStatus(path, why=explain.sqlite_error(error, path).message, damage=damage)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return RecordedStatus(path, why=str(error))
    last = acts[-1] if acts else None
    found = _of_processes(table)
    has_process = {
        str(agent) for agent, runtime, status in agents if runtime != RuntimeKind.EXTERNAL and status in ALIVE
    }
    statuses = [
        str(status) if found is None or agent not in has_process else found.get(agent, ENDED)
        for agent, _, status in agents
    ]
    return RecordedStatus(
        path,
        agents=dict(sorted(Counter(statuses).items())),
        living=None if found is None else sum(found.get(agent, ENDED) != ENDED for agent in has_process),
        last=None if last is None else (last.at, last.act, str(last.detail.get("name") or last.target)),
    )


def _of_processes(table: Path) -> dict[str, str] | None:
    """Agent → the status of its main process by the kernel, of each that the helper has started; None where it has
    noted none yet, or this user may not read what it notes."""
    if not os.access(table, os.R_OK | os.X_OK):
        return None
    try:
        runs = noted_runs(table)
    except HiveError:
        return None
    return {agent: _of_process(run) for agent, run in runs.items()}


def _of_process(run: Run | None) -> str:
    stat = None if run is None else run.main.stat()
    if run is None or stat is None or not stat.alive:
        return ENDED
    is_frozen = stat.state == "T" if run.leaf is None else Leaf(Path(run.leaf)).is_frozen()
    return str(AgentStatus.PAUSED if is_frozen else AgentStatus.RUNNING)
