"""The second copy of what a damaged database may not take along: agents, the serials their tokens are derived from, the
tokens of the API, and which op tokens were used. A file beside the database, and never older than the last answer about
them.

A line for each commit that changed any of it, on the disk before the commit is; the first line, the seal, says how many
there are at least. Each line carries a checksum over itself and all before it: what was changed, or cut off behind the
seal's word, is found, and then nothing in the file is used. A right that was taken away is in it as such before the
answer says so, so no state that comes from here revives one, as an older backup would.

Changes are noticed by triggers of the writing connection alone (they are TEMP): no writer can forget it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.domain import ALIVE, AgentStatus, SleepDepth
from hive.errors import HiveError
from hive.store import agents, explain, plain_file, runtime_settings, template_uids

log = logging.getLogger("hive.store")

RowDict = dict[str, Any]
RowKey = tuple[str, str]
"""A table, and what its primary key says."""

MARK = "store.second_copy"
"""Runtime setting: the copy's name and its last commit, as of the same transaction."""
FILE_MAX_BYTES = 1 << 32
COMPACT_BYTES = 1 << 20
"""It is written anew where it is longer than this and than twice its beginning: what it costs stays in proportion."""
AHEAD_BYTES = 64 * 1024
"""Zeros behind its end, written before they are needed: a file that does not grow is on the disk ten times as soon."""
ROWS_A_LINE = 200
"""Of those it begins with."""
_SEAL = re.compile(rb"hive second copy 1 ([0-9a-f]{16}) ([0-9]{15}) ([0-9]{12}) ([0-9a-f]{16})\n")
_SEAL_BYTES = 82

_STATUS = (
    f"CASE WHEN @status IN ({', '.join(repr(str(status)) for status in sorted(ALIVE))}) THEN '{AgentStatus.RUNNING}'"
    f" WHEN @status = '{AgentStatus.STOPPING}' THEN '{AgentStatus.STOPPED}' ELSE @status END"
)
"""The status kept: alive or not, without its kind; sleeping and waking change nothing here."""


class _Table(NamedTuple):
    """The columns kept of a table. `columns`: name → the expression over its row; `where`: which rows. `@` is before
    each name of a column in them: in a trigger NEW or OLD takes its place."""

    key: str
    columns: dict[str, str]
    where: str = "TRUE"


def _as_they_are(*names: str) -> dict[str, str]:
    return {name: f"@{name}" for name in names}


SETTINGS_KEPT = (runtime_settings.BOOT, "proxy.port", "setting inference.cloud", "cloud.seeded")
"""Runtime settings that are about the agents: which boot they live in, the port in their environment, and how far their
requests may go."""
_AGENT = _as_they_are(
    "id",
    "name",
    "runtime",
    "spec",
    "tenant",
    "inference_tier",
    "preferred_model",
    "restart",
    "uid",
    "token_serial",
    "created_at",
    "stopped_by",
)
_TOKEN = _as_they_are("id", "name", "digest", "role", "created_by", "created_at", "expires_at", "revoked_at")
TABLES = {
    "agents": _Table("id", {**_AGENT, "status": _STATUS}),
    "agent_prompts": _Table("agent_id", _as_they_are("agent_id", "system_prompt", "prewarm_on_start")),
    "agent_limits": _Table(
        "agent_id",
        _as_they_are("agent_id", "cloud", "tokens_per_day", "tokens_per_month", "cloud_tokens_per_day"),
    ),
    "agent_templates": _Table("agent_id", _as_they_are("agent_id", "template")),
    "template_uids": _Table("first_uid", _as_they_are("first_uid", "uids", "template", "owner")),
    "api_tokens": _Table("id", _TOKEN),
    "op_nonces": _Table("nonce", _as_they_are("nonce", "operation", "approved_by", "used_at", "keep_until")),
    "runtime_settings": _Table(
        "key",
        _as_they_are("key", "value", "actor", "updated_at"),
        where=f"@key IN ({', '.join(repr(key) for key in SETTINGS_KEPT)})",
    ),
}


class _Line(msgspec.Struct, frozen=True):
    """`rows`: table, key, and the row as it is after this commit; None where it is gone."""

    commit: int
    rows: list[tuple[str, str, RowDict | None]]


class Contents(NamedTuple):
    """A copy that is whole. `rows`: the last word about each; `said`: in which commit that was.

    `lines`, `size`, `digest`: how many lines count, the bytes up to their end, and the last one's checksum.
    `settled`: the last commit that is known to have been made: the seal is written after it.
    """

    name: str
    commit: int
    rows: dict[RowKey, RowDict]
    said: dict[RowKey, int]
    lines: int
    size: int
    digest: str
    settled: int

    def count(self, table: str) -> int:
        return sum(1 for of, _ in self.rows if of == table)

    def after(self, commit: int) -> dict[RowKey, RowDict | None]:
        """The rows that later commits changed; None where the row is gone."""
        return {key: self.rows.get(key) for key, said in self.said.items() if said > commit}


class Behind(NamedTuple):
    """Commits that only the copy knew of: in all, and `settled`, those that the database had for certain."""

    commits: int = 0
    settled: int = 0

    @property
    def is_loss(self) -> bool:
        """Whether the database had more than it has. A single commit that is not settled is that of a daemon which was
        killed before it, or between it and the seal: nothing tells which.

        >>> [Behind(*counts).is_loss for counts in ((0, 0), (1, 0), (1, 1), (2, 0))]
        [False, False, True, True]
        """
        return self.settled > 0 or self.commits > 1


class CopyMark(NamedTuple):
    """The copy a database belongs to, and how far it had come."""

    name: str
    commit: int


def copy_of(database: Path) -> Path:
    """
    >>> copy_of(Path("/var/lib/hive/daemon/hive.db")).name
    'hive.db.second'
    """
    return database.with_name(f"{database.name}.second")


# --- reading -----------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[Contents | None, str]:
    """The content, and the reason that it cannot be told; None and nothing where there is no file. Raises OSError."""
    try:
        found = _parsed(plain_file.read(path, FILE_MAX_BYTES))
    except FileNotFoundError:
        return None, ""
    return (None, found) if isinstance(found, str) else (found, "")


def _parsed(data: bytes) -> Contents | str:
    """The content; the fault where it is not as it was written."""
    seal = _SEAL.match(data)
    if seal is None or _seal(seal[1].decode(), int(seal[2]), int(seal[3])) != seal[0]:
        return "its first line is not as it was written"
    name, sealed, settled = seal[1].decode(), int(seal[3]), int(seal[2])
    commit = settled
    rows: dict[RowKey, RowDict] = {}
    said: dict[RowKey, int] = {}
    lines, size, digest = 0, seal.end(), name
    for line, end, checksum in _whole_lines(data, seal.end(), name):
        size, digest = end, checksum
        lines, commit = lines + 1, line.commit
        for table, key, row in line.rows:
            said[table, key] = commit
            if row is None:
                rows.pop((table, key), None)
            else:
                rows[table, key] = row
    if lines < sealed:
        return f"line {lines + 1} of {sealed} is not as it was written"
    return Contents(name, commit, rows, said, lines, size, digest, settled)


def _whole_lines(data: bytes, at: int, digest: str) -> Iterator[tuple[_Line, int, str]]:
    """(line, where it ends, its checksum) up to the first that is not as it was written: behind the seal's word that is
    a line of a commit that was never answered."""
    while (end := data.find(b"\n", at)) >= 0:
        said, _, content = data[at:end].partition(b" ")
        digest = _digest(digest, content)
        if said != digest.encode():
            return
        try:
            line = _decode(content)
        except msgspec.MsgspecError:
            return
        at = end + 1
        yield line, at, digest


_decode = msgspec.json.Decoder(_Line).decode


def _digest(before: str, content: bytes) -> str:
    return hashlib.sha256(before.encode() + content).hexdigest()[:32]


def _seal(name: str, commit: int, lines: int) -> bytes:
    """Always of one length, so that it is written over the one before."""
    text = f"{name} {commit:015d} {lines:012d}"
    return f"hive second copy 1 {text} {hashlib.sha256(text.encode()).hexdigest()[:16]}\n".encode()


def mark_of(conn: sqlite3.Connection) -> CopyMark | None:
    """None where the database belongs to no copy: it is new, or an older Hive's."""
    name, _, commit = (runtime_settings.get(conn, MARK) or "").partition(" ")
    return CopyMark(name, int(commit)) if name and commit.isdecimal() else None


def rows_of(conn: sqlite3.Connection) -> dict[RowKey, RowDict]:
    """The content a copy of this database would have."""
    found: dict[RowKey, RowDict] = {}
    for name, table in TABLES.items():
        found.update(((name, str(row[table.key])), row) for row in _rows(conn, name, table.where))
    return found


def _rows(conn: sqlite3.Connection, name: str, where: str, *values: object) -> Iterator[RowDict]:
    table = TABLES[name]
    columns = ", ".join(f"{of} AS {column}" for column, of in table.columns.items())
    for found in conn.execute(f"SELECT {columns} FROM {name} WHERE {where}".replace("@", ""), values):
        yield dict(zip(table.columns, tuple(found), strict=True))


# --- taking back -------------------------------------------------------------------------------------------------


def put_back(conn: sqlite3.Connection, rows: dict[RowKey, RowDict | None], *, now: float) -> None:
    """Makes the database say what these rows say; a living agent is recorded as running, and looked for.

    Its generation is one that no message of before can be newer than.
    """
    for (table, key), row in rows.items():
        if row is None and table == "agents":
            agents.remove(conn, key, now=now)
        elif row is None and table in TABLES:
            conn.execute(f"DELETE FROM {table} WHERE {TABLES[table].key} = ?", (key,))
    for (table, _), row in rows.items():
        if row is None or table not in TABLES:
            continue
        if table == "agents":
            _put_agent(conn, row, now)
        else:
            _upsert(conn, table, row, row)
        if table == "template_uids":
            template_uids.mark(conn, row["template"], template_uids.UidBlock(row["first_uid"], row["uids"]))


def _put_agent(conn: sqlite3.Connection, row: RowDict, now: float) -> None:
    begun: RowDict = {
        "depth": SleepDepth.AWAKE,
        "depth_goal": SleepDepth.AWAKE,
        "generation": int(now),
        "since": now,
        "reason": "recorded again from the second copy",
    }
    before = next(_rows(conn, "agents", "id = ?", row["id"]), None)
    is_as_before = before is not None and before["status"] == row["status"]
    changed = {name: row[name] for name in row if name != "status"} if is_as_before else row | begun
    _upsert(conn, "agents", row | begun, changed)
    if row["uid"] is not None:
        conn.execute(
            "INSERT OR REPLACE INTO uids (uid, agent_id, freed_at) VALUES (?, ?, NULL)", (row["uid"], row["id"])
        )


def _upsert(conn: sqlite3.Connection, table: str, new: RowDict, changed: RowDict) -> None:
    """Inserts `new`, or sets `changed`. A column that this Hive does not know is a newer one's, and left out."""
    known = {row[1] for row in conn.execute(f"PRAGMA table_info({table})")}
    names = [name for name in new if name in known]
    key = TABLES[table].key
    sets = ", ".join(f"{name} = excluded.{name}" for name in changed if name in known and name != key)
    conn.execute(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT ({key}) DO UPDATE SET {sets}",
        [new[name] for name in names],
    )


def agreeing(database: Path, conn: sqlite3.Connection) -> tuple[SecondCopy, Behind]:
    """The copy of an open database, with both saying the same; what only the copy knew of.

    Those the database gets: one was killed between the two, more went with a damaged write-ahead log. A copy that is of
    another database (a backup was restored), is damaged, or says else is written anew: the database is sound.
    Raises StoreFull, NotPermitted, HiveError, sqlite3.Error.
    """
    path = copy_of(database)
    try:
        contents, damage = read(path)
    except OSError as error:
        raise explain.os_error(error, path) from error
    if damage:
        log.error("second_copy_damaged path=%s error=%s: it is written anew", path, damage)
    mark, behind = mark_of(conn), Behind()
    if contents is not None and (mark is None or contents.name != mark.name):
        contents = None
    if contents is not None and mark is not None and contents.commit > mark.commit:
        behind = Behind(contents.commit - mark.commit, max(0, contents.settled - mark.commit))
        _catch_up(conn, contents, mark)
    copy = SecondCopy(path, conn)
    try:
        if contents is not None and mark is not None and mark.commit <= contents.commit and says(conn, contents):
            copy.go_on(contents)
        else:
            copy.begin(conn)
    except BaseException:
        copy.close()
        raise
    return copy, behind


def says(conn: sqlite3.Connection, contents: Contents) -> bool:
    """Whether the database says the same."""
    return contents.rows == rows_of(conn)


def _catch_up(conn: sqlite3.Connection, contents: Contents, mark: CopyMark) -> None:
    now, rows = time.time(), contents.after(mark.commit)
    conn.execute("BEGIN IMMEDIATE")
    try:
        put_back(conn, rows, now=now)
        runtime_settings.put(conn, MARK, f"{contents.name} {contents.commit}", actor="hive", now=now)
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise
    log.warning("database_behind_copy commits=%d rows=%d: it has them again", contents.commit - mark.commit, len(rows))


# --- writing -----------------------------------------------------------------------------------------------------


class SecondCopy:
    """The copy that the writer of a database keeps; used by one thread at a time.

    `append` within the transaction, as its last act; once it is committed `settle` and, whenever there is time, `tidy`,
    else `undo`.
    """

    def __init__(self, path: Path, conn: sqlite3.Connection) -> None:
        """Notices from now on what changes through `conn`. `go_on` or `begin` comes next."""
        self.path = path
        self.name = ""
        self.commit = 0
        self._fd = -1
        self._lines = 0
        self._size = 0
        self._allocated = 0
        """The position up to which it has been written, with room for what comes later."""
        self._began_with = 0
        self._digest = ""
        self._changed: dict[RowKey, None] = {}
        self._pending: tuple[int, int, str] | None = None
        """Commit, length and checksum of what is written and not committed."""
        _watch(conn, self._changed)

    def __repr__(self) -> str:
        return f"<SecondCopy {self.name} commit {self.commit}, {self._size} B>"

    def begin(self, conn: sqlite3.Connection) -> None:
        """Writes it whole, of what the database holds, under a new name. Raises StoreFull, NotPermitted, HiveError."""
        self._changed.clear()
        self._write_whole(conn, secrets.token_hex(8), self.commit)
        conn.execute("BEGIN IMMEDIATE")
        try:
            self._mark(conn, self.commit)
            conn.execute("COMMIT")
        except BaseException:
            conn.execute("ROLLBACK")
            raise
        self._changed.clear()
        # A loss of the write-ahead log must not lead back behind the name.
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def go_on(self, contents: Contents) -> None:
        """It is whole and says what the database does: what comes is added. Raises as `begin` does."""
        try:
            self._open(contents.name, contents.commit)
            os.ftruncate(self._fd, contents.size)
        except OSError as error:
            raise explain.os_error(error, self.path) from error
        self._size = self._allocated = contents.size
        self._digest, self._lines = contents.digest, contents.lines

    def append(self, conn: sqlite3.Connection) -> None:
        """Adds what changed in this transaction; it is on the disk when this returns. Raises StoreFull, HiveError."""
        if not self._changed:
            return
        rows = [(table, key, self._now(conn, table, key)) for table, key in self._changed]
        line, digest = _line(self._digest, _Line(self.commit + 1, rows))
        self._pending = self.commit + 1, len(line), digest
        end = self._size + len(line)
        try:
            _write_at(self._fd, line, self._size)
            if end > self._allocated:
                self._allocated = end
                with contextlib.suppress(OSError):  # the line itself had room
                    _write_at(self._fd, bytes(AHEAD_BYTES), end)
                    self._allocated = end + AHEAD_BYTES
            os.fdatasync(self._fd)
        except OSError as error:
            raise explain.os_error(error, self.path) from error
        self._mark(conn, self.commit + 1)

    def settle(self) -> None:
        """Notes that the appended lines are committed."""
        self._changed.clear()
        if self._pending is None:
            return
        self.commit, length, self._digest = self._pending
        self._pending = None
        self._size, self._lines = self._size + length, self._lines + 1
        try:
            _write_at(self._fd, _seal(self.name, self.commit, self._lines), 0)
        except OSError as error:
            log.error("second_copy_not_sealed path=%s error=%s", self.path, error.strerror)

    def tidy(self, conn: sqlite3.Connection) -> None:
        """Writes it anew where most of it is old; where that fails, it goes on as it is."""
        if self._size <= max(COMPACT_BYTES, 2 * self._began_with):
            return
        try:
            self._write_whole(conn, self.name, self.commit)
        except (HiveError, sqlite3.Error) as error:
            self._began_with = self._size  # not again at once
            log.error("second_copy_not_tidied path=%s error=%s", self.path, error)

    def undo(self) -> None:
        """It is not, and will not be."""
        self._changed.clear()
        if self._pending is not None:
            self._pending = None
            self._cut_off()

    def _cut_off(self) -> None:
        """Cuts off what is behind the last line that counts; where that fails, the next line is written over it."""
        self._allocated = self._size
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)

    def close(self) -> None:
        if self._fd >= 0:
            if self._size:  # else it was opened, and is not known yet
                self._cut_off()
            os.close(self._fd)
            self._fd = -1

    def _now(self, conn: sqlite3.Connection, table: str, key: str) -> RowDict | None:
        return next(_rows(conn, table, f"{TABLES[table].key} = ?", key), None)

    def _mark(self, conn: sqlite3.Connection, commit: int) -> None:
        runtime_settings.put(conn, MARK, f"{self.name} {commit}", actor="hive", now=0.0)

    def _open(self, name: str, commit: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.name, self.commit = name, commit

    def _write_whole(self, conn: sqlite3.Connection, name: str, commit: int) -> None:
        """Beside it first, and then in its place: at every moment there is a whole one."""
        beside = self.path.with_name(f".{self.path.name}.new")
        content, digest = bytearray(_SEAL_BYTES), name
        rows: list[tuple[str, str, RowDict | None]] = [(*key, row) for key, row in rows_of(conn).items()]
        lines = range(0, max(1, len(rows)), ROWS_A_LINE)
        for first in lines:
            line, digest = _line(digest, _Line(commit, rows[first : first + ROWS_A_LINE]))
            content += line
        content[:_SEAL_BYTES] = _seal(name, commit, len(lines))
        try:
            _replace(beside, self.path, content)
            self._open(name, commit)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise explain.os_error(error, self.path) from error
        self._size = self._allocated = self._began_with = len(content)
        self._digest, self._lines = digest, len(lines)


def _watch(conn: sqlite3.Connection, changed: dict[RowKey, None]) -> None:
    """Notes each row in `changed` of which something changes that is kept."""

    def note(table: str, key: object) -> None:
        changed[table, str(key)] = None

    conn.create_function("second_copy", 2, note)
    for name, table in TABLES.items():
        differs = " OR ".join(f"({_over('OLD', of)}) IS NOT ({_over('NEW', of)})" for of in table.columns.values())
        for event, row, when in (
            ("INSERT", "NEW", table.where),
            ("DELETE", "OLD", table.where),
            ("UPDATE", "NEW", f"{table.where} AND ({differs})"),
        ):
            conn.execute(
                f"CREATE TEMP TRIGGER second_copy_{name}_{event} AFTER {event} ON main.{name} WHEN {_over(row, when)}"
                f" BEGIN SELECT second_copy('{name}', {row}.{table.key}); END"
            )


def _over(row: str, expression: str) -> str:
    """
    >>> _over("NEW", "@key IN ('boot.id')")
    "NEW.key IN ('boot.id')"
    """
    return expression.replace("@", f"{row}.")


def _line(before: str, line: _Line) -> tuple[bytes, str]:
    content = msgspec.json.encode(line)
    digest = _digest(before, content)
    return b"%s %s\n" % (digest.encode(), content), digest


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """All of it. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _replace(beside: Path, path: Path, content: bytes | bytearray) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.rename(beside, path)
    plain_file.sync(path.parent)
