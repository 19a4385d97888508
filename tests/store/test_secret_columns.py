"""Every column of every table says whether it holds a secret."""

from __future__ import annotations

import sqlite3

import pytest

from hive.store.migrations import migrate
from hive.store.responses import TABLES as RESPONSES
from hive.store.secret_columns import TABLES, is_hidden


def columns_of(conn: sqlite3.Connection) -> dict[str, set[str]]:
    names = [row[0] for row in conn.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    return {
        name: {row[1] for row in conn.execute(f"PRAGMA table_xinfo({name})")}
        for name in names
        if not name.startswith("sqlite_")
    }


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    state, responses = (sqlite3.connect(":memory:", isolation_level=None) for _ in range(2))
    migrate(state)
    responses.executescript(RESPONSES)
    found = {**columns_of(state), **columns_of(responses)}
    assert len(found) == len(columns_of(state)) + len(columns_of(responses)), "two tables of one name"
    state.close()
    responses.close()
    return found


def test_every_column_is_open_or_secret_and_no_other_is_named(there: dict[str, set[str]]) -> None:
    """A step of migrations.py that adds a column fails here until somebody has said what it holds."""
    assert {name: columns.open | columns.secret for name, columns in TABLES.items()} == there


def test_no_column_is_both() -> None:
    assert not [name for name, columns in TABLES.items() if columns.open & columns.secret]


def test_what_is_secret_is_hidden_and_what_nobody_knows_too() -> None:
    assert all(is_hidden(name, column) for name, columns in TABLES.items() for column in columns.secret)
    assert is_hidden("agents", "of_a_newer_hive")
    assert is_hidden("of_a_newer_hive", "id")
    assert not is_hidden("agents", "name")


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("agents", "spec"),
        ("agent_prompts", "system_prompt"),
        ("api_tokens", "digest"),
        ("messages", "text"),
        ("responses", "items"),
        ("responses", "response"),
    ],
)
def test_these_are_never_open(table: str, column: str) -> None:
    assert column in TABLES[table].secret
