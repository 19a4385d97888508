"""What can be seen of a Hive whose daemon does not answer: who else does, what the database says, what systemd says.

Looks only: nothing is started, written or waited for longer than a moment.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.appliance.checks.subject import Kind, Subject, find
from hive.appliance.checks.units import NEEDED
from hive.control.client import Client
from hive.errors import HiveError, NotPermitted, TimedOut
from hive.host import program, systemd
from hive.places import api_sockets, missing, runtime_dir
from hive.store import audit, explain, probe, reading
from hive.store.database import plan_of

ANSWER_S = 1.0
SHOW_S = 2.0
UP, DOWN, UNKNOWN = "up", "down", "unknown"
NO_SOCKET = "there is no such socket"
HANGS = "it hangs"
MAY_NOT = "this user may not use it"


class Part(NamedTuple):
    """`state`: `up`, `down`, or `unknown` where this user may not ask. `why`: what came of asking, empty where up."""

    name: str
    state: str
    why: str = ""


class Unit(NamedTuple):
    """As systemd has it: `active`, `inactive`, `failed` …; `why`: like `exit-code`, empty for `success`."""

    name: str
    active: str
    why: str


class Recorded(NamedTuple):
    """What the database says. `agents`: status → how many; None where it cannot be read, then `why` says why.

    `last`: when what happened last, and to whom. `is_cut_short`: a restore of it is to be finished. `may_not`: this
    user may not read it. `is_damaged`: nobody can.
    """

    path: Path
    agents: dict[str, int] | None = None
    last: tuple[float, str, str] | None = None
    why: str = ""
    is_cut_short: bool = False
    may_not: bool = False
    is_damaged: bool = False


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """`tried`: path of a socket → what came of it. `state`: its directory, None where nobody knows one.

    `held_by`: pid of the `hive up` that runs on it (0: some process of one), None where none does. `units`: None where
    systemd has nothing to do with it. `free_bytes`: for state, None where nobody knows. `missing`: a sentence where the
    state directory that was named is not there.
    """

    kind: Kind
    tried: dict[str, str]
    state: Path | None = None
    held_by: int | None = None
    parts: list[Part] = []
    units: list[Unit] | None = None
    recorded: Recorded | None = None
    free_bytes: int | None = None
    missing: str = ""


def look(*, socket: Path | None, state_dir: Path | None, uid: int, env: dict[str, str]) -> Standing:
    """Of the Hive that is meant (as in hive.places.api_sockets). Raises nothing."""
    subject = find(socket=socket, state_dir=state_dir, uid=uid, env=env)
    try:
        sockets = api_sockets(socket=socket, state_dir=state_dir, uid=uid, env=env)
    except NotPermitted as error:
        return Standing(kind=subject.kind, tried={str(runtime_dir(state_dir, uid, env)): error.message})
    told: dict[str, Any] = {"kind": subject.kind, "tried": {str(path): _try(path) for path in sockets}}
    if (paths := subject.paths) is None:
        return Standing(**told)
    return Standing(
        state=paths.state,
        held_by=None if subject.is_appliance else _holder(paths.state / "up.lock"),
        parts=[_proxy(paths.admin_socket), _part("helper", _silent(paths.sandbox_socket)), _redis(subject)],
        units=_units() if subject.is_appliance and systemd.is_booted() else None,
        recorded=_recorded(paths.database),
        free_bytes=_free_bytes(paths.state),
        missing=missing(None if socket else state_dir),
        **told,
    )


def _try(path: Path) -> str:
    return _silent(path) or "somebody listens there"


def _silent(path: Path) -> str:
    """Why this user cannot connect to a socket; empty where he can. An installed Hive's is a link to the daemon's."""
    try:
        path.stat()
    except PermissionError:
        return MAY_NOT
    except OSError:
        return NO_SOCKET
    if not os.access(path, os.W_OK):
        return MAY_NOT
    return "" if Client(path).answers(within_s=ANSWER_S) else "nobody listens there"


def _part(name: str, why: str) -> Part:
    return Part(name, {"": UP, MAY_NOT: UNKNOWN}.get(why, DOWN), why)


def _proxy(path: Path) -> Part:
    if why := _silent(path):
        return _part("proxy", why)
    try:
        Client(path, timeout_s=ANSWER_S).get("/readyz")
    except TimedOut:
        return Part("proxy", DOWN, HANGS)
    except HiveError:
        return Part("proxy", UP, "it drains, or does not listen yet")
    return Part("proxy", UP)


def _redis(subject: Subject) -> Part:
    if subject.env.get("REDIS_URL"):
        return Part("redis", UNKNOWN, "it is that of REDIS_URL")
    assert subject.redis_socket is not None
    if why := _silent(subject.redis_socket):
        return _part("redis", why)
    try:
        (said,) = probe.ask(subject.redis_socket, ["PING"], within_s=ANSWER_S)
    except OSError:
        return Part("redis", DOWN, HANGS)
    is_up = said == "+PONG" or said.startswith("-NOAUTH")
    return Part("redis", UP) if is_up else Part("redis", DOWN, said[1:61])


def _units() -> list[Unit] | None:
    """None where systemd cannot be asked."""
    properties = ("Id", "ActiveState", "Result")
    try:
        ran = program.run(
            ["systemctl", "show", *NEEDED, *(f"--property={name}" for name in properties)], limit_s=SHOW_S
        )
    except HiveError:
        return None
    shown = [systemd.parse_show(block) for block in ran.text.split("\n\n")] if ran.code == 0 else []
    found = [Unit(*(unit.get(name, "") for name in properties)) for unit in shown]
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


def _recorded(path: Path) -> Recorded | None:
    """None where there is no database."""
    try:
        if not path.exists():
            return None
        if plan_of(path).exists():
            return Recorded(path, why="a restore of it was cut short", is_cut_short=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with reading.opened(path) as conn:
            counts = conn.execute("SELECT status, count(*) FROM agents GROUP BY status ORDER BY status").fetchall()
            acts = audit.tail(conn, 1)
    except PermissionError:
        return Recorded(path, why="this user may not read it", may_not=True)
    except sqlite3.Error as error:
        return Recorded(path, why=explain.sqlite_error(error, path).message, is_damaged=explain.is_corrupt(error))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return Recorded(path, why=str(error))
    last = acts[-1] if acts else None
    return Recorded(
        path,
        agents=dict(map(tuple, counts)),
        last=None if last is None else (last.at, last.act, str(last.detail.get("name") or last.target)),
    )


def _free_bytes(state: Path) -> int | None:
    try:
        found = os.statvfs(state)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
