"""`hive db`, over a real daemon and its database."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hive.cli import db
from hive.domain import Role
from tests.cli.conftest import insert

Hive = Any
"""conftest.Hive: test modules import no siblings."""

NOTE = "hidden, so NULL here: messages.text; --secrets shows it\n"


@pytest.fixture
def hive(hive: Hive) -> Hive:
    """With a message and a token in its database."""
    agent = hive.box.life("alice").agent.id
    row = {"id": "m1", "agent_id": agent, "text": "the report is due", "sender": "uid:0\x1b[2J", "sent_at": 1.7e9}
    hive.daemon.do(insert(hive.box, "messages", **row))
    hive.daemon.do(hive.box.api_token("ci", Role.VIEWER, None, "uid:0"))
    return hive


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes stdout a terminal of so many columns."""

    def become(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))

    return become


def test_a_table_is_on_stdout_and_what_is_hidden_on_stderr(hive: Hive) -> None:
    said = hive("db", "query", "SELECT id, text FROM messages")
    assert (said.code, said.out, said.err) == (0, "id  text\nm1  NULL\n", NOTE)
    shown = hive("db", "query", "SELECT id, text FROM messages", "--secrets", "--table")
    assert (shown.out, shown.err) == ("id  text\nm1  the report is due\n", "")


def test_with_json_it_is_one_object_and_silence(hive: Hive) -> None:
    said = hive("db", "query", "SELECT id, text FROM messages", "--json")
    assert (said.json["schema"], said.json["rows"], said.err) == ("db.query", [{"id": "m1", "text": None}], "")
    assert (said.json["hidden"], said.json["truncated"]) == (["messages.text"], None)


def test_csv_is_as_rfc_4180_has_it(hive: Hive) -> None:
    values = "'a,b' AS x, 'say \"hi\"' AS x, 'two' || char(10) || 'lines' AS \"c,d\", NULL AS n, 9007199254740993 AS i"
    said = hive("db", "query", "--csv", f"SELECT {values}")
    assert said.out == 'x,x_2,"c,d",n,i\r\n"a,b","say ""hi""","two\nlines",,9007199254740993\r\n'
    assert next(iter(csv.DictReader(io.StringIO(said.out, newline=""))))["c,d"] == "two\nlines"


CELLS = {
    "char(27) || '[2J' || char(10) || 'x'": "\\x1b[2J x",
    "char(8238) || 'evil'": "\\u202eevil",
    "x'00ff'": "x'00ff'",
    "zeroblob(40)": f"x'{'00' * 16}…' (40 bytes)",
    "CAST(x'ff' AS TEXT)": "x'ff'",
    "9e999": "Infinity",
    "9223372036854775807": "9223372036854775807",
    "0.1": "0.1",
    "NULL": "NULL",
}


def test_no_value_steers_a_terminal_or_forges_a_row(hive: Hive) -> None:
    said = hive("db", "query", f"SELECT {' AS v UNION ALL SELECT '.join(CELLS)}")
    assert said.out.splitlines()[1:] == list(CELLS.values())


def test_names_of_columns_steer_no_terminal_either(hive: Hive) -> None:
    assert hive("db", "query", 'SELECT 1 AS "a\x1b[2J\nb"').out == "a\\x1b[2J b\n1\n"


def test_csv_goes_into_a_file_as_it_is_and_to_a_terminal_without_what_steers_it(
    hive: Hive, on_a_terminal: Callable[[int], None]
) -> None:
    sql = "SELECT char(27) || '[2J' AS v"
    assert hive("db", "query", "--csv", sql).out == "v\r\n\x1b[2J\r\n"
    on_a_terminal(80)
    assert hive("db", "query", "--csv", sql).out == "v\n\\x1b[2J\n"


@pytest.mark.breadth(3)
@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_a_table_is_no_wider_than_the_terminal(hive: Hive, on_a_terminal: Callable[[int], None], columns: int) -> None:
    on_a_terminal(columns)
    for words in (["tables"], ["query", "SELECT * FROM messages, api_tokens"], ["query", "SELECT hex(zeroblob(999))"]):
        said = hive("db", *words)
        assert said.code == 0
        assert max(map(len, said.out.splitlines())) <= columns, words
    said = hive("db", "query", "SELECT * FROM messages, api_tokens")
    assert "left out for want of room: " in said.err
    assert "--csv and --json have them" in said.err


def test_what_goes_into_a_pipe_is_complete(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said = hive("db", "query", "SELECT hex(zeroblob(500)) AS h, * FROM messages")
    assert "0" * 1000 in said.out
    assert "refused_at" in said.out
    assert said.err == NOTE


def test_more_rows_than_may_be_are_told(hive: Hive) -> None:
    said = hive("db", "query", "SELECT value FROM json_each('[1,2,3]')", "--limit", "2")
    assert (said.out, said.err) == ("value\n1\n2\n", "only the first 2 rows: there are more, --limit N shows them\n")
    assert hive("db", "query", "SELECT value FROM json_each('[1,2,3]')", "--limit", "2", "--json").json[
        "truncated"
    ] == ("rows")
    none = hive("db", "query", "SELECT id FROM agents WHERE name = 'nobody'")
    assert (none.out, none.err) == ("id\n", "no rows\n")


def test_parameters(hive: Hive) -> None:
    sql = "SELECT :a AS a, CAST(:n AS INTEGER) + 1 AS n, number FROM messages WHERE number = :one"
    said = hive("db", "query", sql, "-p", "a=x=y", "--param", "n=41", "-p", ":one=1")
    assert said.out == "a    n   number\nx=y  42  1\n"
    for words in (["-p", "a"], ["-p", "=1"], ["-p", "a=1", "-p", "a=2"]):
        assert hive("db", "query", "SELECT :a", *words).code == 2
    assert "-p NAME=VALUE" in hive("db", "query", "SELECT :a").err


def test_the_statement_may_come_from_standard_input(hive: Hive) -> None:
    command = [sys.executable, "-P", "-m", "hive", "db", "query", "--json", "-"]
    environment = {**os.environ, "HIVE_SOCKET": str(hive.socket)}

    def ask(given: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, input=given, capture_output=True, env=environment, check=False)

    assert json.loads(ask(b"SELECT '\xc3\xa9' AS e\n").stdout)["rows"] == [{"e": "\u00e9"}]
    assert [ask(given).returncode for given in (b"", b"  \n", b"\xff", b"x" * 65537)] == [2, 2, 2, 2]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["DELETE FROM messages"], 4, "a query reads tables, and nothing else"),
        (["SELECT * FROM mesages"], 2, "did you mean `messages`?"),
        (["SELEC"], 2, "syntax error"),
        (["SELECT 1", "--limit", "0"], 2, "--limit"),
        (["SELECT 1", "--timeout", "100"], 2, "--timeout"),
        (["SELECT 1", "--csv", "--json"], 2, "one of them"),
        (["SELECT 1", "--csv", "--table"], 2, "one of them"),
        ([""], 2, "the statement is empty"),
        (
            ["WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT count(*) FROM c", "--timeout", "0.1"],
            7,
            "did not end within 0.1 s",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(hive: Hive, words: list[str], code: int, said: str) -> None:
    found = hive("db", "query", *words)
    assert (found.code, found.out) == (code, "")
    assert said in found.err


def test_tables_are_listed_with_what_is_hidden(hive: Hive) -> None:
    said = hive("db", "tables")
    [line] = [line for line in said.out.splitlines() if line.startswith("messages ")]
    assert line.split()[1] == "1"
    assert "  text  " in line
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(hive("db", "tables", "--csv").out))}
    assert (rows["api_tokens"]["rows"], rows["api_tokens"]["hidden"]) == ("1", "digest")
    assert hive("db", "tables", "--json").json["schema"] == "db.tables"


def test_the_schema_is_sql(hive: Hive) -> None:
    said = hive("db", "schema", "uids")
    assert said.out.startswith("CREATE TABLE uids (\n")
    assert said.out.count(";\n") == 3
    assert "CREATE TABLE agents" in hive("db", "schema").out
    missing = hive("db", "schema", "uidz")
    assert (missing.code, "did you mean `uids`?" in missing.err) == (3, True)


def test_with_the_daemon_down_it_says_so(no_daemon: Hive) -> None:
    for words in (["tables"], ["schema"], ["query", "SELECT 1"]):
        said = no_daemon("db", *words)
        assert (said.code, said.out) == (5, "")
        assert "no Hive answers" in said.err


def test_names_of_tables_are_completed(hive: Hive) -> None:
    environment = {
        **os.environ,
        "HIVE_SOCKET": str(hive.socket),
        "_HIVE_COMPLETE": "complete_bash",
        "COMP_WORDS": "hive db schema api_",
        "COMP_CWORD": "3",
    }
    hive("db", "schema")  # the first one reads modules from the disk
    program = "from hive.cli import db; db.COMPLETED_WITHIN_S = 20; from hive.cli.entry import run; run()"
    said = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert said.stdout.split() == ["api_tokens"]


@pytest.mark.parametrize(
    ("widths", "room"), [([4, 90, 200], 80), ([20] * 20, 80), ([1], 1), ([500], 20), ([9, 9, 9, 1000, 3], 60)]
)
def test_what_fits_is_within_the_room_and_uses_it(widths: list[int], room: int) -> None:
    count, most = db.fit(widths, room)
    shown = [min(width, most) for width in widths[:count]]
    assert sum(shown) + 2 * (count - 1) <= room
    assert count == len(widths) or sum(min(w, db.CELL_MIN) for w in widths[: count + 1]) + 2 * count > room
    assert most == max(shown)
