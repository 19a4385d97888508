"""An agent that waits for a sound to be heard by the real Whisper: no sleep takes its answer away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.errors import TimedOut
from tests import whisper
from tests.journeys.stack import Stack, stack, until
from tests.whisper import SPOKEN, word_error_rate

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.timeout(300)]
MOST_WRONG = 0.5
"""Of the words: the smallest model, two speeches in one."""


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Stack]:
    """Automatic sleep is on, after a second without work; the model is not loaded. Beside the programs of agents, which
    they may read, lies a sound of some 18 s."""
    tmp_path.chmod(0o755)
    config = (
        f"whisper_program = {whisper.program(tmp_path)}\n[pool]\nreserve_mb = 0\ncpu_mb = 1500\n"
        f"[model ear]\nbackend = whisper\nfile = {whisper.model()}\n"
    )
    with stack(auto_sleep=True, config=config) as made:
        whisper.speech(made.programs / "spoken.wav", f"{SPOKEN} {SPOKEN}").chmod(0o644)
        yield made


def create(hive: Stack, again_s: str) -> None:
    hive.create("alice", "hearer.py", str(hive.programs / "spoken.wav"), "ear", again_s)


def view(hive: Stack) -> Any:
    return hive.get("/api/agents/alice")


def answers(hive: Stack) -> list[dict[str, Any]]:
    return [line for line in hive.agent_lines("alice") if "status" in line]


def check_heard(answer: dict[str, Any]) -> None:
    assert answer["status"] == 200
    assert word_error_rate(f"{SPOKEN} {SPOKEN}", answer["text"]) <= MOST_WRONG


def test_an_agent_that_waits_for_its_sound_is_not_put_to_sleep_until_it_has_the_text(hive: Stack) -> None:
    """It does nothing for the seconds of the load and of the work, ten times as long as what is idle here."""
    create(hive, "0")
    seen: set[tuple[str, str]] = set()

    def is_heard() -> bool:
        now = view(hive)
        if not answers(hive):
            seen.add((now["status"], now["why"]))
        return bool(answers(hive))

    until(is_heard, within_s=120, what="it has its text")
    check_heard(answers(hive)[0])
    assert {status for status, _ in seen} <= {"starting", "running"}
    assert any(why.endswith("1 request in flight") for _, why in seen)
    until(lambda: view(hive)["status"] == "paused", within_s=30, what="then it is idle, and sleeps")


def test_an_operators_pause_waits_for_the_text_and_takes_none_away(hive: Stack) -> None:
    """It is refused in words where the sound takes longer than a pause waits; else the text is there before it."""
    create(hive, "0")
    until(lambda: any(row["name"] == "alice" for row in hive.get("/api/queue")["requests"]), within_s=30, what="sent")
    refused: list[str] = []
    try:
        assert hive.post("/api/agents/alice/pause")["status"] == "paused"
    except TimedOut as error:
        refused.append(error.message)
    assert all("could not be put to sleep" in why and "in flight; it is awake" in why for why in refused)
    if not refused:
        hive.post("/api/agents/alice/resume")
    until(lambda: answers(hive), within_s=120, what="it reads what has come")
    check_heard(answers(hive)[0])

    def rows() -> Any:
        return [row for row in hive.get("/api/usage", since="1h", by="agent")["agents"] if row["name"] == "alice"]

    until(lambda: rows() and rows()[0]["requests"], within_s=60, what="it is counted")
    assert (rows()[0]["requests"], rows()[0]["cut"], rows()[0]["unknown"]) == (1, 0, 0)
    assert rows()[0]["audio_s"] == pytest.approx(18, abs=2)


def test_an_agent_sleeps_and_wakes_between_two_sounds(hive: Stack) -> None:
    """It is resumed as often as it falls asleep before its time to ask has come; the second sound is heard whole."""
    create(hive, "6")
    until(lambda: len(answers(hive)) >= 1, within_s=120, what="the first text")
    slept: list[str] = []

    def has_two() -> bool:
        if view(hive)["status"] == "paused":
            slept.append(hive.post("/api/agents/alice/resume")["status"])
        return len(answers(hive)) >= 2

    until(has_two, within_s=120, what="the second text")
    assert slept
    for answer in answers(hive)[:2]:
        check_heard(answer)
