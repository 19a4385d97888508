"""`hive audit verify`: the chain of the audit table, read from its file, whether or not a daemon runs on it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hive.errors import HiveError, NotFound, NotPermitted, WrongState
from hive.files.backup_contents import HiveFiles
from hive.store import acts, anchors, audit, chain, explain, reading
from hive.store.chain import ChainVerdict, Head
from hive.store.migrations import schema_of

CHAIN_STEP = 5
"""The step of the schema that has the columns of the chain."""


class Checked(NamedTuple):
    """`anchors`: the file they are in, None where there is none; `noted`: how many are known, those from elsewhere
    too; `unreadable`: lines that are none. `waiting`: acts of the `hive` command that are no rows yet.
    """

    verdict: ChainVerdict
    database: Path
    anchors: Path | None
    noted: int
    unreadable: int
    waiting: int


class _Known(NamedTuple):
    """`told`: heads from elsewhere, like the journal; `beside`: the file of the anchors, and what was in it."""

    told: Sequence[Head]
    beside: Path
    noted: anchors.Anchors


def verify(place: HiveFiles, known: Sequence[Head] = ()) -> Checked:
    """Looks at every row. `known`: heads from elsewhere, like the journal. Writes nothing.

    The anchors are read before the rows: a daemon that goes on meanwhile only adds rows behind them.

    Raises NotFound (no database), WrongState (an older Hive wrote it), NotPermitted, HiveError (it is damaged).
    """
    path = place.database
    beside, waiting = anchors.anchors_of(path), acts.acts_of(path)
    with _reading(beside):
        noted = anchors.read(beside)
    with _reading(path):
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    with _reading(waiting):
        acts_waiting = len(acts.read(waiting).acts)
    heads = _Known(known, beside, noted)
    had_log = reading.has_log(path)
    try:
        verdict = _verdict(path, heads)
        if not had_log and reading.has_log(path):  # a daemon came up meanwhile, and this may be half of a change
            verdict = _verdict(path, heads)
    except sqlite3.Error as error:
        raise explain.sqlite_error(error, path) from error
    count = len(noted.heads) + len(known)
    return Checked(verdict, path, beside if noted.is_there else None, count, noted.unreadable, acts_waiting)


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


def _verdict(path: Path, known: _Known) -> ChainVerdict:
    """The verdict on the state of one moment."""
    with reading.opened(path) as conn:
        # What is no UTF-8 was changed by hand: it is to be found, not to be stumbled over.
        conn.text_factory = lambda text: text.decode(errors="replace")
        conn.isolation_level = None
        conn.execute("BEGIN")
        if schema_of(conn).taken < CHAIN_STEP:
            if known.noted.heads:
                raise HiveError(f"{path} says that its audit table has no chain, and {known.beside} has heads of one")
            raise WrongState(f"an older Hive wrote {path}: its audit table has no chain", hint="start this Hive once")
        begun_after = audit.begun_after(conn)
        # Once more: rows may have been pruned since they were read, and what says so is noted before they go.
        with _reading(known.beside):
            now = anchors.read(known.beside)
        return chain.verify(
            audit.links(conn),
            [*known.noted.heads, *known.told],
            begun_after=begun_after,
            begins_as_noted=known.noted.vouch_for(begun_after) or now.vouch_for(begun_after),
            numbered_to=audit.numbered_to(conn),
            beginnings=known.noted.beginnings | now.beginnings if known.noted.heads or now.heads else None,
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
