"""The audit table: the oldest rows go, and only they."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hive.store import audit
from hive.store.audit import KEPT_S, AuditRow
from hive.store.database import Database

NOW = 2 * KEPT_S


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ROWS_MAX", 8)
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 3)


async def add(database: Database, *ats: float) -> None:
    for at in ats:
        row = AuditRow(at=at, actor="uid:0", act="agent.created", target=str(at), origin="api")
        await database.write(lambda conn, row=row: audit.append(conn, row))  # type: ignore[misc]


@pytest.fixture
def prune(database: Database) -> Callable[[], object]:
    return lambda: database.write(lambda conn: audit.prune(conn, now=float(NOW)))


async def left(database: Database) -> list[float]:
    return [row.at for row in await database.read(lambda conn: audit.tail(conn, 100))]


async def test_what_is_too_old_goes_in_slices(database: Database, prune: Callable[..., object]) -> None:
    await add(database, 1.0, 2.0, 3.0, 4.0, NOW - KEPT_S - 0.1, NOW - KEPT_S, NOW)
    assert [await prune(), await prune(), await prune()] == [3, 2, 0]  # type: ignore[misc]
    assert await left(database) == [NOW - KEPT_S, NOW]


async def test_an_old_row_behind_a_young_one_stays_until_that_goes(
    database: Database, prune: Callable[..., object]
) -> None:
    """The host's clock was set back: what is left has no gap."""
    await add(database, 1.0, NOW, 2.0)
    assert [await prune(), await prune()] == [1, 0]  # type: ignore[misc]
    assert await left(database) == [NOW, 2.0]


async def test_beyond_their_number_the_oldest_go_however_young(
    database: Database, prune: Callable[..., object]
) -> None:
    await add(database, *(NOW + number for number in range(13)))
    assert [await prune(), await prune(), await prune()] == [3, 2, 0]  # type: ignore[misc]
    assert await left(database) == [NOW + number for number in range(5, 13)]


async def test_an_empty_table_has_nothing_to_prune_and_numbers_are_not_used_again(
    database: Database, prune: Callable[..., object]
) -> None:
    assert await prune() == 0  # type: ignore[misc]
    await add(database, 1.0)
    assert await prune() == 1  # type: ignore[misc]
    await add(database, NOW)
    found = await database.read(lambda conn: conn.execute("SELECT id FROM audit_log").fetchall())
    assert [row["id"] for row in found] == [2]
