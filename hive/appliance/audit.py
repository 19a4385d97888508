"""`hive audit verify`: the chain of the audit table, read from its file, whether or not a daemon runs on it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from hive.appliance.parts import Place
from hive.errors import HiveError, NotFound, NotPermitted, WrongState
from hive.store import anchors, audit, chain, explain
from hive.store.chain import Head, Verdict
from hive.store.migrations import schema_of

CHAIN_STEP = 5
"""The step of the schema that has the columns of the chain."""


class Checked(NamedTuple):
    """`anchors`: where they were read; `unreadable`: lines of it that are none."""

    verdict: Verdict
    database: Path
    anchors: Path
    noted: int
    unreadable: int


def verify(place: Place, known: Sequence[Head] = ()) -> Checked:
    """Looks at every row. `known`: heads from elsewhere, like the journal. Writes nothing.

    The anchors are read before the rows: a daemon that goes on meanwhile only adds rows behind them.

    Raises NotFound (no database), WrongState (an older Hive wrote it), NotPermitted, HiveError (it is damaged).
    """
    path, beside = place.database, anchors.anchors_of(place.database)
    with _reading(beside):
        noted = anchors.read(beside)
    with _reading(path):
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    heads = [*noted.heads, *known]
    wal = path.with_name(path.name + "-wal")
    had_wal = wal.exists()
    try:
        verdict = _verdict(path, heads, "" if had_wal else "&immutable=1")
        if not had_wal and wal.exists():  # a daemon came up meanwhile, and what was seen may be half of a change
            verdict = _verdict(path, heads, "")
    except sqlite3.Error as error:
        raise explain.sqlite_error(error, path) from error
    return Checked(verdict, path, beside, len(heads), noted.unreadable)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"there is no {path}", hint="which Hive is meant is said with --state-dir") from None
    except PermissionError:
        raise NotPermitted(f"this user may not read {path}", hint="sudo hive audit verify") from None
    except OSError as error:
        raise HiveError(f"cannot read {path}: {error.strerror or error}") from error


def _verdict(path: Path, heads: Sequence[Head], options: str) -> Verdict:
    """Of one moment. `options`: `immutable` only where there is no write-ahead log, which it would not look at."""
    with closing(sqlite3.connect(f"file:{quote(os.fspath(path))}?mode=ro{options}", uri=True)) as conn:
        # What is no UTF-8 was changed by hand: it is to be found, not to be stumbled over.
        conn.text_factory = lambda text: text.decode(errors="replace")
        conn.isolation_level = None
        conn.execute("BEGIN")
        if schema_of(conn).taken < CHAIN_STEP:
            raise WrongState(f"an older Hive wrote {path}: its audit table has no chain", hint="start this Hive once")
        return chain.verify(
            audit.links(conn), heads, begun_after=audit.begun_after(conn), numbered_to=audit.numbered_to(conn)
        )


def head_of(text: str) -> Head | None:
    """`ID:HASH`, as the daemon's log says it; None where it is not.

    >>> head_of("12:" + "0a" * 32).id, head_of("12"), head_of("0:" + "0" * 64)
    (12, None, None)
    """
    number, _, digest = text.partition(":")
    is_id = number.isascii() and number.isdecimal() and len(number) < 16 and int(number) > 0
    is_hash = len(digest) == 64 and not set(digest) - set("0123456789abcdef")
    return Head(int(number), digest) if is_id and is_hash else None
