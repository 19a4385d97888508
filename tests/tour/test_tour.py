"""The whole tour on real parts: what it says is what the kernel and the books say."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nobody import run_as_nobody
from tests.swapspace import zram_swap
from tests.tour.running import RunningTour, TourTerminal, is_frozen, nothing_left

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """Name of a step → its object, of one tour for all tests of its figures."""
    place = Path(tempfile.mkdtemp(prefix="hive-"))
    place.chmod(0o711)
    tour = RunningTour(place, "--json")
    try:
        assert tour.wait() == 0, tour.shown()
        nothing_left(tour)
        objects = [json.loads(line) for line in tour.shown().splitlines()]
        assert all((each["schema"], each["version"]) == ("demo", 1) for each in objects)
        yield {each["step"]: each for each in objects}
    finally:
        tour.close()
        shutil.rmtree(place, ignore_errors=True)


def test_every_step_is_an_object_in_its_order_and_all_of_them_take_less_than_three_minutes(told: Any) -> None:
    assert list(told) == ["agents", "sleep", "wake", "share", "outage", "usage"]
    assert [each["number"] for each in told.values()] == [1, 2, 3, 4, 5, 6]
    assert not any(each["skipped"] for each in told.values())
    assert sum(each["took_s"] for each in told.values()) <= 150


def test_three_agents_hold_their_memory_and_the_model_answers_them(told: Any) -> None:
    rows = told["agents"]["figures"]["agents"]
    assert [row["name"] for row in rows] == ["scribe", "librarian", "watcher"]
    assert all(row["ram_bytes"] > 30 << 20 and row["tokens_out"] > 0 for row in rows)
    assert all((row["uid"] is not None) == (os.getuid() == 0) for row in rows)


def test_who_sleeps_uses_no_cpu_and_does_not_answer(told: Any) -> None:
    rows = told["sleep"]["figures"]["agents"]
    assert [row["status"] for row in rows] == ["paused"] * 3
    assert [row["cpu_ms"] for row in rows] == [0.0] * 3
    assert not any(row["answers_past_hive"] for row in rows)
    assert all(row["asleep_after_ms"] > 0 for row in rows)
    assert any(row["depth"] == "deep" for row in rows) != bool(told["sleep"]["figures"]["deep_note"])


def test_whoever_is_called_wakes_with_its_memory_whole(told: Any) -> None:
    rows = told["wake"]["figures"]["agents"]
    assert all(row["memory_whole"] and row["cause"] == "ingress" for row in rows)
    assert all(row["wake_ms"] > 0 for row in rows)
    assert [row["turn"] for row in rows] == [3, 3, 3]


@pytest.mark.wide
@pytest.mark.root
def test_on_a_host_with_swap_one_gives_its_memory_back_and_has_it_again(passable: Path) -> None:
    with zram_swap(256):
        tour = RunningTour(passable, "--step", "2", "--step", "3", "--json")
        try:
            assert tour.wait() == 0, tour.shown()
            slept, woken = (json.loads(line)["figures"] for line in tour.shown().splitlines())
            nothing_left(tour)
        finally:
            tour.close()
    (deep,) = [row for row in slept["agents"] if row["depth"] == "deep"]
    assert (deep["name"], slept["deep_note"]) == ("scribe", "")
    assert deep["swap_bytes"] > 0
    assert deep["ram_asleep_bytes"] < deep["ram_awake_bytes"] / 2
    assert [(row["depth"], row["memory_whole"]) for row in woken["agents"]] == [("deep", True), *[("light", True)] * 2]


def test_guest_waits_less_than_crowd(told: Any) -> None:
    crowd, guest = told["share"]["figures"]["tenants"]
    assert (crowd["tenant"], crowd["asked"], crowd["whole"]) == ("crowd", 24, 24)
    assert (guest["tenant"], guest["asked"], guest["whole"]) == ("guest", 5, 5)
    assert guest["first_word_ms"]["median"] < crowd["first_word_ms"]["median"]
    assert guest["first_word_ms"]["longest"] < crowd["first_word_ms"]["longest"]


def test_callers_of_a_killed_backend_get_an_error_in_words_and_then_there_is_one_again(told: Any) -> None:
    figures = told["outage"]["figures"]
    assert figures["new_pid"] not in (None, figures["killed_pid"])
    cut = [row for row in figures["callers"] if row["when"] == "in the middle of its answer"]
    assert len(cut) == 2
    assert all(row["words"] > 0 and row["code"] == "stream_incomplete" and row["message"] for row in cut)
    others = [row for row in figures["callers"] if row not in cut and row["message"]]
    assert all(row["code"] == "backend_unavailable" for row in others)
    assert figures["back_ms"] > 0


def test_the_books_have_what_callers_were_told(told: Any) -> None:
    figures = told["usage"]["figures"]
    totals, heard = figures["totals"], figures["told"]
    assert {row["name"] for row in figures["agents"]} == {"scribe", "librarian", "watcher", "crowd", "guest"}
    assert {row["tenant"] for row in figures["tenants"]} == {"default", "crowd", "guest"}
    assert totals["requests"] == heard["answers"] + heard["not_whole"]
    assert totals["cut"] == heard["not_whole"] == 3 + told["outage"]["figures"]["refused"]
    assert totals["tokens_in"] == heard["tokens_in"] > 0
    assert totals["tokens_out"] >= heard["tokens_out"] > 0  # of what was cut, the part that came through


def test_on_a_terminal_each_step_waits_and_sleepers_are_frozen_while_one_reads(passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        tour.type("\n")
        tour.until_asked("2/6")
        tour.type("\n")
        tour.until_asked("3/6")
        sleepers = [agent for agent in tour.agents() if agent["status"] == "paused"]
        assert len(sleepers) == 3
        assert all(is_frozen(int(str(agent["pid"]))) for agent in sleepers)
        tour.type("s")
        tour.until_asked("4/6")
        tour.type("x")
        tour.type("q")
        assert tour.wait() == 0
        shown = tour.shown()
        assert "\x1b[1m1/6  Agents\x1b[0m" in shown
        assert shown.count("skipped") == 1
        assert "PAST HIVE" in shown
        assert "FIRST WORD, MEDIAN" not in shown
        assert "gone" in shown
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_a_step_is_skipped_in_its_middle_and_the_next_one_has_what_it_needs(passable: Path) -> None:
    tour = TourTerminal(passable, "--step", "1", "--step", "3")
    try:
        tour.until_asked("1/6")
        tour.type("\n")
        tour.until_it_says("agents start")
        tour.type("s")
        tour.until_asked("3/6")
        assert "FIRST TURN  " not in tour.shown()
        tour.type("\n")
        assert tour.wait() == 0, tour.shown()
        assert tour.shown().count(" whole") == 3
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_without_colour_it_is_plain_text_and_nobody_is_asked_with_yes(passable: Path) -> None:
    tour = RunningTour(passable, "--yes", "--step", "6")
    try:
        assert tour.wait() == 0, tour.shown()
        shown = tour.shown()
        assert "\x1b" not in shown
        assert "Enter" not in shown
        assert max(map(len, shown.splitlines())) <= 100
        assert "tenant guest" in shown
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_on_a_terminal_that_wants_no_colour_it_is_plain_text_with_keys(passable: Path) -> None:
    tour = TourTerminal(passable, "--step", "6", NO_COLOR="1")
    try:
        tour.until_asked("6/6")
        tour.type("\n")
        assert tour.wait() == 0, tour.shown()
        assert "\x1b" not in tour.shown()
        assert "TOKENS OUT" in tour.shown()
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_settings_and_state_of_another_hive_are_not_touched(passable: Path) -> None:
    """Variables that mean another Hive, its Redis or its settings are none of a tour's business."""
    other = {"HIVE_STATE_DIR": str(passable / "other"), "REDIS_URL": "redis://127.0.0.1:1/0"}
    tour = RunningTour(passable, "--step", "6", "--json", **other, AUTO_SLEEP_ENABLED="nonsense")
    try:
        assert tour.wait() == 0, tour.shown()
        assert json.loads(tour.shown())["figures"]["told"]["answers"] == 1
        nothing_left(tour)
    finally:
        tour.close()


NOBODYS = """
import os, sys
os.environ["TMPDIR"] = {place!r}
from hive.cli.main import main
sys.exit(main(["demo", "--json", "--step", "2", "--step", "3"]))
"""


@pytest.mark.root
@pytest.mark.wide
def test_an_ordinary_user_has_the_same_tour(passable: Path) -> None:
    passable.chmod(0o777)
    told = [json.loads(line) for line in run_as_nobody(NOBODYS.format(place=str(passable))).splitlines()]
    assert [each["step"] for each in told] == ["sleep", "wake"]
    assert all(row["cpu_ms"] == 0 and not row["answers_past_hive"] for row in told[0]["figures"]["agents"])
    assert all(row["memory_whole"] for row in told[1]["figures"]["agents"])
    assert list(passable.iterdir()) == []
