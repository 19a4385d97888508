"""The table of the API's tokens, in a real database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.domain import Role, TokenState
from hive.errors import NotFound, WrongState
from hive.store import tokens
from hive.store.migrations import migrate
from hive.store.tokens import KEPT, StoredToken


@pytest.fixture
def conn(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    found.row_factory = sqlite3.Row
    migrate(found)
    yield found
    found.close()


def token(number: int, name: str = "ci", **fields: object) -> StoredToken:
    made = StoredToken(
        id=f"t_{number}", name=name, digest=f"{number:064x}", role=Role.OPERATOR, created_by="uid:0", created_at=number
    )
    return StoredToken(**{**{field: getattr(made, field) for field in made.__struct_fields__}, **fields})


def test_what_is_added_is_read_back_as_it_was(conn: sqlite3.Connection) -> None:
    one = token(1, expires_at=9.5)
    tokens.add(conn, one, now=1.0)
    assert tokens.all(conn) == [one]


def test_a_scrapers_token_is_one_that_an_older_hive_starts_with_and_lets_nobody_in_by(conn: sqlite3.Connection) -> None:
    """An older Hive knows three roles, and finds a token by its digest."""
    one = token(1, "prometheus", role=Role.SCRAPER)
    tokens.add(conn, one, now=1.0)
    assert tokens.all(conn) == [one]
    assert tokens.revoke(conn, "prometheus", now=2.0).role is Role.SCRAPER
    [(role, digest)] = conn.execute("SELECT role, digest FROM api_tokens").fetchall()
    assert role in ("viewer", "operator", "admin")
    assert digest != one.digest


def test_a_name_is_taken_as_long_as_its_token_is_good(conn: sqlite3.Connection) -> None:
    tokens.add(conn, token(1, expires_at=9.0), now=1.0)
    with pytest.raises(WrongState, match="there is a token named ci already"):
        tokens.add(conn, token(2), now=8.9)
    tokens.add(conn, token(2), now=9.0)
    with pytest.raises(WrongState):
        tokens.add(conn, token(3), now=9.0)
    assert tokens.revoke(conn, "ci", now=10.0).id == "t_2", "the newer one of that name"
    tokens.add(conn, token(3), now=10.0)
    assert [(found.id, found.state(10.0).value) for found in tokens.all(conn)] == [
        ("t_3", "live"),
        ("t_2", "revoked"),
        ("t_1", "expired"),
    ]


def test_a_token_is_revoked_once_by_its_id_or_its_name(conn: sqlite3.Connection) -> None:
    tokens.add(conn, token(1), now=1.0)
    assert tokens.revoke(conn, "t_1", now=2.0).revoked_at is None
    with pytest.raises(WrongState, match="is revoked already"):
        tokens.revoke(conn, "t_1", now=3.0)
    for ref in ("ci", "t_9", ""):
        with pytest.raises(NotFound):
            tokens.revoke(conn, ref, now=3.0)
    assert tokens.all(conn)[0].revoked_at == 2.0


def test_when_they_were_used_is_kept_for_those_there_are(conn: sqlite3.Connection) -> None:
    tokens.add(conn, token(1), now=1.0)
    tokens.used(conn, {"t_1": 5.0, "t_gone": 6.0})
    assert [found.last_used_at for found in tokens.all(conn)] == [5.0]


def test_of_the_dead_only_the_last_ones_are_kept_and_of_the_living_all(conn: sqlite3.Connection) -> None:
    tokens.add(conn, token(0, "first"), now=0.0)
    for number in range(1, KEPT + 3):
        tokens.add(conn, token(number, f"n{number}", expires_at=number + 0.5), now=number)
    tokens.add(conn, token(KEPT + 3, "last"), now=KEPT + 3)
    kept = tokens.all(conn)
    dead = [found for found in kept if found.state(KEPT + 3) is not TokenState.LIVE]
    assert len(dead) == KEPT
    assert {found.name for found in kept} >= {"first", "last", f"n{KEPT + 2}"}
    assert "n1" not in {found.name for found in kept}
