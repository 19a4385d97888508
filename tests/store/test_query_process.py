"""SQL over a real database of Hive's: what a query finds, what it never finds, and what ends it.

`answer` is called in this process; tests/control/test_state_queries.py has the process and its limits.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.store import query_process
from hive.store.migrations import migrate
from hive.store.query_process import ANSWER_BYTES, QueryHead, QueryOrder, answer
from hive.store.query_rules import QueryRules, internal_name
from hive.store.responses import TABLES as RESPONSES

SECRET = "sesame"
"""In every secret column."""
HIDING = {
    "agents": "spec",
    "agent_prompts": "system_prompt",
    "api_tokens": "digest",
    "messages": "text",
    "responses": "items",
}


class State:
    """A `hive.db` and a `responses.db` with a row in each table that holds secrets."""

    def __init__(self, directory: Path) -> None:
        self.database, self.responses = directory / "hive.db", directory / "responses.db"
        conn = self.connect()
        conn.execute("PRAGMA journal_mode = WAL")
        migrate(conn)
        conn.execute(
            "INSERT INTO agents VALUES ('a', 'alice', 'process', ?, 'running', 'awake', 'awake', 1, '', 1.0, 't',"
            " 'low', NULL, 'no', NULL, 0, 0, 0, 0, NULL, 1.0, NULL, '')",
            (f'{{"env": "{SECRET}"}}',),
        )
        conn.execute("INSERT INTO agent_prompts VALUES ('a', ?, 0)", (SECRET,))
        conn.execute(
            "INSERT INTO api_tokens VALUES ('t_1', 'ci', ?, 'viewer', 'uid:0', 1.0, NULL, NULL, NULL)", (SECRET,)
        )
        conn.execute("INSERT INTO messages VALUES (1, 'm', 'a', ?, 'uid:0', 1.0, 0, 0, '', NULL, NULL)", (SECRET,))
        conn.close()
        conn = sqlite3.connect(self.responses, isolation_level=None)
        conn.executescript(RESPONSES)
        conn.execute("INSERT INTO responses VALUES (1, 'a', 'r', NULL, 1.0, 9, ?, ?)", (SECRET, SECRET))
        conn.close()

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.database, isolation_level=None)

    def order(self, sql: str = "", **asked: Any) -> QueryOrder:
        given = {"what": "query", "limit": 1000, "timeout_s": 20.0, "sql": sql, **asked}
        return msgspec.convert(
            {"database": str(self.database), "responses": str(self.responses), **given}, type=QueryOrder
        )

    def ask(self, sql: str, **asked: Any) -> dict[str, Any]:
        head, text = answer(self.order(sql, **asked))
        assert head.code == "", head
        found: dict[str, Any] = msgspec.json.decode(text)
        assert head.rows == len(found["rows"])
        return found

    def refused(self, sql: str, **asked: Any) -> QueryHead:
        head, text = answer(self.order(sql, **asked))
        assert head.code, text
        assert text == b""
        return head


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    return State(tmp_path_factory.mktemp("state"))


# what is hidden -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "column"), HIDING.items())
def test_a_secret_is_null_and_said_to_be_hidden_and_shown_when_it_is_asked_for(
    state: State, table: str, column: str
) -> None:
    found = state.ask(f"SELECT * FROM {table}")
    assert found["rows"][0][column] is None
    assert f"{table}.{column}" in found["hidden"]
    assert SECRET not in str(found)
    shown = state.ask(f"SELECT * FROM {table}", secrets=True)
    assert SECRET in str(shown["rows"][0][column])
    assert (shown["hidden"], shown["secrets"]) == ([], True)


@pytest.mark.parametrize(
    "sql",
    [
        # SQLite's authorizer is not asked about a column that USING or NATURAL names: it alone showed every digest here
        "WITH g({column}) AS (VALUES ('x')) SELECT {column} FROM g FULL JOIN {table} USING ({column})",
        "WITH g({column}) AS (VALUES ('x')) SELECT * FROM g NATURAL FULL JOIN {table}",
        "WITH g({column}) AS (VALUES ('x')) SELECT {column} FROM g RIGHT JOIN {table} USING ({column})",
        "WITH g({column}) AS (VALUES ('sesame')) SELECT 'found sesame' FROM g JOIN {table} USING ({column})",
        "WITH g({column}) AS (VALUES ('sesame')) SELECT 'found sesame' FROM g NATURAL JOIN {table}",
        "SELECT (SELECT {column} FROM {table}), max({column}), group_concat({column}), json_group_array({column})"
        " FROM {table}",
        "SELECT * FROM (SELECT {column} || '' FROM {table} UNION SELECT {column} FROM {table})",
        "SELECT 'found sesame' FROM {table} WHERE {column} LIKE '%sesame%'",
        "SELECT 'found sesame' WHERE 'sesame' IN (SELECT {column} FROM {table})",
        "SELECT 'found sesame' FROM {table} ORDER BY {column} = 'sesame' LIMIT (SELECT count({column}) FROM {table})",
        "WITH {table} AS (SELECT * FROM {table}) SELECT * FROM {table}",
        "WITH x AS (SELECT {column} FROM {table}) SELECT * FROM x FULL JOIN {table} USING ({column})",
        "SELECT value FROM {table}, json_each(json_array({column}))",
        "SELECT first_value({column}) OVER () FROM {table}",
        "SELECT quote({column}) || typeof({column}) || hex({column}) FROM {table}",
        "EXPLAIN SELECT {column} FROM {table}",
        'SELECT "{column}" FROM [{table}]',
        "SELECT {column} FROM `{table}` AS t GROUP BY 1 HAVING {column} IS NULL",
        "VALUES ((SELECT {column} FROM temp.{table}))",
    ],
)
@pytest.mark.parametrize(("table", "column"), HIDING.items())
def test_a_secret_comes_out_in_no_way(state: State, table: str, column: str, sql: str) -> None:
    head, text = answer(state.order(sql.format(table=table, column=column)))
    assert head.code in ("", "bad_request"), head
    assert b'"found sesame":"' not in text
    assert b"sesame" not in text.replace(b"'found sesame'", b"").replace(b"%sesame%", b"").replace(b"'sesame'", b"")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM main.api_tokens",
        "SELECT * FROM hive.api_tokens",
        "WITH g(digest) AS (VALUES ('x')) SELECT digest FROM g FULL JOIN main.api_tokens USING (digest)",
        "SELECT * FROM sqlite_dbpage",
        "WITH g(data) AS (VALUES ('x')) SELECT data FROM g FULL JOIN sqlite_dbpage USING (data)",
        'SELECT sql FROM temp."SQLite_Master"',
        "WITH g(sql) AS (VALUES ('x')) SELECT sql FROM g FULL JOIN sqlite_temp_schema USING (sql)",
        "SELECT sample FROM sqlite_stat4",
        "SELECT * FROM dbstat",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM bytecode('SELECT 1')",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT writefile('{out}', 'x')",
        "PRAGMA database_list",
        "PRAGMA query_only = OFF",
        "PRAGMA temp_store = FILE",
        "PRAGMA writable_schema = ON",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA journal_mode",
        "PRAGMA integrity_check",
        "ATTACH '/etc/passwd' AS x",
        "ATTACH '{out}' AS x",
        "DETACH temp",
        "VACUUM INTO '{out}'",
        "VACUUM",
        "INSERT INTO uids VALUES (1, 'a', NULL)",
        "INSERT INTO uids VALUES (1, 'a', NULL) RETURNING uid",
        "UPDATE messages SET text = 'x' RETURNING text",
        "DELETE FROM api_tokens",
        "WITH x AS (SELECT 1) DELETE FROM api_tokens RETURNING digest",
        "REPLACE INTO messages SELECT * FROM messages",
        "DROP VIEW api_tokens",
        "DROP TABLE IF EXISTS temp.api_tokens",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x AS SELECT 1",
        "CREATE TEMP VIEW x AS SELECT 1",
        "CREATE TEMP TRIGGER x INSTEAD OF DELETE ON uids BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE temp.x USING fts5(a)",
        "ALTER TABLE uids ADD COLUMN x",
        "ANALYZE",
        "REINDEX",
        "BEGIN",
        "SAVEPOINT x",
        "COMMIT",
        "EXPLAIN DELETE FROM uids",
        "SELECT 1; DELETE FROM uids",
    ],
)
@pytest.mark.parametrize("secrets", [False, True])
def test_what_does_more_than_read_tables_is_refused(state: State, sql: str, secrets: bool) -> None:
    before = state.database.read_bytes()
    out = state.database.with_name("out")
    assert state.refused(sql.replace("{out}", str(out)), secrets=secrets).code in ("not_permitted", "bad_request")
    assert state.database.read_bytes() == before
    assert not out.exists()


def test_an_unknown_column_of_a_newer_hive_is_hidden(tmp_path: Path) -> None:
    state = State(tmp_path)
    conn = state.connect()
    conn.execute("ALTER TABLE uids ADD COLUMN pin TEXT DEFAULT 'sesame'")
    conn.execute("CREATE TABLE vault (word TEXT)")
    conn.execute("INSERT INTO uids VALUES (1, 'a', NULL, 'sesame')")
    conn.execute("INSERT INTO vault VALUES ('sesame')")
    conn.execute("CREATE VIEW opened AS SELECT word FROM vault")
    conn.close()
    for sql in ("SELECT * FROM opened", "WITH g(word) AS (SELECT 1) SELECT word FROM g FULL JOIN opened USING (word)"):
        assert state.refused(sql).code == "not_permitted"
    found = state.ask("SELECT uid, pin, word FROM uids, vault")
    assert found["rows"] == [{"uid": 1, "pin": None, "word": None}]
    assert found["hidden"] == ["uids.pin", "vault.word"]


def test_without_its_views_a_query_reads_nothing() -> None:
    """SQLite drops every temporary view when `PRAGMA temp_store` changes, and then their names were those of the tables
    behind them: a first version of this set it too late, and showed everything."""
    rules = QueryRules(["api_tokens"], {"api_tokens": ["digest"]}, ["s1"])
    read = sqlite3.SQLITE_READ
    assert rules(read, "api_tokens", "name", "s1", "api_tokens") == sqlite3.SQLITE_OK
    assert rules(read, "api_tokens", "name", "s1", None) == sqlite3.SQLITE_DENY
    assert rules(read, "api_tokens", "digest", "s1", "api_tokens") == sqlite3.SQLITE_DENY
    assert rules.refused == "api_tokens.name behind its view"


@pytest.mark.parametrize(
    ("action", "first", "second", "database", "is_permitted"),
    [
        (sqlite3.SQLITE_SELECT, None, None, None, True),
        (sqlite3.SQLITE_RECURSIVE, None, None, None, True),
        (sqlite3.SQLITE_FUNCTION, None, "UPPER", None, True),
        (sqlite3.SQLITE_FUNCTION, None, "load_extension", None, False),
        (sqlite3.SQLITE_FUNCTION, None, "of_a_newer_sqlite", None, False),
        (sqlite3.SQLITE_PRAGMA, "table_info", "agents", None, True),
        (sqlite3.SQLITE_PRAGMA, "TABLE_INFO", "agents", None, True),
        (sqlite3.SQLITE_PRAGMA, "query_only", "0", None, False),
        (sqlite3.SQLITE_READ, "agents", "name", "temp", True),
        (sqlite3.SQLITE_READ, "agents", "name", "main", False),
        (sqlite3.SQLITE_READ, "cte", "", None, True),
        (sqlite3.SQLITE_READ, "json_each", "value", "main", True),
        (sqlite3.SQLITE_READ, "sqlite_dbpage", "data", "main", False),
        (sqlite3.SQLITE_READ, "sqlite_temp_master", "sql", "temp", False),
        (sqlite3.SQLITE_ATTACH, "x", None, None, False),
        (sqlite3.SQLITE_UPDATE, "sqlite_master", "name", "main", False),
        (9999, None, None, None, False),
    ],
)
def test_the_rules(
    action: int, first: str | None, second: str | None, database: str | None, is_permitted: bool
) -> None:
    rules = QueryRules(["agents"], {"agents": ["spec"]}, ["s1"])
    assert (rules(action, first, second, database, None) == sqlite3.SQLITE_OK) is is_permitted
    assert bool(rules.refused) is not is_permitted


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT 1", ""),
        ("SELECT sqlite_version ()", ""),
        ("SELECT * FROM sqlite_version", "sqlite_version"),
        ("SELECT * FROM SQLITE_STAT1", "SQLITE_STAT1"),
        ('SELECT * FROM temp."sqlite_master"', "sqlite_master"),
    ],
)
def test_tables_of_sqlites_own_are_found_by_their_names(sql: str, found: str) -> None:
    assert internal_name(sql) == found


def test_such_a_name_in_a_text_is_given_as_a_parameter(state: State) -> None:
    assert "parameter" in state.refused("SELECT 'sqlite_stat1'").hint
    assert state.ask("SELECT :word AS word", params={"word": "sqlite_stat1"})["rows"] == [{"word": "sqlite_stat1"}]


# what is found --------------------------------------------------------------------------------------------------------


def test_rows_are_objects_and_say_when_there_are_more(state: State) -> None:
    sql = "SELECT value AS n FROM json_each('[1,2,3]')"
    assert state.ask(sql)["rows"] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert (state.ask(sql)["truncated"], state.ask(sql, limit=3)["truncated"]) == (None, None)
    cut = state.ask(sql, limit=2)
    assert (cut["rows"], cut["truncated"]) == ([{"n": 1}, {"n": 2}], "rows")


def test_an_answer_is_no_longer_than_it_may_be(state: State) -> None:
    found = state.ask("SELECT hex(zeroblob(1000000)) AS x FROM json_each('[1,2,3,4,5,6,7,8]')")
    assert (len(found["rows"]), found["truncated"]) == (4, "bytes")
    assert len(msgspec.json.encode(found)) < ANSWER_BYTES + 1000
    assert state.ask(f"SELECT zeroblob({ANSWER_BYTES}) AS x")["truncated"] == "bytes"


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("NULL", None),
        ("9223372036854775807", 9223372036854775807),
        ("-9223372036854775808", -9223372036854775808),
        ("1.5", 1.5),
        ("9e999", "Infinity"),
        ("-9e999", "-Infinity"),
        ("9e999 - 9e999", None),
        ("'a' || char(0, 10, 27) || '\u6a21'", "a\0\n\x1b\u6a21"),
        ("x'00ff'", {"$base64": True, "encoded": "AP8="}),
        ("CAST(x'61ff' AS TEXT)", {"$base64": True, "encoded": "Yf8="}),
        ("CAST(x'eda080' AS TEXT)", {"$base64": True, "encoded": "7aCA"}),
        ("''", ""),
    ],
)
def test_every_value_of_sqlite_has_a_form_in_json(state: State, sql: str, value: object) -> None:
    assert state.ask(f"SELECT {sql} AS v")["rows"] == [{"v": value}]


def test_columns_of_one_name_are_told_apart(state: State) -> None:
    found = state.ask("SELECT 1 AS id, 2 AS id, 3 AS id_2, 4 AS id")
    assert found["columns"] == ["id", "id_3", "id_2", "id_4"]
    assert found["rows"] == [{"id": 1, "id_3": 2, "id_2": 3, "id_4": 4}]


def test_parameters_are_given_by_name(state: State) -> None:
    found = state.ask("SELECT name FROM agents WHERE name = :name AND :one + 1 = 2", params={"name": "alice", "one": 1})
    assert found["rows"] == [{"name": "alice"}]
    assert "-p NAME=VALUE" in state.refused("SELECT :missing").hint
    assert state.refused("SELECT ?").code == "bad_request"
    assert state.refused("SELECT :n", params={"n": 2**64}).code == "bad_request"


@pytest.mark.parametrize(
    ("sql", "code", "message", "hint"),
    [
        ("SELEC 1", "bad_request", 'near "SELEC": syntax error', ""),
        ("SELECT * FROM agnets", "bad_request", "no such table: agnets", "did you mean `agents`?"),
        ("SELECT nme FROM agents", "bad_request", "no such column: nme", "hive db schema"),
        ("SELECT 1; SELECT 2", "bad_request", "one statement at a time", ""),
        ("-- nothing", "bad_request", "no statement", ""),
        ("SELECT randomblob(1000000000)", "too_large", "larger than 16 MiB", ""),
        ("SELECT hex(zeroblob(16000000))", "too_large", "larger than 16 MiB", ""),
        ("DELETE FROM agents", "not_permitted", "a change is refused", "hive db tables"),
        ("ANALYZE", "not_permitted", "nothing else", "hive db tables"),
    ],
)
def test_what_is_wrong_is_said(state: State, sql: str, code: str, message: str, hint: str) -> None:
    head = state.refused(sql)
    assert head.code == code
    assert message in head.message
    assert hint in head.hint


def test_a_query_that_takes_too_long_is_ended(state: State) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    assert state.refused(endless, timeout_s=0.1).code == "timeout"


def test_kept_responses_are_not_asked_for_where_there_are_none(state: State) -> None:
    assert state.refused("SELECT * FROM responses", responses="").message == "SQL: no such table: responses"


def test_what_is_written_meanwhile_is_seen(tmp_path: Path) -> None:
    """The file is in WAL mode, and open in another process: what is not checkpointed yet counts."""
    state = State(tmp_path)
    conn = state.connect()
    conn.execute("INSERT INTO uids VALUES (7, 'a', NULL)")
    assert state.ask("SELECT uid FROM uids")["rows"] == [{"uid": 7}]
    conn.close()


# tables and schema ----------------------------------------------------------------------------------------------------


def test_tables_have_rows_bytes_and_columns(state: State) -> None:
    head, text = answer(state.order(what="tables"))
    assert head.code == ""
    tables = {one["name"]: one for one in msgspec.json.decode(text)["tables"]}
    assert set(HIDING) <= set(tables)
    assert not [name for name in tables if name.startswith("sqlite_")]
    tokens = tables["api_tokens"]
    assert (tokens["file"], tokens["rows"], tables["responses"]["file"]) == ("hive.db", 1, "responses.db")
    assert tokens["bytes"] is None or tokens["bytes"] >= 4096
    assert tokens["columns"][0] | {"type": ""} == {
        "name": "id",
        "type": "",
        "not_null": True,
        "default": None,
        "primary_key": 1,
        "hidden": False,
    }
    assert [column["name"] for column in tokens["columns"] if column["hidden"]] == ["digest"]
    assert SECRET not in text.decode()


def test_what_cannot_be_counted_in_time_is_unknown(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_process, "COUNTED_WITHIN_S", -1.0)
    monkeypatch.setattr(query_process, "OPS_BETWEEN_LOOKS", 1)
    _, text = answer(state.order(what="tables"))
    assert {(one["rows"], one["bytes"]) for one in msgspec.json.decode(text)["tables"]} == {(None, None)}


def test_the_schema_is_what_makes_the_database_again(state: State) -> None:
    _, text = answer(state.order(what="schema"))
    conn = sqlite3.connect(":memory:")
    for one in msgspec.json.decode(text)["tables"]:
        for statement in one["sql"]:
            conn.execute(statement)
    names = "SELECT name FROM sqlite_master WHERE sql IS NOT NULL AND name != 'sqlite_sequence'"
    there = {row[0] for path in (state.database, state.responses) for row in _rows(path, names)}
    assert {row[0] for row in conn.execute(names)} == there
    conn.close()


def _rows(path: Path, sql: str) -> list[Any]:
    conn = sqlite3.connect(path)
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


def test_some_tables_or_none_of_that_name(state: State) -> None:
    _, text = answer(state.order(what="schema", tables=["uids", "responses"]))
    found = msgspec.json.decode(text)["tables"]
    assert [one["name"] for one in found] == ["uids", "responses"]
    assert any(statement.startswith("CREATE INDEX uids_agent") for statement in found[0]["sql"])
    head, _ = answer(state.order(what="schema", tables=["uidz"]))
    assert (head.code, head.hint) == ("not_found", "did you mean `uids`?")
