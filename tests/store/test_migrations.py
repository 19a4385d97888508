"""Version N-1 of Hive runs on the database of version N: its steps only add, and the previous code really does."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.client.client import Client
from hive.domain import Agent, AgentSpec, By, UsageEvent
from hive.errors import WrongState
from hive.store import agents, messages, rollups, usage
from hive.store.database import Database
from hive.store.migrations import READABLE_FROM, STEPS, migrate, refuse_newer, schema_of
from hive.store.usage import CostSums, UsageFilter, UsageMark

ROOT = Path(__file__).parents[2]
PREVIOUS = "6251809"
"""The last commit before step 4: what the previous version is for as long as nothing has been released."""


@pytest.fixture
def conn(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(tmp_path / "m.db", isolation_level=None)
    yield found
    found.close()


# --- what a step may do --------------------------------------------------------------------------------------------


def columns(conn: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Table → its columns: name, type, NOT NULL, default, place in the primary key."""
    names = [row[0] for row in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: [row[1:] for row in conn.execute(f"PRAGMA table_info({name})")] for name in names}


def what_refuses(conn: sqlite3.Connection) -> set[tuple[str, str]]:
    """(table, its name) of everything that could refuse what older code writes."""
    unique = conn.execute("SELECT tbl_name, sql FROM sqlite_master WHERE type = 'index' AND sql LIKE 'CREATE UNIQUE%'")
    triggers = conn.execute("SELECT tbl_name, sql FROM sqlite_master WHERE type = 'trigger'")
    return {tuple(row) for row in (*unique, *triggers)}


def wrong_with(conn: sqlite3.Connection, step: str, number: int) -> list[str]:
    """Changes by `step` to the tables before it that older code would notice."""
    before, refused = columns(conn), what_refuses(conn)
    migrate(conn, (*STEPS[: number - 1], step), readable_from=READABLE_FROM)
    after = columns(conn)
    found = [f"{table} is gone" for table in before.keys() - after.keys()]
    for table in before.keys() & after.keys():
        old, new = before[table], after[table]
        if new[: len(old)] != old:
            found.append(f"{table} is another")
        # name, type, NOT NULL, default: a row that does not say it must be taken
        found += [
            f"{table}.{name} is required"
            for name, _, strict, default, _ in new[len(old) :]
            if strict and default is None
        ]
    found += [f"{table} refuses more" for table, sql in what_refuses(conn) - refused if table in before]
    return found


@pytest.mark.parametrize("number", range(READABLE_FROM + 1, len(STEPS) + 1))
def test_a_step_only_adds(conn: sqlite3.Connection, number: int) -> None:
    migrate(conn, STEPS[: number - 1])
    assert wrong_with(conn, STEPS[number - 1], number) == []


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ("DROP TABLE usage_marks", "usage_marks is gone"),
        ("ALTER TABLE agents RENAME COLUMN reason TO why", "agents is another"),
        ("ALTER TABLE agents ADD COLUMN x TEXT NOT NULL DEFAULT ''", None),
        ("CREATE UNIQUE INDEX one_uid ON agents (uid)", "agents refuses more"),
        ("CREATE TABLE agents_2 (x TEXT NOT NULL)", None),
        (
            "ALTER TABLE uids RENAME TO u; CREATE TABLE uids (uid INTEGER PRIMARY KEY, agent_id TEXT NOT NULL,"
            " freed_at REAL, why TEXT NOT NULL) STRICT",
            "uids.why is required",
        ),
        ("CREATE TRIGGER t BEFORE INSERT ON agents BEGIN SELECT RAISE(ABORT, 'no') END", "agents refuses more"),
    ],
)
def test_a_step_that_takes_away_is_seen(conn: sqlite3.Connection, step: str, wrong: str | None) -> None:
    migrate(conn)
    if "TRIGGER" in step:  # its inner semicolon is no end of a statement
        before = what_refuses(conn)
        conn.execute(step.replace(") END", "); END"))
        assert {table for table, _ in what_refuses(conn) - before} == {"agents"}
        return
    assert wrong_with(conn, step, len(STEPS) + 1) == ([] if wrong is None else [wrong])


# --- versions that open it -----------------------------------------------------------------------------------------


def test_steps_beyond_what_must_be_known_do_not_move_the_version_that_older_code_looks_at(
    conn: sqlite3.Connection,
) -> None:
    migrate(conn)
    assert conn.execute("PRAGMA user_version").fetchone() == (READABLE_FROM,)
    assert schema_of(conn) == (len(STEPS), READABLE_FROM)
    rows = conn.execute("SELECT number, hive FROM schema_steps").fetchall()
    assert [number for number, _ in rows] == list(range(READABLE_FROM + 1, len(STEPS) + 1))


def test_taking_them_again_takes_none(conn: sqlite3.Connection) -> None:
    assert migrate(conn) == len(STEPS)
    assert migrate(conn) == 0


def test_code_that_knows_fewer_goes_on_and_says_so(conn: sqlite3.Connection, caplog: pytest.LogCaptureFixture) -> None:
    migrate(conn, (*STEPS, "CREATE TABLE of_tomorrow (x)"))
    assert migrate(conn) == 0
    assert f"database_newer steps={len(STEPS) + 1} known={len(STEPS)}" in caplog.text


def test_code_that_does_not_know_what_it_has_to_is_refused(conn: sqlite3.Connection) -> None:
    migrate(conn, (*STEPS, "ALTER TABLE agents RENAME COLUMN reason TO why"), readable_from=len(STEPS) + 1)
    assert schema_of(conn) == (len(STEPS) + 1, len(STEPS) + 1)
    with pytest.raises(WrongState, match="newer Hive"):
        migrate(conn)
    refuse_newer(schema_of(conn), len(STEPS) + 1)


def test_a_database_that_counted_every_step_is_taken_as_it_is(conn: sqlite3.Connection) -> None:
    """Step 4 was written into user_version for a day."""
    migrate(conn, STEPS[:4], readable_from=4)
    assert schema_of(conn) == (4, 4)
    assert migrate(conn) == len(STEPS) - 4
    assert schema_of(conn) == (len(STEPS), 4)


def test_a_step_cut_short_is_taken_whole_the_next_time(conn: sqlite3.Connection) -> None:
    migrate(conn, STEPS)
    broken = (*STEPS, "CREATE TABLE one (x); CREATE TABLE agents (x)")
    with pytest.raises(sqlite3.OperationalError):
        migrate(conn, broken)
    assert schema_of(conn).taken == len(STEPS)
    assert "one" not in columns(conn)
    assert migrate(conn, (*STEPS, "CREATE TABLE one (x)")) == 1


# --- the previous code ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the previous version's code."""
    where = tmp_path_factory.mktemp("previous")
    got = subprocess.run(["git", "archive", PREVIOUS, "hive"], cwd=ROOT, capture_output=True, check=False)
    if got.returncode:
        pytest.skip(f"the commit {PREVIOUS} is not here: {got.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(where)], input=got.stdout, check=True)
    return where


def python(*words: str) -> list[str]:
    return [sys.executable, "-P", *words]


def environment(previous: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(previous), "PYTHONDONTWRITEBYTECODE": "1"}


WORKS_ON = """
import asyncio, hive, json, msgspec, sys
from pathlib import Path
from hive.domain import Agent, AgentSpec
from hive.store import agents, messages, migrations
from hive.store.database import Database
async def main():
    database = Database.open(Path(sys.argv[1]))
    found = await database.read(agents.all)
    changed = msgspec.structs.replace(found[0], reason="changed")
    await database.write(lambda conn: agents.update(conn, changed))
    bob = Agent(id="b2", spec=AgentSpec(name="bob", command=["true"]), created_at=2.0)
    await database.write(lambda conn: agents.insert(conn, bob))
    database.close()
    print(json.dumps({"file": hive.__file__, "steps": len(migrations.STEPS), "found": [a.spec.name for a in found]}))
asyncio.run(main())
"""

ALICE = Agent(id="a1", spec=AgentSpec(name="alice", command=["true"], system_prompt="Be kind."), created_at=1.0)


async def test_the_previous_code_reads_and_writes_a_database_of_this_one(previous: Path, tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    database = Database.open(path)
    await database.write(lambda conn: agents.insert(conn, ALICE))
    database.close()
    command = python("-c", WORKS_ON, str(path))
    ran = subprocess.run(command, env=environment(previous), capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["file"].startswith(str(previous))
    assert told["steps"] < len(STEPS)
    assert told["found"] == ["alice"]
    again = Database.open(path)
    found = {(a.spec.name, a.reason, a.spec.system_prompt) for a in await again.read(agents.all)}
    assert found == {("alice", "changed", "Be kind."), ("bob", "", None)}
    assert await again.read(schema_of) == (len(STEPS), READABLE_FROM)
    assert await again.read(lambda conn: messages.waiting(conn, [])) == {}
    again.close()


METERS = """
import asyncio, msgspec, sys
from pathlib import Path
from hive.domain import UsageEvent
from hive.store import usage
from hive.store.database import Database
async def main():
    database = Database.open(Path(sys.argv[1]))
    events = msgspec.json.decode(sys.argv[2], type=list[UsageEvent])
    def work(conn):
        usage.set_marks(conn, {"p1": usage.Mark(len(events))}, now=2.0)
        return usage.insert(conn, events)
    print(len(await database.write(work)))
    database.close()
asyncio.run(main())
"""


def usage_event(no: int) -> UsageEvent:
    of: dict[str, Any] = {
        "agent_id": "a1",
        "tenant": "default",
        "model": f"m{no % 2}",
        "backend": "vllm",
        "endpoint": "/api/chat",
    }
    return UsageEvent(id=f"p1-{no}", epoch="p1", event_no=no, tokens_in=no, tokens_out=1, created_at=2000.0 * no, **of)


async def test_what_the_previous_code_meters_on_it_is_in_this_ones_sums(previous: Path, tmp_path: Path) -> None:
    """It knows of no sums: its rows are counted one by one, until this one has added them."""
    path = tmp_path / "hive.db"
    database = Database.open(path)
    await database.write(lambda conn: usage.insert(conn, [usage_event(no) for no in (1, 2, 3)]))
    await database.write(lambda conn: usage.set_marks(conn, {"p1": UsageMark(3, ahead=((5, 5),))}, now=1.0))
    database.close()
    events = msgspec.json.encode([usage_event(no) for no in (1, 2, 3, 4, 5)]).decode()
    command = python("-c", METERS, str(path), events)
    ran = subprocess.run(command, env=environment(previous), capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "2\n"
    again = Database.open(path)
    by_model = {"m1": (3, 9), "m0": (2, 6)}
    for rolled_up in (2, 0):
        found = await again.read(lambda conn: usage.usage_by(conn, By.MODEL, UsageFilter()))
        assert {cost.key: (cost.requests, cost.tokens_in) for cost in found} == by_model
        assert await again.write(rollups.roll_up) == rolled_up
    assert await again.read(usage.used_in_all) == CostSums(requests=5, tokens_in=15, tokens_out=5)
    assert await again.read(usage.marks) == {"p1": UsageMark(5, ahead=((5, 5),))}
    again.close()


def test_the_previous_daemon_runs_on_it_and_this_ones_after_it(previous: Path, short_path: Path) -> None:
    state, runtime = short_path / "s", short_path / "r"
    for directory in (state, runtime):
        directory.mkdir()
    conn = sqlite3.connect(state / "hive.db", isolation_level=None)
    migrate(conn)
    agents.insert(conn, ALICE)
    conn.close()
    (state / "hive.db").chmod(0o600)
    command = python("-m", "hive", "daemon", "--state-dir", str(state), "--runtime-dir", str(runtime))
    for env in (environment(previous), {**os.environ}):
        with subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as daemon:
            assert daemon.stderr is not None
            try:
                for line in daemon.stderr:
                    if line.startswith("daemon_ready") or '"daemon_ready"' in line:
                        break
                else:
                    pytest.fail(f"the daemon ended: {daemon.wait()}")
                listed = Client(runtime / "hive.sock").get("/api/agents")["agents"]
                assert [agent["name"] for agent in listed] == ["alice"]
            finally:
                daemon.terminate()
                daemon.communicate(timeout=60)
        assert daemon.returncode == 0
