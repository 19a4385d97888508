"""Stores of Hive: Redis, SQLite, the disks under them."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from hive.conditions import DISK_LEAST_BYTES
from hive.doctor.checks.check import STOPPED, Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.files.layout import REDIS_ACL
from hive.store import explain, probe
from hive.store.migrations import STEPS

GIB, MIB, KIB = 1024**3, 1024**2, 1024
DISK_LOW_BYTES = GIB
RUNTIME_LEAST_BYTES = MIB
INODES_LEAST = 1000
PROBE_S = 0.6
PROBED = "hive:config:doctor"
"""A key nobody has: reading it gives nothing, deleting it changes nothing."""
SPARE_S = 0.2
"""Of a check's time is kept for saying that it was too short."""
STEP_INSTRUCTIONS = 10_000
"""Of SQLite's virtual machine between two looks at the clock: some 0.1 ms."""


# --- Redis -------------------------------------------------------------------------------------------------------


def look_at_redis(subject: Subject) -> CheckVerdict:
    if subject.env.get("REDIS_URL"):
        return judge_other_redis((subject.health or {}).get("redis") or {})
    if (path := subject.redis_socket) is None:
        return skipped("no Hive here, so no Redis of its own")
    try:
        said = probe.ask(path, ["PING"], within_s=PROBE_S)[0]
    except PermissionError:
        return unseen(f"this user may not use {path}", "redis.answers", group="hive")
    except OSError as error:
        if subject.is_stopped:
            return skipped(STOPPED)
        said = f"!{error.strerror or error or type(error).__name__}"
    return judge_redis(said, str(path), runs=subject.health is not None, is_appliance=subject.is_appliance)


def judge_other_redis(told: Mapping[str, Any]) -> CheckVerdict:
    """A Redis of REDIS_URL: the daemon knows, this command has no business there. `told`: by it; empty without one."""
    if not told:
        return skipped("REDIS_URL names another one, and no daemon says whether it answers")
    if told["up"]:
        return passed("that of REDIS_URL answers the daemon")
    return wrong("redis_of_url_down", at=told["at"], why=told["why"])


def judge_redis(said: str, path: str, *, runs: bool, is_appliance: bool) -> CheckVerdict:
    """`said`: the first line of its answer to PING, or `!` and why there was none.

    >>> judge_redis("-NOAUTH Authentication required.", "/r.sock", runs=True, is_appliance=True).reason
    'answers at /r.sock, and wants a password'
    """
    if said == "+PONG":
        return passed(f"answers at {path}")
    if said.startswith("-NOAUTH"):
        return passed(f"answers at {path}, and wants a password")
    if said.startswith("!") and not runs and not is_appliance:
        return skipped("this Hive does not run")
    return wrong("redis_down", at=path, why=said.removeprefix("!")[:60])


class Acl(NamedTuple):
    """Answers to the same questions: `stranger` gives no password, `viewer` is the user people may look with.

    In order: (reading, deleting); of `viewer` first whether it may log in, and last CONFIG.
    """

    stranger: tuple[str, str]
    viewer: tuple[str, str, str, str]


def look_at_acl(subject: Subject) -> CheckVerdict:
    if (path := subject.redis_socket) is None:
        return skipped("no Hive here")
    if not subject.is_appliance:
        return skipped("hive up's Redis has no users: its socket is in a directory of its own user's alone")
    read, write = ["GET", PROBED], ["DEL", PROBED]
    try:
        read_bare, write_bare = probe.ask(path, read, write, within_s=PROBE_S)
        login, viewed, deleted, configured = probe.ask(
            path, ["AUTH", "viewer", "-"], read, write, ["CONFIG", "GET", "dir"], within_s=PROBE_S
        )
    except PermissionError:
        return unseen(f"this user may not use {path}", "redis.acl", group="hive")
    except OSError as error:
        return skipped(f"Redis cannot be asked: {error.strerror or error}; see redis.answers")
    verdict = judge_acl(Acl((read_bare, write_bare), (login, viewed, deleted, configured)))
    return judge_acl_file(_acl_file(subject), REDIS_ACL) or verdict


def _acl_file(subject: Subject) -> str:
    """Empty where this user may not read it."""
    try:
        return subject.layout.at(REDIS_ACL).read_text()
    except OSError:
        return ""


def judge_acl(acl: Acl) -> CheckVerdict:
    """
    >>> judge_acl(Acl(("-NOAUTH", "-NOAUTH"), ("+OK", "$-1", "-NOPERM", "-NOPERM"))).reason
    'viewer may read and not write; nobody else gets in without a password'
    """
    if not acl.stranger[1].startswith("-"):
        return wrong("redis_open")
    login, read, deleted, configured = acl.viewer
    if login.startswith("+") and not (deleted.startswith("-") and configured.startswith("-")):
        return wrong("redis_viewer_may", do="write" if not deleted.startswith("-") else "ask for CONFIG")
    if not login.startswith("+"):
        return wrong("redis_viewer_missing", why=login[1:60])
    if read.startswith("-"):
        return wrong("redis_viewer_blind", why=read[1:60])
    return passed("viewer may read and not write; nobody else gets in without a password")


def judge_acl_file(text: str, path: str) -> CheckVerdict | None:
    """Fault of users.acl itself; None if there is none, or it could not be read.

    >>> judge_acl_file("user daemon on >sesame ~* +@all\\n", "/users.acl").reason
    '/users.acl holds the password of daemon itself, not its hash'
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "user" and any(word.startswith(">") for word in words[2:]):
            return wrong("redis_password_in_clear", path=path, user=words[1])
    return None


# --- SQLite ------------------------------------------------------------------------------------------------------


def look_at_sqlite(subject: Subject) -> CheckVerdict:
    path = subject.database
    if path is None:
        return skipped("no Hive here")
    try:
        size = path.stat().st_size
    except PermissionError:
        return unseen(f"this user may not read {path}", "sqlite.integrity")
    except FileNotFoundError:
        return skipped(f"there is no {path} yet")
    if not os.access(path, os.R_OK):
        return unseen(f"this user may not read {path}", "sqlite.integrity")
    try:
        found, version = quick_check(path, limit_s=subject.limit_s - SPARE_S)
    except sqlite3.Error as error:
        return judge_unreadable(error, path, size)
    return judge_sqlite(found, version, path, size)


def quick_check(path: Path, *, limit_s: float) -> tuple[str, int]:
    """(`ok` or the first thing that is wrong, the schema's version). Writes nothing, waits for nobody.

    A write-ahead log may only be left out (`immutable`) where there is none: with one beside it the file alone is old,
    or in the middle of a change; without one a reader who may not write could not open it. Raises sqlite3.Error;
    `interrupted` after `limit_s`.
    """
    wal = path.with_name(path.name + "-wal")
    had_wal = wal.exists()
    found = _quick_check(path, limit_s, "" if had_wal else "&immutable=1")
    if not had_wal and wal.exists():  # a daemon came up meanwhile, and what was seen may be half of a change
        return _quick_check(path, limit_s, "")
    return found


def _quick_check(path: Path, limit_s: float, options: str) -> tuple[str, int]:
    until = time.monotonic() + limit_s
    conn = sqlite3.connect(f"file:{quote(os.fspath(path))}?mode=ro{options}", uri=True, timeout=0.2)
    try:
        conn.set_progress_handler(lambda: time.monotonic() > until, STEP_INSTRUCTIONS)
        return conn.execute("PRAGMA quick_check(1)").fetchone()[0], conn.execute("PRAGMA user_version").fetchone()[0]
    finally:
        conn.close()


def judge_sqlite(found: str, version: int, path: Path, size: int) -> CheckVerdict:
    """
    >>> judge_sqlite("ok", len(STEPS), Path("/h.db"), 2 * MIB).reason
    '/h.db is sound (2,048 KiB)'
    """
    if found != "ok":
        return wrong("database_damaged", path=path, why=_one_line(found))
    if version > len(STEPS):
        return wrong("database_newer", path=path, version=version, known=len(STEPS))
    return passed(f"{path} is sound ({size / KIB:,.0f} KiB)")


def judge_unreadable(error: sqlite3.Error, path: Path, size: int) -> CheckVerdict:
    """Verdict on an error that SQLite raised instead of an answer."""
    if "interrupted" in str(error):
        return skipped(
            f"{path} ({size / MIB:,.0f} MiB) takes longer than this has time", "hive doctor sqlite.integrity"
        )
    if explain.is_corrupt(error):
        return judge_sqlite(str(error), 0, path, size)
    return wrong("database_unreadable", path=path, why=error)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:100]


# --- disks -------------------------------------------------------------------------------------------------------


class Disk(NamedTuple):
    """The file system of one directory. `inodes`: free ones, None where it has no fixed number."""

    what: str
    path: Path
    free_bytes: int
    total_bytes: int
    inodes: int | None


def look_at_disks(subject: Subject) -> CheckVerdict:
    if subject.paths is None:
        return skipped("no Hive here")
    named = {"state": subject.paths.state, "runtime": subject.paths.runtime}
    return judge_disks([disk for what, path in named.items() if (disk := _disk(what, path)) is not None])


def _disk(what: str, path: Path) -> Disk | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    size = found.f_frsize
    return Disk(what, path, found.f_bavail * size, found.f_blocks * size, found.f_favail if found.f_files else None)


def judge_disks(disks: list[Disk]) -> CheckVerdict:
    """
    >>> judge_disks([Disk("state", Path("/s"), 50 * GIB, 100 * GIB, 10**6)]).reason
    'state 50.0 GiB free'
    """
    if not disks:
        return skipped("no directory of Hive's is there yet")
    low = None
    for disk in disks:
        least = DISK_LEAST_BYTES if disk.what == "state" else RUNTIME_LEAST_BYTES
        if disk.free_bytes < least:
            return wrong("disk_nearly_full", path=disk.path, free_bytes=disk.free_bytes)
        if disk.inodes is not None and disk.inodes < INODES_LEAST:
            return wrong("inodes_low", path=disk.path, inodes=disk.inodes)
        if disk.what == "state" and disk.free_bytes < DISK_LOW_BYTES:
            low = wrong("disk_low", path=disk.path, free_bytes=disk.free_bytes)
    said = ", ".join(f"{disk.what} {disk.free_bytes / GIB:.1f} GiB free" for disk in disks)
    return low or passed(said)


CHECKS = (
    Check("redis.answers", "Hive's Redis answers.", look_at_redis),
    Check("redis.acl", "Redis lets people look, and nobody without a password write.", look_at_acl),
    Check("sqlite.integrity", "The database is whole (PRAGMA quick_check).", look_at_sqlite),
    Check("disk.space", "Room for state and sockets.", look_at_disks),
)
