"""`hive usage`: tables with bars, values for spreadsheets, and the questions it asks."""

from __future__ import annotations

import csv
import io
import os
import pty
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest

from hive.cli.usage import with_bars
from tests.cli.conftest import Hive, spend

HOURS = [int(time.time()) // 3600 * 3600 - 3600 * back for back in (3, 2)]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def hive(hive: Hive) -> Hive:
    """With three requests of alice's and a smaller one of busy-bob's, an hour later."""
    costs: dict[str, Any] = {name: f"=a {name}\x1b[2J" for name in ("tenant", "model", "backend")}
    hive.daemon.do(spend(hive.box, "alice", 3, tokens_in=400, tokens_out=12, at=HOURS[0] + 60, **costs))
    small: dict[str, Any] = {"tenant": "t", "model": "m", "backend": "b"}
    hive.daemon.do(spend(hive.box, "busy-bob", tokens_in=10, tokens_out=0, at=HOURS[1] + 60, **small))
    return hive


@pytest.mark.parametrize("by", ["tenant", "model", "backend"])
def test_usage_has_a_line_for_each_of_what_it_is_added_up_by(hive: Hive, by: str) -> None:
    said = hive("usage", "--by", by, "--since", "7h")
    head, first, second, last = said.out.splitlines()
    assert head.split()[:2] == [by.upper(), "REQUESTS"]
    assert first.startswith(f"=a {by}")
    assert second.startswith(by[0])
    assert last.split()[:4] == ["all", "in", "7h", "4"]
    assert "\x1b" not in said.out
    assert "█" not in said.out
    for filters in (["--agent", "busy-bob"], ["--tenant", "t"], ["--model", "m"]):
        head, line, _ = hive("usage", "--by", by, *filters).out.splitlines()
        assert line.startswith(by[0])


def test_audio_and_images_have_columns_where_any_were_used(hive: Hive) -> None:
    assert "AUDIO" not in hive("usage").out
    costs: dict[str, Any] = {"tenant": "t", "backend": "b", "tokens_in": None, "tokens_out": None, "at": HOURS[0] + 60}
    hive.daemon.do(spend(hive.box, "alice", 2, model="ear", unit="audio_s", amount=45.2, **costs))
    hive.daemon.do(spend(hive.box, "alice", 1, model="eye", unit="images", amount=3.0, work=19660800.0, **costs))
    head, *lines = hive("usage", "--by", "model").out.splitlines()
    assert head.split()[-3:] == ["AUDIO", "IMAGES", "MPIXEL-STEPS"]
    told = {line.split()[0]: line.split() for line in lines}
    assert told["ear"][-4:] == ["1m", "30s", "0", "0.0"]
    assert told["eye"][-3:] == ["0s", "3", "19.7"]
    assert told["ear"][5] == "0", "an amount that is known is not unknown"
    rows = {row["model"]: row for row in read(hive("usage", "--by", "model", "--csv").out)}
    assert (rows["ear"]["audio_s"], rows["eye"]["images"], rows["eye"]["pixel_steps"]) == ("90.4", "3", "19660800")


def test_hours_are_told_in_local_time(hive: Hive) -> None:
    told = [line[:16] for line in hive("usage", "--by", "hour").out.splitlines()[1:3]]
    assert told == [f"{datetime.fromtimestamp(hour):%Y-%m-%d %H:%M}" for hour in HOURS]


def test_a_spreadsheet_gets_numbers_and_no_formulas(hive: Hive) -> None:
    (first, second) = read(hive("usage", "--by", "model", "--csv").out)
    assert first["model"].startswith("'=a model")
    assert (first["requests"], first["tokens_in"], second["tokens_out"]) == ("3", "1200", "0")
    assert [row["name"] for row in read(hive("usage", "--csv").out)] == ["alice", "busy-bob"]
    assert [row["hour"] for row in read(hive("usage", "--by", "hour", "--csv").out)] == [str(hour) for hour in HOURS]


def test_json_is_what_the_daemon_says(hive: Hive) -> None:
    told = hive("usage", "--by", "hour", "--json").json
    assert (told["schema"], told["by"], [row["hour"] for row in told["hours"]]) == ("usage", "hour", HOURS)


@pytest.mark.parametrize(
    ("words", "said"), [(("--by", "day"), "by: expected one of agent, tenant"), (("--csv", "--json"), "one of them")]
)
def test_what_cannot_be_asked_is_a_usage_error(hive: Hive, words: tuple[str, ...], said: str) -> None:
    found = hive("usage", *words)
    assert found.code == 2
    assert said in found.err


def test_a_line_with_few_tokens_has_a_bar_and_one_without_has_none() -> None:
    lines = with_bars("NAME\na\nb\nc\nall", [1_000_000, 1, 0], 80).split("\n")
    assert [line.count("█") for line in lines] == [0, 24, 1, 0, 0]


@pytest.mark.parametrize("columns", [0, 20, 79, 80, 200])
def test_no_line_is_longer_than_the_terminal_because_of_its_bar(columns: int) -> None:
    text = "NAME" + " " * 60 + "\nx\nall"
    assert max(map(len, with_bars(text, [5], columns).split("\n"))) <= max(columns, 64)


def test_on_a_terminal_of_80_columns_bars_are_there(hive: Hive) -> None:
    """Through a real one, as the lines of the demo are narrow enough for a bar."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hive", "usage", "--by", "hour"]
    environment = {**os.environ, "COLUMNS": "90", "PYTHONIOENCODING": "utf-8", "HIVE_SOCKET": str(hive.socket)}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment):
        os.close(follower)
        said = b""
        while True:
            try:
                said += os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
    os.close(leader)
    lines = said.decode().split("\r\n")
    assert [line.count("█") > 0 for line in lines[:3]] == [False, True, True]
    assert max(map(len, lines)) <= 90


def test_a_wrong_span_is_said_by_the_name_of_the_option(hive: Hive) -> None:
    """`hive agent usage --since soon` spoke of `period`, which is the API's name for it."""
    said = hive("agent", "usage", "alice", "--since", "soon")
    assert (said.code, said.err.splitlines()[0].startswith("hive: --since: expected numbers with s, m, h or d")) == (
        2,
        True,
    )


def test_a_removed_agent_has_the_name_it_had(hive: Hive) -> None:
    """It was 32 hex digits, and the table wrapped at 80 columns."""
    assert hive("agent", "remove", "alice", "--yes").code == 0
    told = hive("usage").out.splitlines()
    assert told[1].startswith("alice (removed)  3 ")
    assert max(map(len, told)) <= 80
    [first, _] = hive("usage", "--json").json["agents"]
    assert (first["name"], first["removed_name"]) == (None, "alice")
