"""`hive top` on a screen that is not there: opening it, reading it, and which keys a test has pressed."""

from __future__ import annotations

import asyncio
import functools
import importlib
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.dom import DOMNode
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Button

import hive.tui
from hive.tui.app import Top
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.source import Source
from hive.tui.stored import read
from hive.tui.widgets.agent_table import AgentTable
from hive.tui.widgets.pane import Pane
from tests.control.box import Box
from tests.waiting import until

SIZES = [(80, 24), (120, 40)]
each_size = pytest.mark.parametrize(
    "size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.wide)], ids=["80x24", "120x40"]
)
Key = tuple[str, str]
"""The class that has the binding, and the key."""
JOURNEYS: dict[Key, str] = {}
"""Key → the test that presses it and asserts what it did."""
_pressed: set[Key] = set()
Test = Callable[..., Coroutine[Any, Any, None]]


def journey(*keys: str) -> Callable[[Test], Test]:
    """Says which keys a test is about: `journey("Top: p r", "ConfirmScreen: y")`. Fails if it does not press them."""
    declared = {(owner, key) for found in keys for owner, _, some in [found.partition(": ")] for key in some.split()}

    def wrap(test: Test) -> Test:
        @functools.wraps(test)
        async def told(*args: Any, **named: Any) -> None:
            _pressed.clear()
            await test(*args, **named)
            assert declared <= _pressed, f"declared, and not pressed: {declared - _pressed}"

        JOURNEYS.update(dict.fromkeys(declared, test.__name__))
        return told

    return wrap


def all_keys() -> set[Key]:
    """Every key of every binding that some class of hive.tui has."""
    for module in pkgutil.walk_packages(hive.tui.__path__, "hive.tui."):
        importlib.import_module(module.name)
    found: set[Key] = set()
    left: list[type] = [DOMNode]
    while left:
        left += (one := left.pop()).__subclasses__()
        if one.__module__.startswith("hive.tui"):
            made = [Binding(*each) if isinstance(each, tuple) else each for each in vars(one).get("BINDINGS", ())]
            found |= {(one.__name__, key.strip()) for binding in made for key in binding.key.split(",")}
    return found


def _recorded(app: Top, press: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def pressed(*keys: str) -> None:
        for key in keys:
            if (found := app.screen.active_bindings.get(_NAMES.get(key, key))) is not None:
                _pressed.add((type(found.node).__name__, _NAMES.get(key, key)))
            await press(key)

    return pressed


_NAMES = {"/": "slash", "?": "question_mark", "<": "less_than_sign", ">": "greater_than_sign", " ": "space"}


@asynccontextmanager
async def shown(source: Source, size: tuple[int, int] = (80, 24), **options: Any) -> AsyncIterator[tuple[Top, Any]]:
    app = Top(source, await asyncio.to_thread(source.look), **{"interval_s": 0.2} | options)
    async with app.run_test(size=size, notifications=True) as pilot:
        pilot.press = _recorded(app, pilot.press)  # type: ignore[method-assign,assignment]
        await pilot.pause()
        yield app, pilot


def top(socket: Path, state: Path | None, size: tuple[int, int] = (80, 24), **options: Any) -> Any:
    return shown(Source([socket], state, uid=0, env={}), size, **options)


def over(box: Box, size: tuple[int, int] = (80, 24), **options: Any) -> Any:
    return top(box.paths.api_socket, box.paths.state, size, **options)


def table_of(app: Top) -> AgentTable:
    return app.screen_stack[0].query_one("#agents", AgentTable)


def rows_of(app: Top) -> list[str]:
    return [row.name for row in table_of(app).rows]


def screen_text(app: Top) -> str:
    """The table as it is shown, line by line."""
    table = table_of(app)
    return "\n".join(table.render_line(y).text for y in range(table.size.height))


def pane(app: Top, name: str, screen: Screen[Any] | None = None) -> Pane:
    return (app.screen_stack[0] if screen is None else screen).query_one(f"#{name}", Pane)


def problems(app: Top) -> str:
    return " ".join(pane(app, "problems").text.split())


def buttons(app: Top) -> list[tuple[str, str]]:
    """Those of the page in front, with their colours."""
    found = app.screen.query(Button)
    return [(str(one.label), "".join(one.classes & {"yellow", "red", "green"})) for one in found if one.display]


def recorded(box: Box) -> dict[str, str]:
    """Agent → status, as the database has it."""
    return {agent.name: str(agent.status) for agent in read(box.paths.database)[0]}


async def is_in_front(app: Top, kind: type[Screen[Any]]) -> None:
    await until(lambda: isinstance(app.screen, kind) and app.screen.is_mounted)


async def is_main(app: Top) -> None:
    await until(lambda: app.screen is app.screen_stack[0])


async def answered(app: Top, pilot: Pilot[int], key: str) -> None:
    await is_in_front(app, ConfirmScreen)
    await pilot.pause()
    await pilot.press(key)
    await until(lambda: not isinstance(app.screen, ConfirmScreen))
