"""Every key of `hive top`, over a real daemon, helper and database: what it did is looked for where it counts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.command import CommandPalette
from textual.widgets import Input, OptionList, Static

from hive.control import switching
from hive.demo import server
from hive.domain import AgentSpec, BackendKind, RuntimeKind
from hive.settings.table import InferenceSection
from hive.tui.cells import COLUMNS, shown
from hive.tui.screens.agent import AgentScreen
from hive.tui.screens.backend import BackendScreen
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.screens.keys import Keys
from hive.tui.snapshot import AgentLine
from tests.control.box import AWAKE, Box
from tests.ports import free_port
from tests.tui import test_leases  # noqa: F401 - its journeys are among those that are counted
from tests.tui.driving import (
    JOURNEYS,
    all_keys,
    answered,
    buttons,
    each_size,
    is_in_front,
    is_main,
    journey,
    over,
    pane,
    recorded,
    rows_of,
    screen_text,
    table_of,
)
from tests.waiting import until

MAN = Path(__file__).parents[2] / "man" / "hive-top.1.scd"


def test_there_is_a_journey_for_every_key() -> None:
    """It fails for a binding without one, and for a journey whose binding is gone."""
    assert all_keys() == JOURNEYS.keys()


# --- verbs -----------------------------------------------------------------------------------------------------------


@each_size
@journey("Top: p r s S x", "ConfirmScreen: y n escape", "AgentTable: down")
async def test_every_verb_does_what_it_says(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")
    await box.create("bob")
    async with over(box, size) as (app, pilot):
        assert "ann" in screen_text(app)
        await pilot.press("down", "p")
        await until(lambda: recorded(box)["bob"] == "paused")
        await until(lambda: "● paused" in screen_text(app))
        assert recorded(box)["ann"] == "running"
        await pilot.press("r")
        await until(lambda: recorded(box)["bob"] == "running")
        for no in ("n", "escape"):
            await pilot.press("S")
            await answered(app, pilot, no)
            assert recorded(box)["bob"] == "running"
        await pilot.press("S")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box)["bob"] == "stopped")
        assert await box.truth("bob") in ("gone", "unknown")
        await pilot.press("s")
        await until(lambda: recorded(box)["bob"] == "running")
        await pilot.press("x")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box) == {"ann": "running"})
        await until(lambda: "bob" not in screen_text(app))


@each_size
@journey("AgentTable: enter", "AgentScreen: escape")
async def test_an_agents_page_has_its_verbs_as_buttons_and_as_keys(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")
    async with over(box, size) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        await until(lambda: buttons(app) == [("Pause", "yellow"), ("Stop", "red")])
        await pilot.pause()
        await pilot.click("#pause")
        await until(lambda: recorded(box)["ann"] == "paused")
        await until(lambda: buttons(app) == [("Resume", "green"), ("Stop", "red")])
        await pilot.press("r")
        await until(lambda: recorded(box)["ann"] == "running")
        await until(lambda: buttons(app) == [("Pause", "yellow"), ("Stop", "red")])
        await pilot.pause()
        await pilot.click("#stop")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box)["ann"] == "stopped")
        await until(lambda: buttons(app) == [("Start", "green")])
        await pilot.pause()
        await pilot.click("#start")
        await until(lambda: recorded(box)["ann"] == "running")
        await pilot.press("escape")
        await is_main(app)


async def test_readonly_has_no_keys_that_change_something(box: Box) -> None:
    await box.create("ann")
    async with over(box, readonly=True) as (app, pilot):
        assert {"p", "r", "s", "S", "x", "b"} & app.screen.active_bindings.keys() == set()
        await pilot.press("p", "S", "x", "b")
        await pilot.pause(0.3)
        assert app.screen is app.screen_stack[0]
        assert recorded(box) == {"ann": "running"}
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        assert buttons(app) == []


@journey("Top: y")
async def test_the_id_of_the_selected_agent_is_copied(box: Box) -> None:
    await box.create("ann")
    bob = await box.create("bob")
    async with over(box) as (app, pilot):
        await pilot.press("down", "y")
        await until(lambda: app.clipboard == bob["id"])
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        app.copy_to_clipboard("")
        await pilot.press("y")
        await until(lambda: app.clipboard == bob["id"])


# --- the backend -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_demos(directory: Path) -> AsyncIterator[tuple[str, int]]:
    """Two servers: one at a socket, one at a port."""
    socket, port = directory / "demo.sock", free_port()
    serving = [
        asyncio.ensure_future(server.serve(server.listen(socket=socket, port=None), handle_signals=False)),
        asyncio.ensure_future(server.serve(server.listen(socket=None, port=port), handle_signals=False)),
    ]
    yield str(socket), port
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


def chosen(box: Box) -> str:
    """The address of the backend that was switched to, as SQLite has it; empty where none was."""
    with contextlib.closing(sqlite3.connect(box.paths.database)) as conn:
        conn.row_factory = sqlite3.Row
        found = switching.read_chosen(conn, "")
    return "" if found is None else found.address


@journey("Top: b", "BackendScreen: escape")
async def test_b_switches_to_the_server_that_is_chosen_once_it_was_confirmed(short_path: Path) -> None:
    """Two of a kind: the kind alone would name the one in use."""
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    async with two_demos(short_path) as (socket, port):
        settings = msgspec.structs.replace(AWAKE, inference=InferenceSection(port=port, switch_health_every_s=0.05))
        await box.start_helper()
        await box.start_daemon(settings, backend=(BackendKind.DEMO, socket))
        await box.start_real_proxy()
        try:
            async with over(box, (120, 40)) as (app, pilot):
                for to, answer in ((f"127.0.0.1:{port}", "n"), (f"127.0.0.1:{port}", "y"), (socket, "y")):
                    before = box.inference()["address"]
                    await pilot.press("b")
                    await is_in_front(app, BackendScreen)
                    which = app.screen.query_one("#which", OptionList)
                    await until(lambda which=which: which.option_count == 2)  # type: ignore[misc]
                    await pilot.pause()
                    place = next(n for n, option in enumerate(which.options) if f"demo at {to} (" in str(option.prompt))
                    which.highlighted = place
                    await pilot.press("enter")
                    await answered(app, pilot, answer)
                    if answer == "y":
                        said = app.screen.query_one("#said", Static)
                        await until(lambda said=said: "demo is in use now" in str(said.content))  # type: ignore[misc]
                    await pilot.press("escape")
                    await is_main(app)
                    now = before if answer == "n" else to
                    assert box.inference()["address"] == now
                    assert chosen(box) == ("" if answer == "n" else to)
        finally:
            await box.end()


@journey("BackendScreen: c")
async def test_c_ends_a_switch_that_is_under_way(short_path: Path) -> None:
    """While the proxy waits for requests that the old server works on."""
    box, held = Box(short_path), asyncio.Event()
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    async with two_demos(short_path) as (socket, port):
        settings = msgspec.structs.replace(AWAKE, inference=InferenceSection(port=port, switch_health_every_s=0.05))
        await box.start_helper()
        await box.start_daemon(settings, backend=(BackendKind.DEMO, socket))
        (await box.start_proxy()).holds_backend = held
        try:
            async with over(box, (120, 40)) as (app, pilot):
                await pilot.press("b")
                await is_in_front(app, BackendScreen)
                which = app.screen.query_one("#which", OptionList)
                await until(lambda: which.option_count == 2)
                await pilot.pause()
                to = f"demo at 127.0.0.1:{port} ("
                which.highlighted = next(n for n, option in enumerate(which.options) if to in str(option.prompt))
                await pilot.press("enter")
                await answered(app, pilot, "y")
                said = app.screen.query_one("#said", Static)
                await until(lambda: "closing the gate" in str(said.content))
                await pilot.press("c")
                await until(lambda: "it was cancelled" in str(said.content))
                held.set()
                assert [job.state for job in await box.services.jobs.recent(10)] == ["cancelled"]
                await pilot.press("escape")
                await is_main(app)
        finally:
            await box.end()


# --- the table -------------------------------------------------------------------------------------------------------


@journey("AgentTable: up k down j pageup pagedown home g end G")
async def test_keys_select(box: Box) -> None:
    """The verbs go to the agent that is selected: what these keys do is which one that is."""
    for number in range(30):
        await box.services.agents.create(AgentSpec(name=f"a{number:02}", runtime=RuntimeKind.EXTERNAL), "uid:0")
    async with over(box) as (app, pilot):
        await until(lambda: len(rows_of(app)) == 30)
        room = len(table_of(app).in_sight)
        for key, to in (
            *(("down", 1), ("j", 2), ("up", 1), ("k", 0), ("up", 0), ("pagedown", room), ("pageup", 0)),
            *(("end", 29), ("home", 0), ("G", 29), ("j", 29), ("g", 0)),
        ):
            await pilot.press(key)
            assert table_of(app).selected is not None
            at = rows_of(app).index(_selected(app).name)
            assert at == to, key
            assert 0 <= table_of(app).screen_line < room


def _selected(app: Any) -> AgentLine:
    found = table_of(app).selected
    assert found is not None
    return found


@journey("AgentTable: less_than_sign greater_than_sign o")
async def test_the_table_is_sorted_by_each_column_either_way(box: Box) -> None:
    await box.create("ann", tenant="zoo")
    await box.create("bob", tenant="abc")
    await box.stop("bob", "uid:0")
    async with over(box, (140, 40)) as (app, pilot):
        table = table_of(app)
        await until(lambda: "stopped" in screen_text(app))
        seen: dict[str, list[str]] = {}
        for column in COLUMNS:
            assert table.sorted_by == column.head
            # The sign took the last letter of a title that fills its column: SAVE^, DEPT^.
            head = table.render_line(0).text
            assert re.search(rf"{column.head}[▲▼]", head), head
            assert head.replace("▲", " ").replace("▼", " ").split() == [one.head for one in shown(app.size.width)]
            for _ in range(2):
                values = [column.key(row) for row in table.rows]
                seen.setdefault(column.head, rows_of(app))
                assert values == sorted(values, reverse=table.is_descending)
                await pilot.press("o")
            await pilot.press(">")
        assert (seen["AGENT"], seen["STATE"], seen["TENANT"]) == (["ann", "bob"], ["ann", "bob"], ["bob", "ann"])
        await pilot.press("<")
        assert table.sorted_by == "WHY"


async def test_a_click_on_a_head_sorts_and_another_turns_it_round(box: Box) -> None:
    await box.create("ann", tenant="zoo")
    await box.create("bob", tenant="abc")
    async with over(box, (120, 40)) as (app, pilot):
        await pilot.click("#agents", offset=(1, 0))
        assert rows_of(app) == ["bob", "ann"]
        at = table_of(app).render_line(0).text.index("TENANT")
        await pilot.click("#agents", offset=(at, 0))
        assert (table_of(app).sorted_by, rows_of(app)) == ("TENANT", ["bob", "ann"])
        await pilot.click("#agents", offset=(at, 0))
        assert rows_of(app) == ["ann", "bob"]


@journey("Top: slash escape")
async def test_the_filter_shows_what_matches_and_esc_ends_it(box: Box) -> None:
    await box.create("ann")
    await box.create("bob")
    async with over(box) as (app, pilot):
        await pilot.press("/", "!", "a", "n", "n")
        await until(lambda: rows_of(app) == ["bob"])
        await pilot.press("enter")
        assert app.focused is table_of(app)
        await pilot.press("p")
        await until(lambda: recorded(box) == {"ann": "running", "bob": "paused"})
        await pilot.press("escape")
        await until(lambda: len(rows_of(app)) == 2)
        assert app.screen.query_one("#filter", Input).display is False
        await pilot.press("/", "z")
        await until(lambda: "none of 2 matches z" in screen_text(app))
        await pilot.press("p", "escape")
        await until(lambda: len(rows_of(app)) == 2)
        assert recorded(box) == {"ann": "running", "bob": "paused"}


# --- the rest --------------------------------------------------------------------------------------------------------


@journey("Top: space")
async def test_a_held_screen_stays_as_it_is_and_says_so(box: Box) -> None:
    async with over(box) as (app, pilot):
        await pilot.press(" ")
        assert pane(app, "head").text.startswith("held: space goes on")
        await pilot.pause(0.2)
        seen = app.snapshot
        await box.create("ann")
        await pilot.pause(0.4)
        assert app.snapshot is seen
        await pilot.press(" ")
        await until(lambda: "ann" in screen_text(app))
        assert "held" not in pane(app, "head").text


@journey("Top: question_mark", "Keys: escape question_mark q")
async def test_the_help_has_every_key_and_so_has_the_manual(box: Box) -> None:
    page = MAN.read_text()
    async with over(box) as (app, pilot):
        for leave in ("escape", "?", "q"):
            await pilot.press("?")
            await is_in_front(app, Keys)
            await pilot.pause()
            lines = [line for text in app.screen.query(Static) for line in str(text.content).splitlines()]
            keys = {key for line in lines for key in line.strip().partition("  ")[0].split(", ")}
            assert {*"prsSxby/?q<>o", "enter", "space", "ctrl+p"} <= keys
            assert [key for key in keys if f"*{key}*" not in page] == []
            await pilot.press(leave)
            await is_main(app)
        assert app.is_running


@journey("Top: q")
async def test_q_quits_and_leaves_everything_as_it_is(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("q")
        await until(lambda: not app.is_running)
    assert app.return_code == 0
    assert recorded(box) == {"ann": "running"}


async def test_the_palette_does_what_the_keys_do_and_sorts_by_columns_that_are_not_shown(box: Box) -> None:
    await box.create("ann", tenant="zoo")
    await box.create("bob", tenant="abc")

    async def choose(words: str) -> None:
        await pilot.press("ctrl+p")
        await is_in_front(app, CommandPalette)
        await pilot.press(*words)
        palette = app.screen
        await until(lambda: palette.query_one(OptionList).option_count > 0)
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(lambda: app.screen is not palette)

    async with over(box) as (app, pilot):
        await choose("tenant")
        await until(lambda: rows_of(app) == ["bob", "ann"])
        await pilot.press("home")
        await choose("pause")
        await until(lambda: recorded(box) == {"ann": "running", "bob": "paused"})
        await choose("stop")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box)["bob"] == "stopped")


@pytest.mark.parametrize("screen", [ConfirmScreen, Keys, BackendScreen])
def test_what_covers_the_table_is_left_with_esc(screen: type[Any]) -> None:
    assert any("escape" in binding.key.split(",") for binding in screen.BINDINGS)
