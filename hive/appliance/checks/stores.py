"""Where Hive keeps things: Redis, SQLite, the disks under them."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from hive.appliance.checks.check import Check, Verdict, failed, passed, skipped, warned
from hive.appliance.checks.subject import Subject
from hive.appliance.layout import REDIS_ACL
from hive.store import explain, probe
from hive.store.migrations import STEPS

GIB, MIB, KIB = 1024**3, 1024**2, 1024
DISK_LEAST_BYTES, DISK_LOW_BYTES = 100 * MIB, GIB
"""A spool, a write-ahead log and agents' logs take the first within minutes."""
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


def look_at_redis(subject: Subject) -> Verdict:
    if subject.env.get("REDIS_URL"):
        up = ((subject.health or {}).get("redis") or {}).get("up")
        return judge_other_redis(up)
    if (path := subject.redis_socket) is None:
        return skipped("no Hive here, so no Redis of its own")
    try:
        said = probe.ask(path, ["PING"], within_s=PROBE_S)[0]
    except PermissionError:
        return skipped(f"this user may not use {path}; needs root or the group hive", "sudo hive doctor redis.answers")
    except OSError as error:
        said = f"!{error.strerror or error or type(error).__name__}"
    return judge_redis(said, str(path), runs=subject.health is not None, is_appliance=subject.is_appliance)


def judge_other_redis(up: bool | None) -> Verdict:
    """A Redis of REDIS_URL: the daemon knows, this command has no business there."""
    if up is None:
        return skipped("REDIS_URL names another one, and no daemon says whether it answers")
    return passed("that of REDIS_URL answers the daemon") if up else failed("that of REDIS_URL is down: usage waits")


def judge_redis(said: str, path: str, *, runs: bool, is_appliance: bool) -> Verdict:
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
    what = said[1:] if said.startswith("!") else f"it says {said[:60]}"
    fix = "systemctl restart hive-redis" if is_appliance else ""
    return failed(f"{path}: {what}; requests are served, their usage waits", fix)


class Acl(NamedTuple):
    """Answers to the same questions: `stranger` gives no password, `viewer` is the user people may look with.

    In order: (reading, deleting); of `viewer` first whether it may log in, and last CONFIG.
    """

    stranger: tuple[str, str]
    viewer: tuple[str, str, str, str]


def look_at_acl(subject: Subject) -> Verdict:
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
        return skipped(f"this user may not use {path}; needs root or the group hive", "sudo hive doctor redis.acl")
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


def judge_acl(acl: Acl) -> Verdict:
    """
    >>> judge_acl(Acl(("-NOAUTH", "-NOAUTH"), ("+OK", "$-1", "-NOPERM", "-NOPERM"))).reason
    'viewer may read and not write; nobody else gets in without a password'
    """
    fix = "sudo hive install"
    if not acl.stranger[1].startswith("-"):
        return failed("whoever may connect may write: the default user is on", fix)
    login, read, deleted, configured = acl.viewer
    if login.startswith("+") and not (deleted.startswith("-") and configured.startswith("-")):
        return failed(f"viewer may {'write' if not deleted.startswith('-') else 'ask for CONFIG'}", fix)
    if not login.startswith("+"):
        return warned(f"there is no viewer to look with: {login[1:60]}", fix)
    if read.startswith("-"):
        return warned(f"viewer may not read: {read[1:60]}", fix)
    return passed("viewer may read and not write; nobody else gets in without a password")


def judge_acl_file(text: str, path: str) -> Verdict | None:
    """What is wrong with users.acl itself; None where nothing is, or it could not be read.

    >>> judge_acl_file("user daemon on >sesame ~* +@all\\n", "/users.acl").reason
    '/users.acl holds the password of daemon itself, not its hash'
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "user" and any(word.startswith(">") for word in words[2:]):
            return failed(f"{path} holds the password of {words[1]} itself, not its hash", "sudo hive install")
    return None


# --- SQLite ------------------------------------------------------------------------------------------------------


def look_at_sqlite(subject: Subject) -> Verdict:
    path = subject.database
    if path is None:
        return skipped("no Hive here")
    try:
        size = path.stat().st_size
    except PermissionError:
        return skipped(f"this user may not read {path}; needs root", "sudo hive doctor sqlite.integrity")
    except FileNotFoundError:
        return skipped(f"there is no {path} yet")
    if not os.access(path, os.R_OK):
        return skipped(f"this user may not read {path}; needs root", "sudo hive doctor sqlite.integrity")
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


def judge_sqlite(found: str, version: int, path: Path, size: int) -> Verdict:
    """
    >>> judge_sqlite("ok", len(STEPS), Path("/h.db"), 2 * MIB).reason
    '/h.db is sound (2,048 KiB)'
    """
    if found != "ok":
        fix = "hive restore FILE, or restart: agents and tokens come from its second copy"
        return failed(f"{path} is damaged: {_one_line(found)}", fix)
    if version > len(STEPS):
        return failed(
            f"{path} was written by a newer Hive (its version {version}, known here {len(STEPS)})",
            "install that version again",
        )
    return passed(f"{path} is sound ({size / KIB:,.0f} KiB)")


def judge_unreadable(error: sqlite3.Error, path: Path, size: int) -> Verdict:
    """What SQLite raised instead of an answer."""
    if "interrupted" in str(error):
        return skipped(
            f"{path} ({size / MIB:,.0f} MiB) takes longer than this has time", "hive doctor sqlite.integrity"
        )
    if explain.is_corrupt(error):
        return judge_sqlite(str(error), 0, path, size)
    return warned(f"{path} cannot be read: {error}")


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


def look_at_disks(subject: Subject) -> Verdict:
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


def judge_disks(disks: list[Disk]) -> Verdict:
    """
    >>> judge_disks([Disk("state", Path("/s"), 50 * GIB, 100 * GIB, 10**6)]).reason
    'state 50.0 GiB free'
    """
    if not disks:
        return skipped("no directory of Hive's is there yet")
    low = ""
    for disk in disks:
        least = DISK_LEAST_BYTES if disk.what == "state" else RUNTIME_LEAST_BYTES
        fix = f"df -h {disk.path}; du -xh {disk.path} | sort -h | tail"
        if disk.free_bytes < least:
            return failed(f"{disk.what} has {disk.free_bytes / MIB:.1f} MiB left: writes fail soon", fix)
        if disk.inodes is not None and disk.inodes < INODES_LEAST:
            return failed(f"{disk.what} has room for {disk.inodes} more files: no agent can be made soon", fix)
        if disk.what == "state" and disk.free_bytes < DISK_LOW_BYTES:
            low = fix
    said = ", ".join(f"{disk.what} {disk.free_bytes / GIB:.1f} GiB free" for disk in disks)
    return warned(said, low) if low else passed(said)


CHECKS = (
    Check("redis.answers", "Hive's Redis answers.", look_at_redis),
    Check("redis.acl", "Redis lets people look, and nobody without a password write.", look_at_acl),
    Check("sqlite.integrity", "The database is whole (PRAGMA quick_check).", look_at_sqlite),
    Check("disk.space", "Room for state and sockets.", look_at_disks),
)
