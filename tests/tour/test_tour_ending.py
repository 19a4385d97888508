"""The ends of a tour: whatever ends it, nothing of it is left, at once or after the next one."""

from __future__ import annotations

import os
import signal
import termios
from pathlib import Path

import pytest

from tests.journeys.stack import until
from tests.tour.running import RunningTour, TourTerminal, UnreadTour, nothing_left

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.mark.wide
@pytest.mark.parametrize("point", ["while agents sleep", "while its Hive comes up", "while agents start"])
def test_ctrl_c_leaves_nothing(point: str, passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        if point == "while its Hive comes up":
            until(lambda: (tour.shown(), list(passable.glob("hive-demo-*/state")))[1], within_s=60, what="a state")
            tour.look()
        else:
            tour.until_asked("1/6")
            tour.type("\n")
            tour.until_it_says("agents start")
        if point == "while agents sleep":
            tour.until_asked("2/6")
            tour.type("\n")
            tour.until_asked("3/6")
        tour.type("\x03" * (2 if point == "while agents start" else 1))  # the second one is a hurry
        assert tour.wait() == 130, tour.shown()
        nothing_left(tour)
        assert termios.tcgetattr(tour._of_program) == tour.modes
    finally:
        tour.close()


@pytest.mark.wide
def test_sigterm_in_a_pipe_in_the_middle_of_the_flood_leaves_nothing(passable: Path) -> None:
    tour = RunningTour(passable, "--step", "4")
    try:
        until(tour.agents, within_s=60, what="agents")
        tour.look()
        tour.send(signal.SIGTERM)
        assert tour.wait() == 130, tour.shown()
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_a_closed_terminal_leaves_nothing(passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        tour.hang_up()
        assert tour.process.wait(100) != 0
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_a_reader_that_left_is_no_error_message_and_leaves_nothing(passable: Path) -> None:
    tour = UnreadTour(passable, "--step", "6")
    try:
        assert tour.wait() == 1
        assert tour.shown() == ""
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_q_before_the_first_step_is_an_orderly_end(passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        tour.type("q")
        assert tour.wait() == 0, tour.shown()
        assert "The tour is over" in tour.shown()
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
@pytest.mark.parametrize("killed", ["the tour", "the tour and its Hive"])
def test_what_a_killed_tour_left_the_next_one_removes(killed: str, passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        tour.type("\n")
        tour.until_asked("2/6")
        tour.look()
        first = tour.state.parent
        if killed == "the tour and its Hive":
            up = tour.up_pid()
            tour.process.kill()
            os.kill(up, signal.SIGKILL)
        else:
            tour.process.kill()
        tour.process.wait()
        assert first.exists()
        following = RunningTour(passable, "--step", "6", "--json")
        try:
            assert following.wait() == 0, following.shown()
        finally:
            following.close()
        assert not first.exists()
        nothing_left(tour)
        nothing_left(following)
    finally:
        tour.close()


@pytest.mark.wide
def test_a_hive_that_is_killed_under_its_tour_is_an_error_and_nothing_is_left(passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        tour.type("\n")
        tour.until_asked("2/6")
        os.kill(tour.up_pid(), signal.SIGKILL)
        tour.type("\n")
        assert tour.wait() == 1, tour.shown()
        assert "hive: the tour's Hive ended with 137" in tour.shown()
        nothing_left(tour)
    finally:
        tour.close()


@pytest.mark.wide
def test_a_tour_that_lives_is_not_cleaned_away_by_another_one(passable: Path) -> None:
    tour = TourTerminal(passable)
    try:
        tour.until_asked("1/6")
        other = RunningTour(passable, "--step", "6", "--json")
        try:
            assert other.wait() == 0, other.shown()
        finally:
            other.close()
        assert len(tour.agents()) == 0
        tour.type("q")
        assert tour.wait() == 0, tour.shown()
        nothing_left(tour)
    finally:
        tour.close()


def test_a_hive_that_cannot_come_up_says_why_and_leaves_nothing(passable: Path) -> None:
    """No redis-server in the PATH: as the command alone would say it."""
    tour = RunningTour(passable, "--yes", PATH="/nonexistent")
    try:
        assert tour.wait() == 5, tour.shown()
        assert "hive: redis-server is not installed" in tour.shown()
        assert "hint: " in tour.shown()
        nothing_left(tour)
    finally:
        tour.close()
