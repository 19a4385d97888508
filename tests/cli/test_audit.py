"""`hive audit`: what people did, on one line each, and a check of its file that needs no daemon."""

from __future__ import annotations

import csv
import io
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hive.cli import audit as cli
from hive.host.accounts import name_of
from hive.store import acts, anchors, audit
from hive.store.audit import AuditRecord
from hive.store.chain import Head
from hive.store.database import Database

Hive = Any
"""conftest.Hive: test modules import no siblings."""
ME = f"uid:{os.geteuid()}"
MY_NAME = name_of(os.geteuid()) or ME
"""As the table says it: it said `uid:1000` of ann."""


# --- list ----------------------------------------------------------------------------------------------------------


def test_each_row_says_who_did_what_to_whom_and_how_it_ended(hive: Hive) -> None:
    hive("agent", "stop", "alice")
    hive("agent", "pause", "alice")
    lines = hive("audit", "list").out.splitlines()
    assert lines[0].split() == ["ID", "AT", "ACTOR", "ORIGIN", "ACT", "AGENT", "OUTCOME", "WHY"]
    assert lines[-2].split()[3:] == [MY_NAME, "socket", "order.stop", "alice", "ok"]
    assert lines[-1].split()[3:] == [MY_NAME, "socket", "order.pause", "alice", "wrong_state", "alice", "is", "stopped"]
    assert len(hive("audit", "list", "-n", "1").out.splitlines()) == 2


def test_json_has_the_rows_oldest_first_over_several_pages(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        hive("agent", "start", "alice")
    monkeypatch.setattr(cli, "PAGE", 2)
    answer = hive("audit", "list", "--json", "--tail", "5").json
    assert answer["schema"] == "audit.list"
    ids = [row["id"] for row in answer["rows"]]
    assert len(ids) == 5
    assert ids == sorted(ids)


def test_csv_has_a_header_and_nothing_a_terminal_or_a_spreadsheet_would_obey(hive: Hive) -> None:
    hive("agent", "stop", "=x\x1b[2J,\n")
    said = hive("audit", "list", "--csv", "-n", "1")
    header, row = csv.reader(io.StringIO(said.out))
    assert header == list(cli.COLUMNS)
    found = dict(zip(header, row, strict=True))
    assert (found["act"], found["outcome"]) == ("order.stop", "not_found")
    assert found["target"].startswith("'=x\\x1b[2J,")
    assert "\x1b" not in hive("audit", "list", "-n", "1").out
    assert hive("audit", "list", "--csv", "--json").code == 2


# --- verify --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def state(tmp_path: Path) -> Path:
    """A state directory with five rows, the third of them noted."""
    directory = tmp_path / "state"
    directory.mkdir()
    database = Database.open(directory / "hive.db")
    for number in range(5):
        row = AuditRecord(at=1.0, actor="uid:0", act="agent.paused", target=f"a{number}", origin="socket")
        head: Head = await database.write(lambda conn, row=row: audit.append(conn, row))  # type: ignore[misc]
        if number == 2:
            anchors.append(anchors.anchors_of(database.path), head, now=1.0)
    database.close()
    return directory


def changed(state: Path, *statements: str) -> None:
    with sqlite3.connect(state / "hive.db") as conn:
        for statement in statements:
            conn.execute(statement)
    conn.close()


def verify(hive: Hive, state: Path, *words: str) -> Any:
    return hive("audit", "verify", "--state-dir", str(state), *words)


def test_a_whole_table_is_exit_0_and_says_how_much_of_its_end_is_in_no_anchor(no_daemon: Hive, state: Path) -> None:
    said = verify(no_daemon, state)
    assert said.code == 0
    assert said.out.startswith("5 rows, each as it was written, up to 5:")
    assert "the last 2 are in no anchor yet: nobody would see" in said.out
    answer = verify(no_daemon, state, "--json").json
    assert (answer["ok"], answer["rows"], answer["anchored_to"], answer["unanchored"]) == (True, 5, 3, 2)
    head = f"{answer['head']['id']}:{answer['head']['hash']}"
    assert verify(no_daemon, state, "--head", head, "--json").json["unanchored"] == 0


@pytest.mark.parametrize(
    ("statement", "first"),
    [
        ("UPDATE audit_log SET actor = 'uid:1' WHERE id = 4", 4),
        ("UPDATE audit_log SET actor = CAST(x'ff' AS TEXT) WHERE id = 2", 2),
        ("DELETE FROM audit_log WHERE id = 2", 2),
        ("DELETE FROM audit_log WHERE id > 2", 3),
        ("DELETE FROM audit_log", 1),
    ],
)
def test_a_tampered_table_is_exit_1_and_the_first_bad_row_is_named(
    no_daemon: Hive, state: Path, statement: str, first: int
) -> None:
    changed(state, statement, "UPDATE sqlite_sequence SET seq = (SELECT max(id) FROM audit_log)")
    said = verify(no_daemon, state)
    assert said.code == 1
    assert said.out.startswith(f"row {first} is the first that is not right: ")
    assert verify(no_daemon, state, "--json").json["first_bad"]["id"] == first


def test_an_end_that_was_cut_off_behind_the_last_anchor_is_found_by_a_head_from_elsewhere(
    no_daemon: Hive, state: Path
) -> None:
    head = verify(no_daemon, state, "--json").json["head"]
    changed(state, "DELETE FROM audit_log WHERE id > 3", "UPDATE sqlite_sequence SET seq = 3")
    assert verify(no_daemon, state).code == 0
    said = verify(no_daemon, state, "--head", f"{head['id']}:{head['hash']}")
    assert said.code == 1
    assert said.out.startswith("row 4 is the first that is not right: it is gone")


def test_it_is_looked_at_also_while_a_daemon_writes_and_nothing_is_written(no_daemon: Hive, state: Path) -> None:
    database = Database.open(state / "hive.db")
    try:
        before = {path.name for path in state.iterdir()}
        assert verify(no_daemon, state).code == 0
        assert {path.name for path in state.iterdir()} == before
    finally:
        database.close()
    before = {path.name for path in state.iterdir()}
    assert verify(no_daemon, state).code == 0
    assert {path.name for path in state.iterdir()} == before


def test_where_there_is_nothing_to_look_at_it_says_why(no_daemon: Hive, state: Path, tmp_path: Path) -> None:
    assert verify(no_daemon, tmp_path / "none").code == 3
    assert verify(no_daemon, state, "--head", "5:abc").code == 2
    (state / "hive.db").write_bytes(b"no database" * 1000)
    said = verify(no_daemon, state)
    assert said.code == 1
    assert "damaged" in said.err


def test_without_its_anchors_it_says_that_there_are_none(no_daemon: Hive, state: Path) -> None:
    anchors.anchors_of(state / "hive.db").unlink()
    said = verify(no_daemon, state)
    assert said.code == 0
    assert "the last 5 are in no anchor yet" in said.out
    assert "there is no audit.heads beside it: it is new, was restored, or somebody removed that file" in said.out
    answer = verify(no_daemon, state, "--json").json
    assert (answer["anchors_file"], answer["anchors"], answer["unanchored"]) == (None, 0, 5)


def test_after_a_restore_nothing_is_taken_for_tampered_and_what_was_done_is_told(
    no_daemon: Hive, state: Path, tmp_path: Path
) -> None:
    """The heads of the state that was replaced named rows the restored table never had."""
    where = ("--state-dir", str(state))
    assert no_daemon("backup", str(tmp_path / "b.tar"), *where).code == 0
    more = [AuditRecord(at=2.0, actor="uid:0", act="agent.paused", target="b", origin="socket") for _ in range(5)]
    with sqlite3.connect(state / "hive.db") as conn:
        head = [audit.append(conn, row) for row in more][-1]
    conn.close()
    anchors.append(anchors.anchors_of(state / "hive.db"), head, now=2.0)
    assert verify(no_daemon, state, "--json").json["anchored_to"] == 10
    restored = no_daemon("restore", str(tmp_path / "b.tar"), "--yes", "--json", *where)
    assert restored.code == 0
    kept = [Path(path).name.partition(".before")[0] for path in restored.json["kept"]]
    assert kept == ["hive.db", "audit.heads", "hive.db.second"]
    said = verify(no_daemon, state)
    assert said.code == 0
    assert "was restored" in said.out
    assert "acts of the hive command that a daemon is still to take in: 2" in said.out
    saved, act = acts.read(acts.acts_of(state / "hive.db")).acts
    assert (saved.act, saved.outcome) == ("backup", "ok")
    assert (act.act, act.outcome, act.detail["file"]) == ("restore", "ok", str(tmp_path / "b.tar"))


def test_an_old_copy_of_the_database_in_place_of_the_new_one_is_found(
    no_daemon: Hive, state: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes((state / "hive.db").read_bytes())
    more = [AuditRecord(at=2.0, actor="uid:0", act="agent.paused", target="b", origin="socket") for _ in range(5)]
    with sqlite3.connect(state / "hive.db") as conn:
        head = [audit.append(conn, row) for row in more][-1]
    conn.close()
    anchors.append(anchors.anchors_of(state / "hive.db"), head, now=2.0)
    (state / "hive.db").write_bytes(copy.read_bytes())
    said = verify(no_daemon, state)
    assert said.code == 1
    assert said.out.startswith("row 6 is the first that is not right: it is gone")


def test_rows_that_somebody_removed_and_called_pruned_are_found(no_daemon: Hive, state: Path) -> None:
    with sqlite3.connect(state / "hive.db") as conn:
        conn.row_factory = sqlite3.Row
        found = conn.execute("SELECT id, hash FROM audit_log WHERE id = 3").fetchone()
        audit.prune(conn, Head(*found), now=1.0)
    conn.close()
    said = verify(no_daemon, state)
    assert said.code == 1
    assert said.out.startswith("row 4 is the first that is not right: it is said to be the first that was not pruned")
    anchors.append(anchors.anchors_of(state / "hive.db"), Head(*found), now=1.0, is_beginning=True)
    assert verify(no_daemon, state).code == 0


def test_the_table_of_an_older_hive_has_no_chain(no_daemon: Hive, state: Path) -> None:
    changed(state, "DELETE FROM schema_steps WHERE number > 4")
    said = verify(no_daemon, state)
    assert said.code == 1
    assert "has heads of one" in said.err
    anchors.anchors_of(state / "hive.db").unlink()
    said = verify(no_daemon, state)
    assert said.code == 1
    assert "its audit table has no chain" in said.err
