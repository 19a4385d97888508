"""The page of leases: the holders of memory, the line, and ending one, over a real daemon."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from hive.client.client import Client
from hive.settings.pool import PoolSection
from hive.tui.gpus import Drawing
from hive.tui.leases import (
    LeaseLine,
    end_question,
    heads,
    holder_lines,
    lease_cells,
    lease_facts,
    lease_title,
    leases_of,
)
from hive.tui.lines import text_of
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.screens.leases import LeaseScreen, LeaseTable
from hive.tui.snapshot import PoolShare
from tests.control.box import AWAKE, Box
from tests.tui import frozen
from tests.tui.driving import answered, is_in_front, is_main, journey, over, pane, shown
from tests.waiting import until

POOLED = msgspec.structs.replace(AWAKE, pool=PoolSection(cpu_mb=1000, reserve_mb=0))
ROWS = leases_of({"leases": frozen.leases()})
POOL = frozen.pool(frozen.eight_gpus())


def take(box: Box, mb: int, **fields: Any) -> str:
    """Asks for a lease of something that is no process; its id."""
    order = {"mb": mb, "kind": "held", "ttl_s": 600.0, "wait_s": 600.0, "all": True} | fields
    return str(Client(box.paths.api_socket, timeout_s=20).post("/api/leases", order)["id"])


async def taken(box: Box, mb: int, **fields: Any) -> str:
    """One that has its memory: somebody reads of it until then."""
    id = await asyncio.to_thread(take, box, mb, **fields)
    client = Client(box.paths.api_socket, timeout_s=20)
    await asyncio.to_thread(lambda: [*client.lines(f"/api/leases/{id}/wait", silence_s=20)])
    return id


def states(box: Box) -> dict[str, str]:
    return {lease.id: str(lease.state) for lease in box.services.leases.leases}


def rows(screen: Any) -> list[str]:
    table = screen.query_one("#leases", LeaseTable)
    return [str(table.get_option_at_index(number).prompt) for number in range(table.option_count)]


def is_at(screen: Any, where: int) -> bool:
    return bool(screen.query_one("#leases", LeaseTable).highlighted == where)


@given(
    st.lists(st.builds(LeaseLine, id=st.text(max_size=9), state=st.sampled_from(["waiting", "running", "overdue"]),
                       mb=st.integers(1, 1 << 30), gpus=st.lists(st.text(max_size=40), max_size=8),
                       wanted_gpus=st.integers(1, 8), band=st.sampled_from(["low", "normal", "high"]),
                       label=st.text(max_size=200), user=st.text(max_size=80), why=st.text(max_size=200),
                       preemptible=st.booleans(), place=st.none() | st.integers(1, 999),
                       before=st.lists(st.text(max_size=9), max_size=5), ready_in_s=st.none() | st.floats(0, 1e9),
                       bound_s=st.none() | st.floats(0, 1e9), since=st.floats(0, 2e9),
                       granted_at=st.none() | st.floats(0, 2e9), until=st.none() | st.floats(0, 2e9),
                       used_mb=st.none() | st.integers(0, 1 << 30), held_by=st.text(max_size=9)), max_size=2),
    st.integers(24, 200),
    st.integers(2, 12),
    st.booleans(),
)  # fmt: skip
def test_whatever_there_is_has_room(leases: list[LeaseLine], width: int, room: int, unicode: bool) -> None:
    assert len(heads(width)) <= width
    for lease in leases:
        text = text_of([lease_cells(lease, {}, width, unicode=unicode)])
        assert len(text) <= width
        assert not {"\x1b", "\n", "\x9b", "\u202e"} & {*text}
        assert unicode or text.isascii()
        assert len(lease_facts(lease, width, now=frozen.AT, most=3)) <= 3
    assert len(holder_lines(POOL, frozen.eight_gpus(), room, Drawing(width, None, None, unicode))) <= room


def test_the_question_before_a_lease_is_ended_steers_no_terminal() -> None:
    """Its label is chosen by the one who asked for it, and the question is read by root."""
    lease = msgspec.structs.replace(ROWS[0], label="x\x1b]52;c;aGk=\x1b\\\nEnd l-3?\u202e")
    asked = ConfirmScreen(end_question(lease)).question
    assert not {"\x1b", "\n", "\u202e"} & {*asked}


def test_the_line_has_places_and_times_and_whoever_holds_has_none() -> None:
    drawn = [text_of([lease_cells(lease, {"cpu": "0"}, 100, unicode=True)]).split() for lease in ROWS]
    assert drawn[0][1:5] == ["waiting", "1", "in", "34s"]
    assert drawn[1][1:4] == ["waiting", "2", "8.0G"]
    assert [cells[2] for cells in drawn[2:]] == ["-", "-", "-"]
    assert lease_title(ROWS) == "leases: 3 held, 2 waiting"


def test_the_page_says_who_holds_what_of_each_gpu() -> None:
    gpus = frozen.eight_gpus()
    mine = [PoolShare(gpus[0].uuid, "lease", "l-9", 4 << 30), PoolShare(gpus[1].uuid, "model", "m", 2 << 30)]
    pool = msgspec.structs.replace(POOL, shares=mine)
    lines = text_of(holder_lines(pool, gpus, 16, Drawing(120, None, None, unicode=True))).splitlines()
    assert "leases 4.0G (l-9 4.0G) · others 9.0G" in lines[1]
    assert "models 2.0G (m 2.0G)" in lines[3]
    short = text_of(holder_lines(pool, gpus, 4, Drawing(120, None, None, unicode=True))).splitlines()
    assert short[-1] == "and 5 more: hive pool"


@journey("Top: l", "LeaseScreen: x escape", "LeaseTable: down up k j g G home end")
async def test_a_lease_is_ended_after_a_question_and_stays_selected_while_others_go(box: Box) -> None:
    await box.stop_daemon()
    await box.start_daemon(POOLED)
    first = await taken(box, 300, label="comfyui")
    second = await taken(box, 300, label="other")
    third = await taken(box, 300, label="third")
    async with over(box) as (app, pilot):
        await pilot.press("l")
        await is_in_front(app, LeaseScreen)
        screen = app.screen
        await until(lambda: len(rows(screen)) == 3)
        assert pane(app, "title", screen).text.strip() == "leases: 3 held"
        assert "leases 900M" in pane(app, "memory", screen).text
        await until(lambda: screen.selected is not None and screen.selected.id == first)
        # What acts on an agent is not to be had here: the selected one is behind the page.
        assert {"p", "r", "s", "S", "b"} & screen.active_bindings.keys() == set()
        for keys, where in ((("down",), 1), (("up",), 0), (("G",), 2), (("k",), 1), (("g",), 0)):
            await pilot.press(*keys)
            await until(partial(is_at, screen, where))
        await pilot.press("end", "home", "j")
        await until(lambda: screen.selected is not None and screen.selected.id == second)
        await pilot.press("x")
        await is_in_front(app, ConfirmScreen)
        assert f"End {second} of" in str(app.screen.query_one(Static).content)
        await answered(app, pilot, "n")
        assert states(box) == dict.fromkeys((first, second, third), "running")
        client = Client(box.paths.api_socket, timeout_s=20)
        await asyncio.to_thread(lambda: client.delete(f"/api/leases/{first}", end=1))
        await until(lambda: [row.split()[0] for row in rows(screen)] == [second, third])
        assert screen.selected is not None
        assert screen.selected.id == second
        await pilot.press("x")
        await answered(app, pilot, "y")
        await until(lambda: states(box) == {third: "running"})
        await until(lambda: [row.split()[0] for row in rows(screen)] == [third])
        await pilot.press("escape")
        await is_main(app)


async def test_readonly_and_a_daemon_that_is_away_end_no_lease_and_what_was_seen_stays() -> None:
    source = frozen.Frozen(frozen.look(pool=frozen.pool()))
    source.leases = frozen.leases()
    async with shown(source, readonly=True) as (app, pilot):
        await pilot.press("l")
        await is_in_front(app, LeaseScreen)
        await until(lambda: len(rows(app.screen)) == 5)
        assert "x" not in app.screen.active_bindings
    async with shown(source) as (app, pilot):
        await pilot.press("l")
        await is_in_front(app, LeaseScreen)
        await until(lambda: len(rows(app.screen)) == 5 and "x" in app.screen.active_bindings)
        source._looks = (frozen.down(),)
        await until(lambda: "as they were" in pane(app, "title", app.screen).text)
        assert len(rows(app.screen)) == 5
        assert "x" not in app.screen.active_bindings
        assert "! " in pane(app, "memory", app.screen).text


@pytest.mark.parametrize("answer", [[{"id": 1}], [{}], "what?"])
async def test_an_answer_of_another_version_leaves_the_page_up(answer: Any) -> None:
    source = frozen.Frozen(frozen.look(pool=frozen.pool()))
    source.leases = answer
    async with shown(source) as (app, pilot):
        await pilot.press("l")
        await is_in_front(app, LeaseScreen)
        await until(lambda: "cannot be understood" in pane(app, "memory", app.screen).text)
