"""Output of a container is copied once, however often the stream breaks off; for real in test_docker.py."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hive.host.engine import Engine, EngineLogEntry
from hive.runtimes.container_log import (
    ContainerLog,
    Position,
    advanced,
    begin_anew,
    fresh,
    read_position,
    write_position,
)
from hive.runtimes.log_process import append


def entry(moment: int, number: int) -> EngineLogEntry:
    return EngineLogEntry(f"2026-11-20T14:25:03.{moment:09d}", b"%d\n" % number)


@given(
    st.lists(st.integers(0, 4), max_size=30).map(sorted),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=20),
)
def test_every_piece_is_copied_once_however_the_stream_is_cut(
    moments: list[int], connections: list[tuple[int, int]]
) -> None:
    """Each connection brings all from the last moment on, in chunks, and breaks off after some."""
    printed = [entry(moment, number) for number, moment in enumerate(moments)]
    position, copied = Position(), []
    for count, chunk in [*connections, (len(printed), 3)]:
        at, skip = position.at, position.same
        stream = [one for one in printed if one.at >= at][: count if count < 9 else None]
        for start in range(0, len(stream), chunk):
            new, skip = fresh(stream[start : start + chunk], at, skip)
            copied += new
            position = advanced(position, new, 0)
    new, _ = fresh([one for one in printed if one.at >= position.at], position.at, position.same)
    assert copied + new == printed


def test_a_position_is_read_as_it_was_written_and_a_shorter_one_replaces_a_longer(tmp_path: Path) -> None:
    note = tmp_path / "log"
    assert read_position(note) is None
    for position in (Position("2026-11-20T14:25:03.000000001", 12, 123456), Position(size=3)):
        write_position(note, position)
        assert read_position(note) == position
    note.write_bytes(b"{")
    assert read_position(note) is None


def test_a_log_that_was_cut_back_has_its_new_length_in_the_note(tmp_path: Path) -> None:
    path, note = tmp_path / "a.log", tmp_path / "note"
    begin_anew(path, note, 4096)
    assert read_position(note) == Position(size=0)
    size = append(path, b"line\n" * 700, 4096)
    before = Position("2026-11-20T14:25:03.000000001", 1, size)
    write_position(note, before)
    log = ContainerLog(
        Engine(tmp_path / "none"), "c", path=path, limit_bytes=4096, note=note, agent="a", is_over=lambda: True
    )
    assert log._with_room(before, 100) == before
    assert path.stat().st_size == 3500
    position = log._with_room(before, 1000)
    assert position == read_position(note)
    assert position.size == path.stat().st_size <= 2048
    assert position.at == before.at
