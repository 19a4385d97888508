"""The table of agents alone: the selected agent stays selected, and a thousand rows cost what the screen shows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from textual.app import App, ComposeResult

from hive.tui.cells import COLUMNS, matches, ordered, row_line, shown
from hive.tui.snapshot import AgentLine
from hive.tui.widgets.agent_table import AgentTable


def row(name: str, **fields: object) -> AgentLine:
    given: dict[str, object] = {
        "id": f"id-{name}",
        "name": name,
        "status": "running",
        "depth": "awake",
        "tier": "medium",
        "tenant": "default",
        "model": None,
        "runtime": "process",
        **dict.fromkeys(("in_flight", "parked", "requests", "tokens_in", "tokens_out", "wakes", "pauses"), 0),
        **dict.fromkeys(("tokens_per_s", "last_wake_ms", "last_wake_cause")),
        "rss_bytes": 1 << 20,
        "saved_bytes": 0,
        "idle_s": 1.0,
        "since": 1.7e9,
        "why": "1 s until idle",
        **fields,
    }
    return AgentLine(**given)  # type: ignore[arg-type]


class Alone(App[None]):
    def compose(self) -> ComposeResult:
        yield AgentTable(unicode=True)

    @property
    def table(self) -> AgentTable:
        return self.query_one(AgentTable)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_selected_agent_stays_selected_and_in_its_line_while_100_looks_come_and_agents_go(
    size: tuple[int, int],
) -> None:
    chance = random.Random(1)
    names = {f"agent-{number:03}" for number in range(300)}
    async with Alone().run_test(size=size) as pilot:
        table = pilot.app.query_one(AgentTable)
        table.show([row(name) for name in names])
        for _ in range(150):
            table.action_move(1)
        await pilot.pause()
        assert table.selected is not None
        kept, line = table.selected.name, table.screen_line
        assert line == table.size.height - 2
        for look in range(100):
            names -= set(chance.sample(sorted(names - {kept}), 3))
            names |= {f"agent-{chance.randrange(300):03}" for _ in range(4)}
            rows = [row(name, idle_s=float(look), tokens_per_s=chance.random()) for name in names]
            chance.shuffle(rows)
            table.show(rows)
            await pilot.pause()
            assert table.selected.name == kept
            assert table.screen_line == line
            assert table.render_line(line + 1).text.startswith(kept)


async def test_where_the_selected_agent_goes_the_one_in_its_place_is_selected() -> None:
    async with Alone().run_test() as pilot:
        table = pilot.app.query_one(AgentTable)
        table.show([row("a"), row("b"), row("c")])
        table.action_move(1)
        table.show([row("a"), row("c")])
        assert table.selected == row("c")
        table.show([row("a")])
        assert table.selected == row("a")
        table.show([])
        assert table.selected is None
        await pilot.press("enter", "down", "pagedown", "end")
        await pilot.pause()
        assert table.render_line(1).text.startswith("no agents")


async def test_sorted_by_what_changes_the_selection_goes_along() -> None:
    async with Alone().run_test() as pilot:
        table = pilot.app.query_one(AgentTable)
        table.show([row("a", rss_bytes=1), row("b", rss_bytes=2)])
        table.sort_by("RAM")
        await pilot.press("home")
        assert table.selected is not None
        assert table.selected.name == "b"
        table.show([row("a", rss_bytes=3), row("b", rss_bytes=2)])
        assert [found.name for found in table.rows] == ["a", "b"]
        assert table.selected.name == "b"


@pytest.mark.parametrize(("width", "column"), [(120, "MODEL"), (100, "TENANT"), (64, "TOK/S")])
async def test_a_scroll_bar_takes_no_column_away(width: int, column: str) -> None:
    """At just the width from which a column is shown it went with the first agent that had no line left."""
    async with Alone().run_test(size=(width, 24)) as pilot:
        table = pilot.app.query_one(AgentTable)
        for count, bar in ((5, 0), (100, 2)):
            table.show([row(f"agent-{number:03}", tenant="acme") for number in range(count)])
            await pilot.pause()
            heads = table.render_line(0).text
            assert column in heads
            assert len(heads) == len(table.render_line(1).text) == width - bar
        await pilot.click(AgentTable, offset=(heads.index(column), 0))
        assert table.sorted_by == column


async def test_a_click_selects_and_two_open() -> None:
    class Clicked(Alone):
        opened = ""

        def on_agent_table_opened(self, event: AgentTable.Opened) -> None:
            self.opened = event.row.name

    async with Clicked().run_test() as pilot:
        table = pilot.app.query_one(AgentTable)
        table.show([row("a"), row("b")])
        await pilot.click(AgentTable, offset=(2, 2))
        assert table.selected == row("b")
        await pilot.click(AgentTable, offset=(2, 1), times=2)
        await pilot.pause()
        assert pilot.app.opened == "a"  # type: ignore[attr-defined]


async def test_of_a_thousand_agents_only_those_on_the_screen_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    true_line: Callable[..., str] = row_line

    def counted(found: AgentLine, *rest: object, **named: object) -> str:
        drawn.append(found.name)
        return true_line(found, *rest, **named)

    monkeypatch.setattr("hive.tui.cells.row_line", counted)
    async with Alone().run_test(size=(80, 24)) as pilot:
        table = pilot.app.query_one(AgentTable)
        table.show([row(f"agent-{number:04}") for number in range(1000)])
        await pilot.pause()
        assert 0 < len(set(drawn)) <= 24


@pytest.mark.parametrize("width", [10, 20, 80, 119, 120, 200])
def test_a_row_is_as_wide_as_the_screen_whatever_it_is(width: int) -> None:
    strange = row("a" * 40, why="x" * 300, rss_bytes=None, in_flight=12345, idle_s=1e9, model="m" * 60)
    for unicode in (False, True):
        assert len(row_line(strange, shown(width), width, unicode=unicode)) == width


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.head)
def test_every_column_sorts_also_what_is_unknown(column: object) -> None:
    rows = [row("b", in_flight=None, rss_bytes=None, idle_s=None, saved_bytes=None), row("a", tokens_per_s=3.0)]
    assert {found.name for found in ordered(rows, column, descending=True)} == {"a", "b"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", True), ("ALI", True), ("bob", False), ("!bob", True), ("!ali", False), ("running", True), ("!", True)],
)
def test_a_filter_looks_at_the_words_of_a_row(wanted: str, found: bool) -> None:
    assert matches(row("alice"), wanted) is found
