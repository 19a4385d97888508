"""Recovery from a damaged database: it is moved aside, and a new one begun with the content of the second copy.

The new one is made beside it first, whole, and then takes its place: a start that is killed in between begins again.
What is gone is noted in it (`Loss`), so that it is told for as long as the damaged file is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from itertools import count
from pathlib import Path

import msgspec

from hive.store import anchors, audit, cache_epochs, op_nonces, runtime_settings, second_copy
from hive.store.anchors import anchors_of
from hive.store.chain import START, Head
from hive.store.migrations import migrate
from hive.store.plain_file import sync
from hive.store.second_copy import Behind, Contents, copy_of
from hive.terminal_text import counted

log = logging.getLogger("hive.store")

NOTED = "store.loss"
"""Runtime setting: the last `Loss`."""
TOLD_S = 7 * 86400.0
"""So long it is told where there is no damaged file to remove."""
SIDES = ("", "-wal", "-shm", "-journal")


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A database that was begun anew. `at` Unix seconds; `aside`: where the damaged one is, empty where there was none.

    `copy`: `whole`, `missing` or `damaged`; `agents`, `tokens`: how many of each came from it. `is_rollback`: it is not
    begun anew, but its last changes are gone.
    """

    at: float
    why: str
    aside: str
    copy: str
    agents: int
    tokens: int
    is_rollback: bool = False

    def is_told(self, now: float) -> bool:
        """Whether somebody may still want to do something about it."""
        return os.path.lexists(self.aside) if self.aside else now < self.at + TOLD_S

    @property
    def kept(self) -> str:
        """With what of the old one it is begun anew.

        >>> Loss(at=0.0, why="malformed", aside="/s/d", copy="missing", agents=0, tokens=0).kept
        'without agents and tokens, for there was no second copy'
        """
        if self.copy == "whole":
            tokens = counted(self.tokens, "token")
            return f"with {counted(self.agents, 'agent')} and {tokens} of the API from its second copy"
        why = "there was no second copy" if self.copy == "missing" else "its second copy is damaged too"
        return f"without agents and tokens, for {why}"


def loss_of(conn: sqlite3.Connection) -> Loss | None:
    """The last one that this database knows of."""
    text = runtime_settings.get(conn, NOTED)
    return None if text is None else msgspec.json.decode(text, type=Loss)


def begin_anew(path: Path, why: str) -> Loss:
    """Puts a new database in the place of `path`; nobody has it open. Raises sqlite3.Error, OSError, HiveError."""
    now = time.time()
    copy, contents = _look(copy_of(path))
    aside = _free_name(path)
    has_file = os.path.lexists(path)
    loss = Loss(
        at=now,
        why=why,
        aside=str(aside) if has_file else "",
        copy=copy,
        agents=contents.count("agents") if contents else 0,
        tokens=contents.count("api_tokens") if contents else 0,
    )
    last = _last_anchored(path)
    fresh = path.with_name(f".{path.name}.anew")
    _remove(fresh)
    try:
        _make(fresh, loss, contents, last)
        if last != START:  # before it is there: a beginning that nobody noted is taken for a forged one
            anchors.append(anchors_of(path), last, now=now, is_beginning=True)
    except BaseException:
        _remove(fresh)
        raise
    _swap(path, fresh, aside)
    if copy == "damaged":
        os.rename(copy_of(path), copy_of(aside))
    log.critical(
        "database_damaged path=%s moved_to=%s error=%s copy=%s agents=%d tokens=%d: a new database is begun, "
        "hive restore brings a backup back",
        path,
        loss.aside or "-",
        why,
        copy,
        loss.agents,
        loss.tokens,
    )
    return loss


def notice_rollback(path: Path, conn: sqlite3.Connection, behind: Behind) -> None:
    """Notes it where a sound database lacks what had been committed, as after a damaged write-ahead log: commits that
    the second copy knew of, or rows of the audit table up to one with its hash noted outside.

    A lone commit counts where the copy's seal has it: that is written after the database has answered it, so a daemon
    that is killed before or in it leaves none. Raises sqlite3.Error, OSError.
    """
    last, now = _last_anchored(path), time.time()
    has_lost_rows = last.id > audit.numbered_to(conn)
    if not has_lost_rows and not behind.is_loss:
        return
    why = f"rows of the audit table up to {last.id}" if has_lost_rows else counted(behind.commits, "commit")
    loss = Loss(at=now, why=why, aside="", copy="whole", agents=0, tokens=0, is_rollback=True)
    if has_lost_rows:
        anchors.append(anchors_of(path), last, now=now, is_beginning=True)
    conn.execute("BEGIN IMMEDIATE")
    try:
        runtime_settings.put(conn, NOTED, msgspec.json.encode(loss).decode(), actor="hive", now=now)
        cache_epochs.note_put_back(conn, now)
        op_nonces.forget_box(conn)  # tokens that were used in what is lost would be good again
        audit.go_on_after(conn, last if has_lost_rows else None, {"lost": why, "commits": behind.commits}, now=now)
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise
    log.critical("database_rolled_back path=%s lost=%r: hive restore brings a backup back", path, why)


def _look(path: Path) -> tuple[str, Contents | None]:
    contents, damage = second_copy.read(path)
    if damage:
        log.critical("second_copy_damaged path=%s error=%s", path, damage)
        return "damaged", None
    return ("missing" if contents is None else "whole"), contents


def _last_anchored(path: Path) -> Head:
    try:
        return max(anchors.read(anchors_of(path)).heads, default=START)
    except OSError as error:
        log.error("audit_heads_unreadable path=%s error=%s", anchors_of(path), error.strerror or error)
        return START


def _make(fresh: Path, loss: Loss, contents: Contents | None, last: Head) -> None:
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as conn:
        conn.row_factory = sqlite3.Row
        migrate(conn)
        conn.execute("BEGIN IMMEDIATE")
        if contents is not None:
            second_copy.put_back(conn, dict(contents.rows), now=loss.at)
        runtime_settings.put(conn, NOTED, msgspec.json.encode(loss).decode(), actor="hive", now=loss.at)
        cache_epochs.raise_all(conn, "hive", loss.at)  # flushes that it has lost hold all the same
        told = {"damaged": loss.why, "aside": loss.aside, "copy": loss.copy, "agents": loss.agents}
        audit.begin_anew(conn, last, told | {"tokens": loss.tokens}, now=loss.at)
        conn.execute("COMMIT")


def _swap(path: Path, fresh: Path, aside: Path) -> None:
    """At no moment there is no database, which the next start would take for one that never was."""
    for side in SIDES[1:]:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{side}", f"{aside}{side}")
    with contextlib.suppress(FileNotFoundError):
        os.link(path, aside, follow_symlinks=False)
    os.rename(fresh, path)
    sync(path.parent)


def _free_name(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S")
    names = (path.with_name(f"{path.name}.damaged-{stamp}{f'-{n}' if n else ''}") for n in count())
    return next(name for name in names if not os.path.lexists(name))


def _remove(path: Path) -> None:
    for side in SIDES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{side}")
