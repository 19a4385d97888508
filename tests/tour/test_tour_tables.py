"""The words of the tour: each table fits a terminal of 80 columns, and says what was measured, as it was."""

from __future__ import annotations

from typing import Any

import pytest

from hive.cli import demo_tables
from hive.cli.lazy import CommandTable
from hive.cli.main import HIVE
from hive.errors import UsageError
from hive.tour.scenes import Scenes
from hive.tour.steps import STEPS, choose

COST = {"requests": 1234567, "tokens_in": 12345678, "tokens_out": 12345678, "unknown": 12345, "cut": 12345}
AGENT = {
    "name": "librarian",
    "pid": 4194304,
    "uid": 70002,
    "ram_bytes": 999 << 20,
    "first_turn_ms": 61234.0,
    "tokens_in": 123456,
    "tokens_out": 123456,
    "depth": "light",
    "asleep_after_ms": 24_999.0,
    "by_order": True,
    "cpu_ms": 990.0,
    "answers_past_hive": True,
    "ram_awake_bytes": 999 << 20,
    "ram_asleep_bytes": 999 << 20,
    "swap_bytes": 0,
    "wake_ms": 61234.0,
    "asleep_ms": 61234.0,
    "awake_ms": 61234.0,
    "turn": 123,
    "memory_whole": False,
}
FIGURES: dict[str, Any] = {
    "agents": {"agents": [AGENT], "up_ms": 61234.0},
    "sleep": {"agents": [AGENT, {**AGENT, "depth": "deep", "swap_bytes": 999 << 20}], "deep_note": ""},
    "wake": {"agents": [AGENT]},
    "share": {
        "places": 2,
        "all_ms": 61234.0,
        "tenants": [
            {
                "tenant": tenant,
                "asked": 24,
                "at_once": 24,
                "whole": 24,
                "first_word_ms": {"median": median, "longest": 61234.0},
            }
            for tenant, median in (("crowd", 61234.0), ("guest", 234.5))
        ],
    },
    "outage": {
        "killed_pid": 4194303,
        "new_pid": 4194304,
        "refused": 123,
        "back_ms": 29_999.0,
        "callers": [
            {"when": "in the middle of its answer", "words": 60, "status": 200, "code": code, "message": message}
            for code, message in (("stream_incomplete", "it broke off"), ("", "the connection broke: " + "x" * 99))
        ],
    },
    "usage": {
        "agents": [{**COST, "name": None, "agent_id": "12345678"}],
        "tenants": [{**COST, "tenant": "default"}],
        "totals": COST,
        "told": {"answers": 123, "tokens_in": 12345, "tokens_out": 12345, "not_whole": 123},
    },
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_fits_80_columns_and_half_a_screen(step: Any) -> None:
    shown = demo_tables.shown(step.name, FIGURES[step.name], width=80)
    assert max(map(len, shown.splitlines())) <= 80, shown
    said = "\n".join(demo_tables.wrapped(text, 80, indent="     ") for text in (step.sentence, step.look, step.command))
    assert max(map(len, said.splitlines())) <= 80
    assert len(shown.splitlines()) + len(said.splitlines()) <= 20


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_has_a_scene_a_table_and_a_command_that_there_is(step: Any) -> None:
    assert step.name in demo_tables.TABLES
    assert callable(getattr(Scenes, step.name))
    program, *words = step.command.split()
    assert program == "hive"
    found: Any = HIVE
    for word in words:
        if not isinstance(found, CommandTable):
            break
        found = found.entries[word]
    assert not isinstance(found, CommandTable) or found.default


def test_a_damaged_memory_and_an_order_are_said() -> None:
    assert "DAMAGED" in demo_tables.shown("wake", FIGURES["wake"], width=80)
    assert "by order" in demo_tables.shown("sleep", FIGURES["sleep"], width=80)
    told = demo_tables.shown("sleep", {**FIGURES["sleep"], "deep_note": "no swap here"}, width=80)
    assert "None sleeps deep: no swap here." in told


def test_what_a_server_says_steers_no_terminal() -> None:
    rude = {"when": "x", "words": 1, "status": 200, "code": "", "message": "a\x1b[2Jb"}
    assert "\x1b" not in demo_tables.shown("outage", {**FIGURES["outage"], "callers": [rude]}, width=80)


@pytest.mark.parametrize("numbers", [[0], [7], [1, -1]])
def test_a_step_that_there_is_not_is_refused(numbers: list[int]) -> None:
    with pytest.raises(UsageError, match="they are 1 to 6"):
        choose(numbers)
