"""Every key of `hive top`, at both sizes, over a real daemon: what it did is looked for in the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from control.box import Box, until
from fakes.memory_daemon import MemoryDesk
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Button, Input, RichLog, Static

from hive.control.serving import serve
from hive.domain import AgentSpec
from hive.tui.app import Top
from hive.tui.screens.agent import AgentPage
from hive.tui.screens.backend import Backends
from hive.tui.screens.confirm import Confirm
from hive.tui.screens.keys import Keys
from hive.tui.source import Source, read
from hive.tui.widgets.agent_table import AgentTable

SIZES = [(80, 24), (120, 40)]
MAN = Path(__file__).parents[2] / "man" / "hive-top.1.scd"
COLOURS = {"yellow", "red", "green"}
each_size = pytest.mark.parametrize("size", SIZES, ids=["80x24", "120x40"])


@asynccontextmanager
async def top(
    socket: Path, state: Path | None, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[Top, Pilot[int]]]:
    source = Source([socket], state, uid=0, env={})
    app = Top(source, await asyncio.to_thread(source.look), interval_s=0.1, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield app, pilot


def over(box: Box, size: tuple[int, int] = (80, 24), **options: Any) -> Any:
    return top(box.paths.api_socket, box.paths.state, size, **options)


def table_of(app: Top) -> AgentTable:
    return app.screen_stack[0].query_one("#agents", AgentTable)


def screen_text(app: Top) -> str:
    """What the table shows, line by line."""
    table = table_of(app)
    return "\n".join(table.render_line(y).text for y in range(table.size.height))


def said(screen: Screen[Any], selector: str) -> str:
    return str(screen.query_one(selector, Static).content)


def recorded(box: Box) -> dict[str, str]:
    """Agent → status, as the database has it."""
    return {agent.name: str(agent.status) for agent in read(box.paths.database)[0]}


async def is_in_front(app: Top, kind: type[Screen[Any]]) -> None:
    await until(lambda: isinstance(app.screen, kind) and app.screen.is_mounted)


async def answered(app: Top, pilot: Pilot[int], key: str) -> None:
    await is_in_front(app, Confirm)
    await pilot.pause()
    await pilot.press(key)
    await until(lambda: not isinstance(app.screen, Confirm))


@each_size
async def test_every_verb_does_what_it_says(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")
    await box.create("bob")
    async with over(box, size) as (app, pilot):
        assert "ann" in screen_text(app)
        await pilot.press("down", "p")
        await until(lambda: recorded(box)["bob"] == "paused")
        await until(lambda: "● paused" in screen_text(app))
        await pilot.press("r")
        await until(lambda: recorded(box)["bob"] == "running")
        await pilot.press("S")
        await answered(app, pilot, "n")
        assert recorded(box)["bob"] == "running"
        await pilot.press("S")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box)["bob"] == "stopped")
        await pilot.press("s")
        await until(lambda: recorded(box)["bob"] == "running")
        await pilot.press("x")
        await answered(app, pilot, "y")
        await until(lambda: recorded(box) == {"ann": "running"})
        await until(lambda: "bob" not in screen_text(app))


@each_size
async def test_an_agents_page_has_the_buttons_of_its_state_its_log_and_why(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")

    def buttons(app: Top) -> list[tuple[str, str]]:
        found = app.screen.query(Button)
        return [(str(button.label), "".join(button.classes & COLOURS)) for button in found if button.display]

    async with over(box, size) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentPage)
        await until(lambda: buttons(app) == [("Pause", "yellow"), ("Stop", "red")])
        await until(lambda: [line.text.strip() for line in app.screen.query_one(RichLog).lines] == ["up"])
        await pilot.pause()
        await pilot.click("#pause")
        await until(lambda: recorded(box)["ann"] == "paused")
        await until(lambda: buttons(app) == [("Resume", "green"), ("Stop", "red")])
        assert "why: " in said(app.screen, "#facts")
        await pilot.pause()
        await pilot.click("#stop")
        await answered(app, pilot, "y")
        await until(lambda: buttons(app) == [("Start", "green")])
        assert "stopped by operator" in said(app.screen, "#facts")
        await pilot.pause()
        await pilot.click("#start")
        await until(lambda: recorded(box)["ann"] == "running")
        await pilot.press("escape")
        await until(lambda: app.screen is app.screen_stack[0])


async def test_the_page_of_an_agent_that_goes_says_so(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentPage)
        await box.desk.remove("ann", "uid:0")
        await until(lambda: said(app.screen, "#title") == "ann (removed)")
        assert not [button for button in app.screen.query(Button) if button.display]


async def test_readonly_has_no_keys_that_change_something(box: Box) -> None:
    await box.create("ann")
    async with over(box, readonly=True) as (app, pilot):
        await pilot.press("p", "S", "x", "b")
        await pilot.pause(0.3)
        assert app.screen is app.screen_stack[0]
        assert recorded(box) == {"ann": "running"}
        await pilot.press("enter")
        await is_in_front(app, AgentPage)
        assert not [button for button in app.screen.query(Button) if button.display]


@each_size
async def test_a_daemon_that_goes_down_is_said_and_what_the_database_has_stays(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann")
    async with over(box, size) as (app, pilot):
        assert app.snapshot.is_live
        await box.stop_daemon()
        await until(lambda: not app.snapshot.is_live)
        await pilot.pause()
        assert f"the daemon is down: this is what {box.paths.database} says" in said(app.screen, "#problems")
        assert "ann" in screen_text(app)
        await pilot.press("p")
        await pilot.pause(0.2)
        assert recorded(box) == {"ann": "running"}
        await box.start_daemon()
        await until(lambda: app.snapshot.is_live)


async def test_without_a_database_either_the_last_look_stays_and_says_why(short_path: Path) -> None:
    desk = MemoryDesk(short_path)
    await desk.create(AgentSpec(name="ann", command=["/bin/true"]), "uid:0")
    server = await serve(desk, short_path / "hive.sock")
    async with top(short_path / "hive.sock", None) as (app, pilot):
        await server.close()
        await until(lambda: "no Hive answers" in said(app.screen, "#problems"))
        await pilot.pause()
        assert "this is how it was at" in said(app.screen, "#problems")
        assert "ann" in screen_text(app)


async def test_the_filter_shows_what_matches_and_esc_ends_it(box: Box) -> None:
    await box.create("ann")
    await box.create("bob")
    async with over(box) as (app, pilot):
        await pilot.press("slash", "exclamation_mark", "a", "n", "n")
        await until(lambda: [row.name for row in table_of(app).rows] == ["bob"])
        await pilot.press("enter")
        assert app.focused is table_of(app)
        await pilot.press("escape")
        await until(lambda: len(table_of(app).rows) == 2)
        assert app.screen.query_one(Input).display is False


async def test_a_click_on_a_head_sorts_and_another_turns_it_round(box: Box) -> None:
    await box.create("ann")
    await box.create("bob")
    async with over(box) as (app, pilot):
        table = table_of(app)
        await pilot.click("#agents", offset=(1, 0))
        assert [row.name for row in table.rows] == ["bob", "ann"]
        await pilot.press("greater_than_sign")
        assert table.sorted_by == "STATE"
        await pilot.press("less_than_sign")
        assert [row.name for row in table.rows] == ["ann", "bob"]
        await pilot.press("o")
        assert [row.name for row in table.rows] == ["bob", "ann"]


async def test_the_help_has_every_key_and_so_has_the_manual(box: Box) -> None:
    page = MAN.read_text()
    async with over(box) as (app, pilot):
        await pilot.press("question_mark")
        await is_in_front(app, Keys)
        await pilot.pause()
        text = str(app.screen.query_one(Static).content)
        keys = [key for line in text.splitlines() for key in line.strip().partition("  ")[0].split(", ")]
        assert {*"prsSxb/?q<>o", "enter", "space"} <= set(keys)
        assert [key for key in keys if f"*{key}*" not in page] == []
        await pilot.press("escape")
        await until(lambda: app.screen is app.screen_stack[0])


async def test_a_held_screen_stays_as_it_is(box: Box) -> None:
    async with over(box) as (app, pilot):
        await pilot.press("space")
        await pilot.pause(0.2)
        seen = app.snapshot
        await box.create("ann")
        await pilot.pause(0.4)
        assert app.snapshot is seen
        await pilot.press("space")
        await until(lambda: "ann" in screen_text(app))


@pytest.mark.parametrize(
    ("to", "outcome"),
    [
        ("vllm", "vllm is in use now, after 31s"),
        ("llama", "failed: llama: it failed; demo is active again. look there"),
    ],
)
async def test_a_switch_asks_shows_how_far_it_is_and_how_it_ended(short_path: Path, to: str, outcome: str) -> None:
    desk = MemoryDesk(short_path)
    await desk.create(AgentSpec(name="ann", command=["/bin/true"]), "uid:0")
    row = {"backend": to, "address": "127.0.0.1:8000", "unit": f"hive-inference-{to}", "in_use": False}

    async def backends() -> dict[str, Any]:
        return {"backends": [{**row, "state": "running", "answers": True, "version": "1"}]}

    desk.backends = backends  # type: ignore[method-assign]
    server = await serve(desk, short_path / "hive.sock")
    async with top(short_path / "hive.sock", None) as (app, pilot):
        await pilot.press("b")
        await is_in_front(app, Backends)
        await until(lambda: app.screen.query_one("#which").option_count == 1)  # type: ignore[attr-defined]
        await pilot.pause()
        await pilot.press("down", "enter")
        await answered(app, pilot, "y")
        screen = app.screen
        await until(lambda: "closing the gate (about 20s left)" in said(screen, "#said"))
        await until(lambda: said(screen, "#said") == outcome)
        await pilot.press("escape")
        await until(lambda: app.screen is app.screen_stack[0])
    await server.close()


async def test_a_terminal_of_20_by_5_and_back_again(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.resize_terminal(20, 5)
        await pilot.pause(0.2)
        assert "ann" in screen_text(app)
        assert app.screen.query_one("#events").display is False
        await pilot.resize_terminal(80, 24)
        await pilot.pause(0.2)
        assert app.screen.query_one("#events").display is True
        assert "STATE" in screen_text(app)


@pytest.mark.parametrize("set_no_color", [False, True])
async def test_states_have_the_seeds_colours_and_are_told_without_any(
    box: Box, monkeypatch: pytest.MonkeyPatch, set_no_color: bool
) -> None:
    if set_no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    await box.create("ann")
    await box.create("bob")
    await box.desk.pause("bob", timeout_s=10, now=False, deep=False, actor="uid:0")
    async with over(box, size=(120, 40)) as (app, pilot):
        await pilot.pause()
        badge = list(table_of(app).render_line(2))[1]
        assert badge.text.startswith("● paused")
        assert badge.style.color.name == "#eab308"
        assert badge.style.bgcolor is not None
        assert ("#eab308" in app.export_screenshot().lower()) is not set_no_color
        assert "paused" in screen_text(app)


async def test_ascii_only_is_ascii_only(box: Box) -> None:
    await box.create("ann")
    async with over(box, unicode=False) as (app, pilot):
        await pilot.pause()
        assert screen_text(app).isascii()
        assert "* running" in screen_text(app)
        assert said(app.screen, "#head").isascii()
        assert said(app.screen, "#events").isascii()


async def test_what_an_agent_wrote_does_not_steer_the_terminal(box: Box) -> None:
    await box.create("ann", ["/bin/sh", "-c", r"printf 'a\033[2Jb [red]\n'; exec sleep 1000"])
    async with over(box) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentPage)
        log = app.screen.query_one(RichLog)
        await until(lambda: [line.text.strip() for line in log.lines] == [r"a\x1b[2Jb [red]"])
