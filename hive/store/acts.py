"""Acts of the `hive` command that no daemon carried out, in a file beside the database, one a line.

`hive restore`, `hive secrets rotate` and their like work on files, whether or not a daemon runs. They append here what
they did; the daemon takes it into the audit table and removes the file. Each act is there once, whatever is killed in
between: its id is kept with the rows (`LAST`), so that a file that was read and not removed is not read again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.store import audit, plain_file, runtime_settings
from hive.store.audit import AuditRecord
from hive.store.chain import Head

ORIGIN = "cli"
LAST = "audit.acts"
"""Runtime setting: the id of the act that was taken in last."""
UNREADABLE = "audit.acts_unreadable"
FILE_MAX_BYTES = 1 << 20
"""Some 3,000 acts that no daemon has taken in; what comes after them is not noted."""
ID_BYTES = 12


class OfflineAct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line. `at` Unix seconds; `act` without `order.`; the rest as in `AuditRecord`."""

    id: str
    at: float
    actor: str
    act: str
    target: str
    outcome: str
    detail: dict[str, Any]


class WaitingActs(NamedTuple):
    """The acts that were read, in their order; `unreadable`: lines that are none; `size`: of the file, in bytes."""

    acts: list[OfflineAct]
    unreadable: int
    size: int


def acts_of(database: Path) -> Path:
    """The path of the acts beside the database.

    >>> acts_of(Path("/var/lib/hive/daemon/hive.db")).as_posix()
    '/var/lib/hive/daemon/audit.acts'
    """
    return database.with_name("audit.acts")


def new(*, at: float, actor: str, act: str, target: str, outcome: str, detail: dict[str, Any]) -> OfflineAct:
    """An act with an id that no other one has."""
    return OfflineAct(
        id=secrets.token_hex(ID_BYTES), at=at, actor=actor, act=act, target=target, outcome=outcome, detail=detail
    )


def append(path: Path, act: OfflineAct) -> None:
    """On the disk when this returns. The file is its directory's owner's, also where root writes it.

    Raises OSError: where the file is full (EFBIG), or is none.
    """
    line = msgspec.json.encode(act) + b"\n"
    with _locked(path, create=True) as fd:
        size = os.fstat(fd).st_size
        if size + len(line) > FILE_MAX_BYTES:
            raise OSError(errno.EFBIG, "too many acts wait for a daemon", os.fspath(path))
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" + line if torn else line)
        os.fsync(fd)


def read(path: Path) -> WaitingActs:
    """All of them; none where there is no file. Raises OSError."""
    try:
        return _parsed(plain_file.read(path, FILE_MAX_BYTES))
    except FileNotFoundError:
        return WaitingActs([], 0, 0)


def _parsed(content: bytes) -> WaitingActs:
    found, unreadable = [], 0
    for line in filter(None, content.split(b"\n")):
        try:
            found.append(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            unreadable += 1
    return WaitingActs(found, unreadable, len(content))


_decode = msgspec.json.Decoder(OfflineAct).decode


def take_in(conn: sqlite3.Connection, found: WaitingActs, *, now: float) -> Head | None:
    """Adds those to the audit table that are not in it, and how many could not be read; the last row, None without."""
    last = runtime_settings.get(conn, LAST)
    ids = [act.id for act in found.acts]
    rows = [row_of(act) for act in (found.acts[ids.index(last) + 1 :] if last in ids else found.acts)]
    if found.unreadable:
        rows.append(audit.own(UNREADABLE, now, {"lines": found.unreadable}))
    heads = [audit.append(conn, row) for row in rows]
    if ids:
        runtime_settings.put(conn, LAST, ids[-1], actor="hive", now=now)
    return heads[-1] if heads else None


def row_of(act: OfflineAct) -> AuditRecord:
    """The row it becomes: an order, because a person gave it."""
    return AuditRecord(
        at=act.at,
        actor=act.actor,
        act=audit.ORDER + act.act,
        target=act.target,
        origin=ORIGIN,
        outcome=act.outcome,
        detail=act.detail,
    )


def remove(path: Path, taken: WaitingActs) -> bool:
    """Removes the file where nothing was added since it was read; whether it did. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _locked(path, create=False) as fd:
        if os.fstat(fd).st_size == taken.size:
            os.unlink(path)
            return True
    return False


@contextmanager
def _locked(path: Path, *, create: bool) -> Iterator[int]:
    """The file that is there now, opened, and nobody else's meanwhile. Raises OSError."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path} is no file")
            if found.st_nlink == 0:  # a daemon removed it meanwhile
                continue
            _give_to_owner(fd, found, path.parent)
            yield fd
            return
        finally:
            os.close(fd)


def _give_to_owner(fd: int, found: os.stat_result, directory: Path) -> None:
    owner = directory.stat()
    if os.geteuid() == 0 and found.st_nlink == 1 and (found.st_uid, found.st_gid) != (owner.st_uid, owner.st_gid):
        os.fchown(fd, owner.st_uid, owner.st_gid)
