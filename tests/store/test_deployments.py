"""The registry's rows: written whole, over an older one, and let alone where another order came since."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hive.domain import DeploymentState
from hive.store import deployments
from hive.store.deployments import StoredDeployment
from hive.store.migrations import migrate

S = DeploymentState
ROW = StoredDeployment(
    id="m-1", name="m", digest="d", path="/m.gguf", backend="llama", deployed_by="uid:0", at=1.5, state=S.LOADING
)


@pytest.fixture
def conn(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(tmp_path / "m.db", isolation_level=None)
    found.row_factory = sqlite3.Row
    migrate(found)
    yield found
    found.close()


def test_a_row_comes_back_as_it_was_and_a_later_order_is_over_it(conn: sqlite3.Connection) -> None:
    deployments.put(conn, ROW)
    assert deployments.living(conn) == [ROW]
    later = replace(ROW, at=2.5, deployed_by="token:ci", signature="ann, ben")
    deployments.put(conn, later)
    assert deployments.living(conn) == [later]


def test_an_earlier_order_neither_moves_nor_ends_a_later_one(conn: sqlite3.Connection) -> None:
    later = replace(ROW, at=2.5)
    deployments.put(conn, later)
    deployments.move(conn, replace(ROW, state=S.FAILED, last_error="no"))
    deployments.remove(conn, ROW)
    assert deployments.living(conn) == [later]
    deployments.move(conn, replace(later, state=S.LOADED))
    assert deployments.living(conn) == [replace(later, state=S.LOADED)]
    deployments.remove(conn, later)
    assert deployments.living(conn) == []


def test_rows_of_a_newer_hive_keep_no_daemon_from_starting(conn: sqlite3.Connection) -> None:
    deployments.put(conn, ROW)
    conn.execute(
        "INSERT INTO deployments SELECT 'a-1', 'adapter', name, digest, path, backend, base, signature,"
        " deployed_by, at, state, last_error FROM deployments"
    )
    conn.execute("UPDATE deployments SET state = 'of a newer hive'")
    assert deployments.living(conn) == [replace(ROW, state=S.ABSENT)]
    assert conn.execute("SELECT count(*) FROM deployments").fetchone()[0] == 2
