"""The pane of the pool: whatever there is, in the room there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.tui.gpus import Drawing
from hive.tui.lines import text_of
from hive.tui.pool import load_lines, pool_lines, pool_title
from hive.tui.snapshot import PoolLook, PoolSlotLine, from_api
from hive.tui.watch import Watch
from tests.control.box import Box
from tests.tui import frozen

STATES = ("cold", "loading", "ready", "draining", "asleep", "stopping", "failed")
ONE, EIGHT = frozen.one_gpu(), frozen.eight_gpus()


def drawn(pool: PoolLook, gpus: Any = (), room: int = 9, width: int = 100, *, unicode: bool = True) -> list[str]:
    return text_of(pool_lines(pool, gpus, room, Drawing(width, None, None, unicode))).splitlines()


@st.composite
def pools(draw: st.DrawFn) -> PoolLook:
    slot = st.builds(
        PoolSlotLine,
        model=st.text(max_size=60),
        state=st.sampled_from(STATES),
        why=st.text(max_size=80),
        memory_bytes=st.integers(0, 1 << 50),
        pinned=st.booleans(),
        in_flight=st.integers(0, 999),
        waiting=st.integers(0, 999),
        audience=st.integers(0, 99),
        turn_ends_in_s=st.none() | st.floats(0, 1e6),
        load_s=st.floats(0, 1e6),
        loading_s=st.none() | st.floats(0, 1e6),
        wake_s=st.none() | st.floats(0, 1e6),
    )
    return PoolLook(frozen.pool(draw(st.sampled_from([[], ONE, EIGHT]))).accounts, draw(st.lists(slot, max_size=12)))


@given(pools(), st.sampled_from([[], ONE, EIGHT]), st.integers(1, 20), st.integers(20, 200), st.booleans())
def test_no_more_lines_and_columns_than_there_are(
    pool: PoolLook, gpus: Any, room: int, width: int, unicode: bool
) -> None:
    lines = drawn(pool, gpus, room, width, unicode=unicode)
    assert len(lines) <= room
    assert max(map(len, lines), default=0) <= width
    assert len(load_lines(pool, room)) <= room
    assert unicode or all(line.isascii() for line in lines)


def test_what_fails_or_moves_comes_before_what_is_busy_and_the_cold_ones_share_a_line() -> None:
    lines = drawn(frozen.pool())
    assert [line.split()[0] for line in lines] == ["host", "??-7b", "qwen3-32b", "qwen3-8b", "embed-gte", "1"]
    assert lines[2].split(maxsplit=1)[1] == "loading 14s of 47s  22G  3 waiting"
    assert lines[-1].strip() == "1 cold: llama-3.1-70b"


def test_where_there_is_little_room_each_model_is_named_all_the_same() -> None:
    assert drawn(frozen.pool(), room=2)[1].strip() == (
        "??-7b failed, qwen3-32b loading, qwen3-8b ready, embed-gte ready, and 1 cold"
    )


def test_a_gpu_that_is_lost_says_so_and_one_outside_the_pool_is_shown_as_without_it() -> None:
    lines = drawn(frozen.pool(EIGHT), EIGHT, room=20)
    assert lines[3].startswith("GPU 3  ! GPU is lost")
    besides = drawn(frozen.pool(EIGHT[:1]), EIGHT[:2], room=20)
    assert besides[0].startswith("GPU 0  ")
    assert "free" in besides[0]
    assert besides[1].startswith("GPU 1")
    assert "free" not in besides[1]


def test_memory_that_is_overdrawn_and_memory_that_nobody_tells_are_seen() -> None:
    [account] = frozen.pool().accounts
    short = type(account)("GPU-1", "H200", 100 << 30, 0, None, None, 0, -(3 << 30))
    assert "n/a/100G free -3.0G" in drawn(PoolLook([short], []))[0]


@pytest.mark.parametrize(
    ("slot", "said"),
    [
        (
            PoolSlotLine(model="m", state="loading", waiting=2, loading_s=3.0, load_s=9.0),
            "loading m, 3 s of about 9: 2 wait",
        ),
        (PoolSlotLine(model="m", state="cold", waiting=1), "m is cold: 1 wait"),
        (PoolSlotLine(model="m", state="ready", waiting=1), ""),
        (PoolSlotLine(model="m", state="loading", loading_s=3.0), ""),
    ],
)
def test_loads_that_are_waited_for_stand_beside_the_queue(slot: PoolSlotLine, said: str) -> None:
    assert text_of(load_lines(PoolLook([], [slot]), 3)) == said


def test_a_sleeper_is_shown_with_the_time_of_its_wake() -> None:
    [account] = frozen.pool().accounts
    slot = PoolSlotLine(model="m", state="asleep", memory_bytes=1 << 30, wake_s=2.4)
    assert any("asleep, wakes in 2s  1.0G" in line for line in drawn(PoolLook([account], [slot])))


def test_without_a_pool_there_is_nothing_of_it() -> None:
    assert load_lines(None, 3) == []


async def test_what_the_daemon_answers_is_understood(box: Box) -> None:
    answers = await asyncio.to_thread(Watch(client_of(box)).ask, None)
    assert answers.pool["enabled"] is False
    assert from_api(answers, place="", now=1.0).pool is None
    told = {
        "enabled": True,
        "accounts": [{"id": "cpu", "name": "host memory", "total_bytes": 9, "charged_bytes": 2, "measured_bytes": None,
                      "used_bytes": None, "foreign_bytes": 0, "free_bytes": 7, "reserve_bytes": 0}],
        "slots": [{"id": "m-1", "model": "m", "state": "ready", "grants": [{"account": "cpu", "charged_bytes": 2}]}],
    }  # fmt: skip
    look = from_api(type(answers)(**{**_fields(answers), "pool": told}), place="", now=1.0).pool
    assert look is not None
    assert (look.slots[0].memory_bytes, look.accounts[0].free_bytes) == (2, 7)
    assert pool_title(look) == "pool: 1 of 1 model loaded"


def client_of(box: Box) -> Any:
    from hive.client.client import Client

    return Client(box.paths.api_socket, timeout_s=20)


def _fields(answers: Any) -> dict[str, Any]:
    return {name: getattr(answers, name) for name in answers.__struct_fields__}
