"""The tables of the pool, in a real database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.store import pool
from hive.store.migrations import migrate


@pytest.fixture
def conn(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(tmp_path / "p.db", isolation_level=None)
    found.row_factory = sqlite3.Row
    migrate(found)
    yield found
    found.close()


def test_a_footprint_is_read_back_and_the_newest_one_counts(conn: sqlite3.Connection) -> None:
    pool.put_footprint(conn, "a", "{1}", 10.0)
    pool.put_footprint(conn, "b", "{2}", 11.0)
    pool.put_footprint(conn, "a", "{3}", 12.0)
    assert pool.footprints(conn) == {"a": "{3}", "b": "{2}"}
    assert conn.execute("SELECT updated_at FROM footprints WHERE key = 'a'").fetchone()[0] == 12.0


def test_a_pin_is_as_old_as_its_first_word_and_an_unpin_is_a_word_too(conn: sqlite3.Connection) -> None:
    pool.put_pin(conn, "m", True, "uid:0", 10.0)
    pool.put_pin(conn, "m", True, "uid:7", 20.0)
    assert pool.pins(conn) == {"m": (True, 10.0)}
    pool.put_pin(conn, "m", False, "uid:7", 30.0)
    assert pool.pins(conn) == {"m": (False, 30.0)}
    pool.drop_pin(conn, "m")
    pool.drop_pin(conn, "m")
    assert pool.pins(conn) == {}
