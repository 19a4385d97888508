"""Faults while somebody looks: the view stays up, says what is wrong, and goes on where it can."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hive.api.server import serve
from hive.domain import Agent, AgentSpec
from hive.errors import HiveError
from hive.store import agents
from hive.store.database import Database
from hive.tui.app import Top
from hive.tui.screens.agent import AgentScreen
from hive.tui.snapshot import Snapshot
from tests.control.box import Box, Caller, daemon_process
from tests.tui import frozen
from tests.tui.driving import (
    each_size,
    is_in_front,
    is_main,
    over,
    pane,
    problems,
    recorded,
    rows_of,
    screen_text,
    shown,
    table_of,
    top,
)
from tests.waiting import until


def kept_by(box: Box, *names: str) -> None:
    """Files that a daemon that was killed left behind."""

    def insert(conn: sqlite3.Connection) -> None:
        for name in names:
            agents.insert(conn, Agent(id=f"id-{name}", spec=AgentSpec(name=name, command=["/bin/true"])))

    async def write() -> None:
        database = Database.open(box.paths.database)
        await database.write(insert)
        database.close()

    asyncio.run(write())


async def is_told(app: Top, what: str) -> None:
    await until(lambda: what in problems(app))


# --- the daemon ------------------------------------------------------------------------------------------------------


@each_size
async def test_a_daemon_that_goes_down_is_said_and_what_the_database_has_stays(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")
    async with over(box, size) as (app, pilot):
        assert app.snapshot.is_live
        await box.stop_daemon()
        await until(lambda: not app.snapshot.is_live)
        await is_told(app, "the daemon is down: this is what")
        assert str(box.paths.database) in problems(app)
        assert "ann" in screen_text(app)
        # They stood in the footer, and did nothing but say so.
        offered = {binding.binding.action for binding in app.screen.active_bindings.values() if binding.enabled}
        assert not {action for action in offered if action.startswith(("verb", "backend"))}
        assert {"filter", "quit"} <= offered
        for key in ("p", "r", "s", "S", "x", "b"):
            await pilot.press(key)
            await pilot.pause(0.05)
            assert app.screen is app.screen_stack[0], key
        assert recorded(box) == {"ann": "running"}
        await box.start_daemon()
        await until(lambda: app.snapshot.is_live)
        await pilot.press("p")
        await until(lambda: recorded(box) == {"ann": "paused"})
        assert "the daemon is down" not in problems(app)


async def test_a_daemon_that_is_killed_and_begins_anew_is_found_again(short_path: Path) -> None:
    """A process of its own, kill -9: its socket stays behind, its last words are in the WAL."""
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    await box.start_helper()
    processes: list[subprocess.Popen[str]] = []

    async def begin() -> None:
        processes.append(daemon_process(box))
        await Caller(box.paths.api_socket).until_proxy()

    box.spawn_real_proxy()
    try:
        await begin()
        spec = {"name": "ann", "command": ["/bin/sh", "-c", "exec sleep 1000"]}
        await Caller(box.paths.api_socket).ask("POST", "/api/agents", spec)
        async with over(box) as (app, pilot):
            await pilot.press("enter")
            await is_in_front(app, AgentScreen)
            processes[0].kill()
            await until(lambda: not app.snapshot.is_live)
            await pilot.press("escape")
            await is_main(app)
            await is_told(app, "the daemon is down")
            assert rows_of(app) == ["ann"]
            await begin()
            await until(lambda: app.snapshot.is_live)
            assert rows_of(app) == ["ann"]
        await Caller(box.paths.api_socket).ask("DELETE", "/api/agents/ann", None)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        await box.end()


async def test_a_daemon_that_fails_inside_is_said_and_answers_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 500; one that hangs is in test_source.py."""
    await box.create("ann")
    held = asyncio.Event()
    held.set()
    view = box.services.health.view

    def health() -> Any:
        if not held.is_set():
            raise TimeoutError
        return view()

    monkeypatch.setattr(box.services.health, "view", health)
    async with top(box.paths.api_socket, None) as (app, _):
        held.clear()
        await is_told(app, "this is how it was at")
        assert rows_of(app) == ["ann"]
        held.set()
        await until(lambda: "this is how it was at" not in problems(app))


async def test_without_a_database_either_the_last_look_stays_and_says_why(
    box: Box, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.create("ann")
    view = box.services.health.view
    monkeypatch.setattr(box.services.health, "view", lambda: {**view(), "state_dir": str(short_path / "nowhere")})
    server = await serve(box.services, short_path / "hive.sock")
    async with top(short_path / "hive.sock", None) as (app, _):
        await server.close()
        await is_told(app, "no Hive answers")
        assert "this is how it was at" in problems(app)
        assert "ann" in screen_text(app)


class Odd(frozen.Frozen):
    """While it is `odd` it fails in a way that nobody foresaw."""

    odd = False

    def look(self, shown: Any = None) -> Snapshot:
        if self.odd:
            raise KeyError("status")
        return super().look(shown)


async def test_an_answer_that_is_not_understood_is_said_and_the_view_stays() -> None:
    source = Odd(frozen.look())
    async with shown(source) as (app, _):
        source.odd = True
        await is_told(app, "what was found cannot be understood (KeyError: 'status')")
        assert len(rows_of(app)) == len(frozen.AGENTS)
        source.odd = False
        await until(lambda: "cannot be understood" not in problems(app))


# --- Redis and SQLite ------------------------------------------------------------------------------------------------


async def test_redis_that_goes_down_is_said_until_it_is_back(short_path: Path, redis_server: Any) -> None:
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    box.paths.redis_socket.symlink_to(redis_server.socket)
    await box.everything()
    await box.create("ann")
    async with over(box) as (app, _):
        await until(lambda: "Redis" not in problems(app))
        redis_server.kill()
        await is_told(app, f"Redis at {box.paths.redis_socket} is down")
        assert app.snapshot.is_live
        assert rows_of(app) == ["ann"]
        redis_server.start()
        await until(lambda: "Redis" not in problems(app))
    await box.end()


async def test_a_database_that_is_locked_holds_nothing_up(box: Box) -> None:
    """By somebody else's transaction: what is looked at needs no lock, what is done waits for it.

    A write waits for 5 s, and two looks of a busy machine may take longer.
    """
    await box.create("ann")
    assert box.daemon is not None
    await box.daemon._database.write(lambda conn: conn.execute("PRAGMA busy_timeout = 120000") and None)
    async with over(box) as (app, pilot):
        with contextlib.closing(sqlite3.connect(box.paths.database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            seen = app.snapshot
            await until(lambda: app.snapshot is not seen)
            await pilot.press("p")
            seen = app.snapshot
            await until(lambda: app.snapshot is not seen)
            assert rows_of(app) == ["ann"]
            told = await asyncio.to_thread(lambda: [*app._source.client.events(tail=50)])
            assert "agent.created" in {event["kind"] for event in told}
            other.execute("ROLLBACK")
        await until(lambda: recorded(box) == {"ann": "paused"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda path: path.write_bytes(b"no database" * 1000), "file is not a database", id="corrupt"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:5000]), "malformed", id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), "cannot be read", id="empty"),
        pytest.param(lambda path: path.unlink(), "no Hive answers", id="missing"),
    ],
)
async def test_a_database_that_is_broken_beside_a_daemon_that_is_down_is_said(
    short_path: Path, damage: Any, said: str
) -> None:
    box = Box(short_path)
    box.paths.state.mkdir()
    await asyncio.to_thread(kept_by, box, *(f"a{number}" for number in range(50)))
    async with over(box) as (app, pilot):
        await until(lambda: len(rows_of(app)) == 50)
        damage(box.paths.database)
        await is_told(app, said)
        assert "this is how it was at" in problems(app)
        assert len(rows_of(app)) == 50
        await pilot.press("down", "?", "escape", "q")
        await until(lambda: not app.is_running)


async def test_a_database_that_is_locked_beside_a_daemon_that_is_down_is_said_and_read_again(short_path: Path) -> None:
    """Wholly locked, as by a restore: `locking_mode = exclusive` keeps readers out as well."""
    box = Box(short_path)
    box.paths.state.mkdir()
    await asyncio.to_thread(kept_by, box, "ann")
    async with over(box) as (app, _):
        with contextlib.closing(sqlite3.connect(box.paths.database, isolation_level=None)) as other:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("CREATE TABLE spare (x)")
            await is_told(app, "database is locked")
            assert rows_of(app) == ["ann"]
        await until(lambda: "locked" not in problems(app))


# --- much, odd times and small screens -------------------------------------------------------------------------------


@pytest.mark.wide
async def test_ten_thousand_agents_are_looked_at_sorted_and_filtered(short_path: Path) -> None:
    box = Box(short_path)
    for path in (box.paths.state, box.paths.runtime):
        path.mkdir()
    await asyncio.to_thread(kept_by, box, *(f"agent-{number:05}" for number in range(10_000)))
    await box.start_daemon()
    async with top(box.paths.api_socket, None, interval_s=1.0) as (app, pilot):
        await until(lambda: len(rows_of(app)) == 10_000)
        await pilot.press("end")
        assert table_of(app).selected is not None
        assert "agent-09999" in screen_text(app)
        seen = app.snapshot
        await until(lambda: app.snapshot is not seen)
        assert "agent-09999" in screen_text(app)
        await pilot.press("/", *"0777")
        await until(lambda: len(rows_of(app)) == sum("0777" in f"{number:05}" for number in range(10_000)))
    await box.stop_daemon()


async def test_ten_thousand_agents_are_read_from_the_database_where_the_daemon_is_down(short_path: Path) -> None:
    box = Box(short_path)
    box.paths.state.mkdir()
    await asyncio.to_thread(kept_by, box, *(f"a{number:05}" for number in range(10_000)))
    async with over(box) as (app, pilot):
        await until(lambda: len(rows_of(app)) == 10_000)
        await pilot.press("end")
        assert "a09999" in screen_text(app)


@pytest.mark.parametrize("by_s", [86_400.0, -86_400.0], ids=["on", "back"])
async def test_a_clock_that_is_set_is_said_and_nothing_is_negative(
    box: Box, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """For everybody in this process: the daemon, the helper and the screen."""
    await box.create("ann")
    true_time = time.time
    async with over(box) as (app, pilot):
        monkeypatch.setattr(time, "time", lambda: true_time() + by_s)
        way = "on" if by_s > 0 else "back"
        await is_told(app, f"the clock of this machine was set {way} by 1d")
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        await until(lambda: "running for" in pane(app, "facts", app.screen).text)
        in_state = pane(app, "facts", app.screen).text.partition("running for ")[2].split()[0]
        assert re.fullmatch(r"1d" if by_s > 0 else r"\d+s", in_state), in_state
        monkeypatch.setattr(time, "time", true_time)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("front", ["table", "page", "keys", "question", "backends", "palette"])
async def test_a_terminal_of_20_by_5_and_back_again(box: Box, front: str) -> None:
    await box.create("ann")
    keys = {"table": (), "page": ("enter",), "keys": ("?",), "question": ("S",), "backends": ("b",)}
    async with over(box) as (app, pilot):
        await pilot.press(*keys.get(front, ("ctrl+p",)))
        await pilot.pause(0.2)
        for size in ((20, 5), (1, 1), (200, 50), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause(0.2)
            assert app.is_running
            if size == (20, 5):
                assert "ann" in screen_text(app)
                assert pane(app, "events").display is False
                assert [len(line) for line in screen_text(app).splitlines()] == [20] * table_of(app).size.height
        assert "STATE" in screen_text(app)
        assert pane(app, "events").display is True


@each_size
async def test_selection_and_line_stay_while_panes_above_come_and_go(size: tuple[int, int]) -> None:
    """Each pane that grows makes the table lower: the selected row is still on the screen, and the same agent."""
    rows = [frozen.row(f"agent-{number:03}") for number in range(100)]
    gpus = frozen.eight_gpus()
    looks: list[Snapshot | HiveError] = []
    for number in range(12):
        fields: dict[str, Any] = {"gpus": gpus if number % 2 else [], **frozen.wrong(*["one thing"] * (number % 3))}
        looks.append(frozen.look(agents=rows[number % 4 :], **fields))
    async with shown(frozen.Frozen(*looks), size, interval_s=1000.0) as (app, pilot):
        for _ in range(60):
            table_of(app).action_move(1)
        for _ in looks:
            app.look()
            await pilot.pause(0.05)
            table = table_of(app)
            assert table.selected is not None
            await until(lambda table=table: 0 <= table.screen_line < len(table.in_sight))  # type: ignore[misc]
            assert table.selected.name == "agent-060"


async def test_everything_is_asked_anew_of_whom_somebody_sees() -> None:
    """A daemon with a thousand agents is asked for the whole of those on the screen only."""
    rows = [frozen.row(f"agent-{number:03}") for number in range(100)]
    source = frozen.Frozen(frozen.look(agents=rows))
    async with shown(source) as (app, pilot):
        await until(lambda: source.shown is not None)
        assert set(source.shown or ()) == {row.id for row in table_of(app).in_sight}
        await pilot.press("end")
        await until(lambda: rows[-1].id in (source.shown or ()))
        assert rows[0].id not in (source.shown or ())
