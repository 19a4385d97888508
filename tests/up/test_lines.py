"""Splitting and prefixing are pure; the terminal is a real pipe or a real pty."""

from __future__ import annotations

import itertools
import os
import pty

from hypothesis import given
from hypothesis import strategies as st

from hive.line_splitter import LineSplitter
from hive.up.lines import LINE_MAX, TerminalWriter, colour_of, prefixed


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_where_the_bytes_are_split_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    whole, pieces = LineSplitter(limit=20), LineSplitter(limit=20)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    by_piece: list[str] = []
    for start, end in itertools.pairwise(edges):
        by_piece += pieces.feed(data[start:end])
    assert by_piece + pieces.rest() == whole.feed(data) + whole.rest()


@given(st.binary(max_size=2000))
def test_a_line_is_never_much_longer_than_the_limit(data: bytes) -> None:
    splitter = LineSplitter(limit=50)
    # Each byte may become `\xNN`; then ` … 1950 bytes more`.
    assert all(len(line) <= 4 * 50 + 30 for line in splitter.feed(data) + splitter.rest())


def test_each_process_keeps_its_colour() -> None:
    assert colour_of("proxy") != colour_of("daemon")
    assert colour_of("something") == colour_of("something")


def test_a_line_without_colour_has_no_escape_and_with_colour_only_ours() -> None:
    text = "bell\a and \x1b[31mred"
    assert "\x1b" not in prefixed("proxy", text, coloured=False)
    assert prefixed("proxy", text, coloured=True).count("\x1b") == 2


def test_a_long_line_says_how_much_is_missing() -> None:
    assert prefixed("proxy", "x" * (LINE_MAX + 7), coloured=False).endswith("… 7 more")


def test_a_reader_that_stands_still_costs_lines_not_time() -> None:
    """A blocked `write` here would stop every child's output being read, and so Hive (Ctrl-S in the terminal)."""
    reading, writing = os.pipe()
    terminal = TerminalWriter(writing)
    for number in range(3000):
        terminal.line(f"line {number} {'x' * 100}")
    os.set_blocking(reading, False)
    got = b""
    while len(piece := _read(reading)):
        got += piece
    assert b"line 0 " in got
    assert b"line 2999 " not in got
    terminal.line("after")
    assert b"lines dropped" in (rest := _read(reading))
    assert rest.endswith(b"after\n")
    os.close(reading)
    os.close(writing)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def test_a_terminal_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    TerminalWriter(writing).line("nobody hears this")
    os.close(writing)


def test_a_terminal_is_told_from_a_pipe() -> None:
    reading, writing = os.pipe()
    leader, follower = pty.openpty()
    assert TerminalWriter(follower).isatty()
    assert not TerminalWriter(writing).isatty()
    for descriptor in (reading, writing, leader, follower):
        os.close(descriptor)
