"""The worker's other deciders: its times, its restarts, the lines it keeps, and the lines that repeat."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest
from hive.worker.bios import STABLE, BiosForm, messages
from hive.worker.log_ring import LINE_MAX_BYTES, LINES_MAX, LogRing
from hive.worker.profile import TimeoutProfile
from hive.worker.repeated_line import RepeatedLine
from hive.worker.restarts import ServerEnd, delay_s
from hive.worker.runaway import WHITE_MAX, Runaway, WhiteSpaceRun

PROFILE = TimeoutProfile()
NOW = datetime(2026, 11, 23, 19, 5, tzinfo=UTC)


# --- times -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_decided() -> None:
    times = (PROFILE.connect_timeout_s, PROFILE.headers_timeout_s, PROFILE.ttft_timeout_s)
    assert times == (2, 300, None)
    assert (PROFILE.prefill_liveness_timeout_s, PROFILE.idle_stream_timeout_s) == (120, 60)
    assert (PROFILE.absolute_timeout_s, PROFILE.liveness_probe_interval_s) == (None, 5)
    assert (PROFILE.backoff_first_s, PROFILE.backoff_longest_s) == (1, 60)
    assert (PROFILE.crash_limit, PROFILE.crash_window_s) == (5, 120)


@pytest.mark.parametrize("name", TimeoutProfile.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, "5", True, float("inf"), float("nan")])
def test_what_is_no_time_is_refused(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name):
        TimeoutProfile(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["connect_timeout_s", "liveness_probe_interval_s", "load_timeout_s", "crash_limit"])
def test_some_limits_cannot_be_off(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        TimeoutProfile(**{name: None})  # type: ignore[arg-type]


def test_a_backoff_that_shrinks_is_refused() -> None:
    with pytest.raises(BadRequest, match="longer"):
        TimeoutProfile(backoff_first_s=2, backoff_longest_s=1)


# --- starts after a crash ----------------------------------------------------------------------------------------


def test_the_wait_doubles_up_to_its_limit() -> None:
    ends = [ServerEnd(at * 100.0, 90.0) for at in range(12)]
    waits = [delay_s(ends[: number + 1], PROFILE, now=ends[number].at) for number in range(len(ends))]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]


def test_five_ends_in_two_minutes_are_too_many() -> None:
    ends = [ServerEnd(at, 1.0) for at in (0, 30, 60, 90, 119)]
    assert delay_s(ends[:4], PROFILE, now=90) == 8
    assert delay_s(ends, PROFILE, now=119) is None
    assert delay_s([*ends[:4], ServerEnd(121, 1.0)], PROFILE, now=121) == 16


def test_a_server_that_lived_long_is_back_at_once() -> None:
    assert delay_s([ServerEnd(0, 1.0), ServerEnd(1, 1.0), ServerEnd(500, 499.0)], PROFILE, now=500) == 1


# --- lines -------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab\n", max_size=30)), st.integers(1, 5))
def test_a_ring_keeps_the_last_lines_however_they_come(pieces: list[str], kept: int) -> None:
    ring = LogRing(kept)
    for piece in pieces:
        ring.feed(piece.encode())
    ring.end()
    text = "".join(pieces)
    assert ring.last() == text.removesuffix("\n").split("\n")[-kept:] if text else ring.last() == []


def test_a_ring_is_bounded_in_lines_and_in_length() -> None:
    ring = LogRing()
    for _ in range(3 * LINES_MAX):
        ring.feed(b"x" * 20_000 + b"\n")
    assert len(ring.last()) == LINES_MAX
    assert max(map(len, ring.last())) < LINE_MAX_BYTES + 40
    assert ring.last(0) == []


LINES = st.lists(st.sampled_from(["again and again", "other", "", "  again and again"]), max_size=12)


@given(LINES, st.integers(1, 7))
def test_a_loop_is_found_wherever_the_pieces_are_cut(lines: list[str], size: int) -> None:
    text = "".join(f"{line}\n" for line in lines)
    in_a_row = any(set(lines[at : at + 3]) == {"again and again"} for at in range(len(lines) - 2))
    cut, whole = RepeatedLine(characters=10, times=3), RepeatedLine(characters=10, times=3)
    found = [cut.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert whole.feed(text) == in_a_row or "  again and again" in lines
    assert (found or [False])[-1] == whole.feed("")


def test_short_lines_may_repeat_and_a_line_without_end_is_bounded() -> None:
    found = RepeatedLine()
    assert not found.feed("    }\n" * 100)
    assert not found.feed("x" * 100_000)
    assert not found.feed("x" * 100_000)
    assert len(found._line) <= 4096
    assert found.feed("\n" + "the same line again\n" * 8)


@given(st.lists(st.sampled_from(["a", " ", "\n\t", "   ", ""]), max_size=40), st.integers(1, 9))
def test_a_run_of_white_space_is_found_in_pieces(pieces: list[str], most: int) -> None:
    found = WhiteSpaceRun(most)
    said = [found.feed(piece) for piece in pieces]
    runs = "".join(pieces).replace("\n", " ").replace("\t", " ").split("a")
    assert (said or [False])[-1] is (max(map(len, runs)) >= most)


def test_white_space_and_lines_are_loops_in_words_of_their_own() -> None:
    assert Runaway().feed(" " * (WHITE_MAX - 1)) == ""
    assert "white space" in Runaway().feed(" " * WHITE_MAX)
    assert "same line" in Runaway().feed("over and over again\n" * 8)


# --- BIOS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", BiosForm)
@pytest.mark.parametrize("system", ["", "Be short."])
def test_the_users_prompt_is_last_and_alone(form: BiosForm, system: str) -> None:
    *before, last = messages(system, "What is it?", NOW, form)
    assert last == {"role": "user", "content": "What is it?"}
    assert all(message["role"] == "system" and message["content"] for message in before)


def test_the_bios_is_stable_but_for_its_last_lines() -> None:
    """So the server's prefix cache holds from one minute to the next."""
    one, other = (messages("Be short.", "x", NOW.replace(minute=minute))[0]["content"] for minute in (5, 6))
    assert one != other
    assert one.startswith(STABLE)
    assert one.rpartition("It is ")[0] == other.rpartition("It is ")[0]


def test_the_bios_comes_before_the_callers_words_in_messages_too() -> None:
    told = [message["content"] for message in messages("Be short.", "x", NOW, BiosForm.MESSAGES)]
    assert told == [STABLE, "Be short.", "It is 2026-11-23 19:05 (UTC).", "x"]


@pytest.mark.parametrize("form", BiosForm)
def test_rules_of_tools_stand_before_the_callers_words_and_are_told_without_a_bios_too(form: BiosForm) -> None:
    system = "".join(message["content"] for message in messages("Be short.", "x", NOW, form, rules="Call X.")[:-1])
    assert 0 <= system.index("Call X.") < system.index("Be short.")
    assert (STABLE in system) is (form is not BiosForm.OFF)
