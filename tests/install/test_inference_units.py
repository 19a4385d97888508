"""One inference server at a time, as a real systemd does it; stand-ins for the programs, named as such."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import systemd_machine

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(600)]

PROGRAMS = {"ollama": "ollama", "vllm": "vllm", "llama": "llama-server"}
INSIDE = f"{systemd_machine.HIVE_THERE}/tests/install/inference_units_inside.py"
JOB = f"PYTHONDONTWRITEBYTECODE=1 timeout 350 python3 {INSIDE} /out/seen"


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    systemd_machine.make_root()
    with tempfile.TemporaryDirectory(prefix="hive-inference-") as name:
        console = systemd_machine.run(JOB, Path(name), limit_s=400)
        report = Path(name) / "seen"
        assert report.exists(), console
        yield json.loads(report.read_text())


def test_ollama_is_reached_by_its_socket_and_not_at_the_hosts_loopback(seen: dict[str, Any]) -> None:
    assert (seen["ollama"], seen["relay"], seen["loopback"]) == ("ollama", "active", "ConnectionRefusedError")


def test_one_that_crashed_is_started_again_over_the_socket_it_left(seen: dict[str, Any]) -> None:
    assert (seen["after a crash"], seen["over its own socket"]) == ("ollama", "llama-server")


def test_starting_one_ends_the_one_before_and_a_late_caller_starts_nothing(seen: dict[str, Any]) -> None:
    assert [switch["to"] for switch in seen["switches"]] == ["vllm", "llama", "ollama", "llama"]
    for switch in seen["switches"]:
        to = switch["to"]
        assert switch["answers"].pop(to) == PROGRAMS[to]
        assert set(switch["answers"].values()) <= {"FileNotFoundError", "ConnectionRefusedError"}
        assert switch["states"] == {name: "active" if name == to else "inactive" for name in PROGRAMS}


def test_none_begins_before_the_one_before_has_ended(seen: dict[str, Any]) -> None:
    running: list[str] = []
    for what, program, _ in seen["life"]:
        if what == "ended":
            running.remove(program)
            continue
        if running == [program]:
            running.clear()  # it was killed
        assert running == [], f"{program} beside {running}"
        running.append(program)
    ended = [program for what, program, _ in seen["life"] if what == "ended"]
    assert ended == ["ollama", "vllm", "llama-server", "ollama", "llama-server"]


def test_an_ollama_that_is_killed_or_stopped_leaves_no_runner_behind(seen: dict[str, Any]) -> None:
    """Ollama's runners outlive it by themselves, and hold the memory that the next server needs."""
    assert seen["runners"] == {"started": 2, "after a crash": [], "after all": []}


def test_who_is_not_in_the_group_reaches_none(seen: dict[str, Any]) -> None:
    assert seen["nobody"] == ["PermissionError", "PermissionError"]


def test_a_missing_program_is_said_and_not_tried_again(seen: dict[str, Any]) -> None:
    assert seen["missing"]["shown"] == ["ExecMainStatus=5", "NRestarts=0"]
    assert "inference.vllm_program: there is no /opt/vllm/bin/vllm" in seen["missing"]["said"]


def test_systemd_finds_no_circle_in_their_order(seen: dict[str, Any]) -> None:
    assert "Started hive-inference-llama.service" in seen["journal"]
    assert "cycle" not in seen["journal"]
