"""The program that reads the state with SQL: `python -m hive.store.query_process ORDER_FD ANSWER_FD`.

It reads one `QueryOrder` from the first descriptor. It writes one line to the second, a `QueryHead`, and the answer.
It is a process of its own because nothing less bounds a query: a single step of SQLite's may take minutes and cannot be
interrupted, and what a sort or a recursive query keeps has no limit in SQLite. So the kernel limits memory and CPU time
here, and the daemon kills it when its time is over or its client has left (docs/decisions/028-sql-over-the-state.md).

A query sees views, one for each table, in which a secret is the constant NULL. The tables behind them are in databases
attached read-only under random names. SQLite's authorizer is the second line (query_rules.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import sqlite3
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, TimedOut, TooLarge, did_you_mean
from hive.store import explain
from hive.store.query_rules import TABLE_FUNCTIONS, QueryRules, internal_name
from hive.store.secret_columns import is_hidden

MEMORY_BYTES = 256 * 1024 * 1024
"""Memory that the process may have of its own; some 20 MiB are Python's."""
VALUE_BYTES = 16 * 1024 * 1024
"""The largest value or row that SQLite makes or reads here."""
ANSWER_BYTES = 8 * 1024 * 1024
"""Rows are added to an answer until it is this long."""
OPS_BETWEEN_LOOKS = 20_000
"""Of SQLite's virtual machine, between two looks at the clock: about 1 ms."""
COUNTED_WITHIN_S = 2.0
"""Rows, and then bytes, of all tables; what is not known by then stays unknown."""
CPU_SLACK_S = 10
"""Beyond the time of a query: the daemon is to kill it before the kernel does."""
NICER = 10
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}

Param = str | int | float | bool | None


class QueryOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of a query. `responses`: empty where there is no such file. `tables`: those whose schema is asked for."""

    what: Literal["tables", "schema", "query"]
    database: str
    responses: str = ""
    tables: list[str] = []
    sql: str = ""
    params: dict[str, Param] = {}
    limit: int = 0
    timeout_s: float
    secrets: bool = False


class QueryHead(msgspec.Struct, frozen=True, kw_only=True):
    """End of a query: `code`, `message` and `hint` of an error, or the number of `rows`."""

    code: str = ""
    message: str = ""
    hint: str = ""
    rows: int = 0


class Deadline:
    """A progress handler: it ends SQLite's work once the time is over."""

    def __init__(self, conn: sqlite3.Connection, within_s: float) -> None:
        self._end = time.monotonic() + within_s
        conn.set_progress_handler(self._look, OPS_BETWEEN_LOOKS)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def _look(self) -> int:
        return int(self.is_over)


def answer(order: QueryOrder) -> tuple[QueryHead, bytes]:
    """Answer to an order, as JSON, or the error. Raises nothing that a query can cause."""
    try:
        match order.what:
            case "tables":
                return QueryHead(), msgspec.json.encode({"tables": list(_tables(order))})
            case "schema":
                return QueryHead(), msgspec.json.encode({"tables": _schema(order)})
            case "query":
                return _queried(order)
    except HiveError as error:
        return QueryHead(code=error.code, message=error.message, hint=error.hint), b""
    except MemoryError:
        return QueryHead(
            code=TooLarge.code, message=f"the query needs more than {MEMORY_BYTES // 2**20} MiB of memory"
        ), b""
    except sqlite3.Error as error:
        told = explain.sqlite_error(error, Path(order.database))
        return QueryHead(code=told.code, message=told.message, hint=told.hint), b""


# a query --------------------------------------------------------------------------------------------------------------


def _queried(order: QueryOrder) -> tuple[QueryHead, bytes]:
    if name := internal_name(order.sql):
        raise NotPermitted(
            f"{name} is SQLite's own: it cannot be used here",
            hint="hive db schema shows the tables; a text with such a word is given as a parameter",
        )
    conn = sqlite3.connect(":memory:", uri=True, isolation_level=None)
    conn.text_factory = text_of
    # Before the views: to change where temporary things are kept drops all there are.
    conn.execute("PRAGMA temp_store = MEMORY")
    rules = _viewed(conn, order)
    deadline = Deadline(conn, order.timeout_s)
    began = time.monotonic()
    with _explained(order, rules, deadline):
        cursor = conn.execute(order.sql, order.params)
        if cursor.description is None:
            raise BadRequest("there is no statement that answers rows")
        columns = unique([column[0] for column in cursor.description])
        rows, truncated = _taken(cursor, columns, order.limit)
    text = msgspec.json.encode(
        {
            "columns": columns,
            "rows": [msgspec.Raw(row) for row in rows],
            "truncated": truncated,
            "hidden": sorted(rules.met),
            "secrets": order.secrets,
            "took_ms": round((time.monotonic() - began) * 1000, 1),
        }
    )
    return QueryHead(rows=len(rows)), text


def _viewed(conn: sqlite3.Connection, order: QueryOrder) -> QueryRules:
    """Attaches the databases, makes the views, and locks the connection: from here on it can only read those."""
    views: list[str] = []
    hidden: dict[str, list[str]] = {}
    schemas: list[str] = []
    for path in filter(None, (order.database, order.responses)):
        schema = f"s{secrets.token_hex(16)}"
        conn.execute(f"ATTACH ? AS {schema}", (_read_only(path),))
        schemas.append(schema)
        for table in _table_names(conn, schema):
            columns = [row[1] for row in conn.execute(f"PRAGMA {schema}.table_info({quoted(table)})")]
            kept_back = [] if order.secrets else [column for column in columns if is_hidden(table, column)]
            parts = [f"NULL AS {quoted(one)}" if one in kept_back else quoted(one) for one in columns]
            conn.execute(f"CREATE TEMP VIEW {quoted(table)} AS SELECT {', '.join(parts)} FROM {schema}.{quoted(table)}")
            views.append(table)
            hidden[table] = kept_back
    # trusted_schema stays on: without it SQLite 3.40 takes an index over json_extract() for a damaged schema.
    conn.execute("PRAGMA query_only = ON")
    conn.execute("PRAGMA cell_size_check = ON")
    for function in sorted(TABLE_FUNCTIONS):
        conn.execute(f"SELECT 1 FROM {function}('[]')").fetchall()  # SQLite makes a table of each at its first use
    for limit, value in LIMITS.items():
        conn.setlimit(limit, value)
    rules = QueryRules(views, hidden, schemas)
    conn.set_authorizer(rules)
    return rules


def _taken(cursor: sqlite3.Cursor, columns: Sequence[str], limit: int) -> tuple[list[bytes], str | None]:
    """The rows as JSON objects, and what bound cut them off: `rows` or `bytes`; None where that are all."""
    rows: list[bytes] = []
    size = 0
    for row in cursor:
        if len(rows) == limit:
            return rows, "rows"
        text = msgspec.json.encode({name: cell_of(value) for name, value in zip(columns, row, strict=True)})
        size += len(text) + 1
        if size > ANSWER_BYTES:
            return rows, "bytes"
        rows.append(text)
    return rows, None


@contextlib.contextmanager
def _explained(order: QueryOrder, rules: QueryRules, deadline: Deadline) -> Iterator[None]:
    """Turns what SQLite raises for a statement into what its author can act on."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeEncodeError) as error:
        said = str(error)
        if rules.refused or said.endswith("because it is a view"):
            raise NotPermitted(
                f"a query reads tables, and nothing else: {rules.refused or 'a change'} is refused",
                hint="hive db tables lists them, hive db schema shows what they are made of",
            ) from None
        if said == "interrupted" and deadline.is_over:
            raise TimedOut(
                f"the query did not end within {order.timeout_s:g} s", hint="--timeout, or ask for less of it"
            ) from None
        if isinstance(error, sqlite3.DataError) or "too big" in said:
            raise TooLarge(f"a value in it is larger than {VALUE_BYTES // 2**20} MiB") from None
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if isinstance(error, sqlite3.Error) and code & 0xFF not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH):
            raise
        raise BadRequest(f"SQL: {said}", hint=_hint(said, rules)) from None


def _hint(said: str, rules: QueryRules) -> str:
    missing = said.partition("no such table: ")[2]
    if missing:
        return did_you_mean(missing, rules.views) or "hive db tables lists the tables"
    if "binding" in said.lower():
        return "-p NAME=VALUE gives :NAME in the statement its value"
    return "hive db schema shows tables and columns" if said.startswith("no such column") else ""


def text_of(raw: bytes) -> str | bytes:
    """A TEXT value; its bytes where they are no UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def cell_of(value: object) -> object:
    """A value of SQLite as JSON has it: bytes as sqlite-utils and Datasette write them, and no number that JSON lacks.

    >>> cell_of(2**62), cell_of(float("-inf")), cell_of(b"hi")
    (4611686018427387904, '-Infinity', {'$base64': True, 'encoded': 'aGk='})
    """
    if isinstance(value, bytes):
        return {"$base64": True, "encoded": b64encode(value).decode()}
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def unique(names: Sequence[str]) -> list[str]:
    """Names of columns, each once: as sqlite-utils does it, the second `id` is `id_2`.

    >>> unique(["id", "id", "id_2", "id"])
    ['id', 'id_3', 'id_2', 'id_4']
    """
    found: list[str] = []
    taken = set(names)
    for name in names:
        one, number = name, 2
        while one in found or (one != name and one in taken):
            one, number = f"{name}_{number}", number + 1
        found.append(one)
    return found


# tables and schema ----------------------------------------------------------------------------------------------------


def _tables(order: QueryOrder) -> Iterator[Mapping[str, Any]]:
    for path, database in _opened(order):
        conn = database.conn
        names = sorted(name for name in database.table_names() if not name.startswith("sqlite_"))
        Deadline(conn, COUNTED_WITHIN_S)
        rows = {name: _unless_late(partial(_count, database, name)) for name in names}
        Deadline(conn, COUNTED_WITHIN_S)
        sizes: Mapping[str, int] = _unless_late(partial(_sizes, conn)) or {}
        conn.set_progress_handler(None, 0)
        for name in names:
            columns = [
                {
                    "name": column.name,
                    "type": column.type,
                    "not_null": bool(column.notnull),
                    "default": column.default_value,
                    "primary_key": column.is_pk,
                    "hidden": is_hidden(name, column.name),
                }
                for column in database[name].columns
            ]
            yield {
                "name": name,
                "file": Path(path).name,
                "rows": rows[name],
                "bytes": sizes.get(name),
                "columns": columns,
            }


def _schema(order: QueryOrder) -> list[Mapping[str, Any]]:
    """Raises NotFound for a table that is not there."""
    found: dict[str, Mapping[str, Any]] = {}
    for path, database in _opened(order):
        for name in sorted(name for name in database.table_names() if not name.startswith("sqlite_")):
            made_by = database.execute(
                "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL ORDER BY type != 'table', name",
                (name,),
            )
            found[name] = {"name": name, "file": Path(path).name, "sql": [row[0] for row in made_by]}
    for name in order.tables:
        if name not in found:
            hint = did_you_mean(name, found) or "hive db tables lists them"
            raise NotFound(f"there is no table {name[:60]!r}", hint=hint)
    return [one for name, one in found.items() if not order.tables or name in order.tables]


def _opened(order: QueryOrder) -> Iterator[tuple[str, Any]]:
    """Each file with its `sqlite_utils.Database`. The import takes 100 ms and 12 MB, so these two alone pay for it."""
    from sqlite_utils import Database

    for path in filter(None, (order.database, order.responses)):
        with contextlib.closing(sqlite3.connect(_read_only(path), uri=True)) as conn:
            conn.execute("PRAGMA query_only = ON")
            yield path, Database(conn, recursive_triggers=False, execute_plugins=False)


def _count(database: Any, table: str) -> int:
    return int(database[table].count)


def _unless_late(ask: Callable[[], Any]) -> Any:
    """Result of `ask`; None if SQLite cannot tell, or not in time."""
    try:
        return ask()
    except sqlite3.OperationalError:
        return None


def _sizes(conn: sqlite3.Connection) -> dict[str, int]:
    """Table → bytes of its pages and its indexes'. Raises OperationalError where SQLite was built without `dbstat`."""
    return dict(
        conn.execute(
            "SELECT tbl_name, sum(pgsize) FROM sqlite_master JOIN dbstat USING (name)"
            " WHERE aggregate = TRUE GROUP BY tbl_name"
        ).fetchall()
    )


def _table_names(conn: sqlite3.Connection, schema: str) -> list[str]:
    found = conn.execute(
        f"SELECT name FROM {schema}.sqlite_master WHERE type IN ('table', 'view') ORDER BY name"
    ).fetchall()
    return [name for (name,) in found if not name.startswith("sqlite_")]


def _read_only(path: str) -> str:
    return f"{Path(path).as_uri()}?mode=ro"


def quoted(name: str) -> str:
    """An SQL identifier.

    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


# the process ----------------------------------------------------------------------------------------------------------


def limit_process(timeout_s: float) -> None:
    """The kernel's limits, behind everything else for CPU time, and the first to go where memory is short."""
    cpu_s = math.ceil(timeout_s) + CPU_SLACK_S
    for limit, value in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 2 * ANSWER_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):  # the unit of an installed daemon does not permit it
        os.nice(NICER)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(order_fd: int, answer_fd: int) -> None:
    with open(order_fd, "rb") as file:
        order = msgspec.json.decode(file.read(), type=QueryOrder)
    limit_process(order.timeout_s)
    head, text = answer(order)
    with open(answer_fd, "wb") as file:
        file.write(msgspec.json.encode(head) + b"\n" + text)
        file.flush()
    os._exit(0)  # what SQLite still holds need not be freed one by one


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
