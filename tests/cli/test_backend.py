"""The commands about inference servers: what is shown of a switch, and how it ends."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hive.cli import backend

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_a_switch_shows_how_far_it_is_and_what_it_came_to(hive: Hive) -> None:
    said = hive("backend", "switch", "vllm")
    assert said.code == 0
    assert said.err == "closing the gate (about 20s left)\n"
    assert said.out == "vllm is in use now (was demo), after 31s, 1 of its requests did not end in time\n"


def test_rolled_back_is_exit_6_with_the_last_lines(hive: Hive) -> None:
    said = hive("backend", "switch", "llama")
    assert (said.code, said.out) == (6, "")
    assert said.err.splitlines()[1:] == [
        "hive: llama: it failed; demo is active again",
        "its last lines:",
        "  out of memory\\x1b[2J",
        "hint: look there",
    ]
    error = hive("backend", "switch", "llama", "--json").error
    assert (error["code"], error["exit_code"]) == ("rolled_back", 6)
    assert "out of memory" in error["message"]


def test_where_it_is_in_use_already_nothing_is_done(hive: Hive) -> None:
    said = hive("backend", "switch", "demo")
    assert (said.code, said.out, said.err) == (0, "demo is in use already\n", "")


def test_without_waiting_it_is_a_job_that_others_can_look_at_and_end(hive: Hive) -> None:
    begun = hive("backend", "switch", "http://127.0.0.1:9", "--no-wait", "--json").json
    assert (begun["schema"], begun["state"], begun["id"]) == ("backend.switch", "running", "j0")
    assert hive("backend", "status").out.startswith("Switching (job j0): closing the gate\n")
    assert hive("backend", "switch", "vllm").code == 1
    assert hive("backend", "switch", "--cancel").out == "vllm: it was cancelled; demo is active again\n"
    assert hive("backend", "switch", "--cancel").code == 3


def test_what_to_switch_to_has_to_be_named(hive: Hive) -> None:
    assert hive("backend", "switch").code == 2
    assert hive("backend", "switch", "vllm", "--cancel").code == 2


def test_ctrl_c_ends_the_waiting_and_says_that_the_switch_goes_on(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    # This module's only: the daemon beside it sleeps, too.
    monkeypatch.setattr(backend, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    said = hive("backend", "switch", "http://127.0.0.1:9")
    assert said.code == 130
    assert "the switch goes on" in said.err


def test_what_there_is_is_listed(hive: Hive) -> None:
    lines = hive("backend", "list").out.splitlines()
    assert lines[0].split() == ["BACKEND", "WHERE", "STATE", "ANSWERS", "VERSION", "IN", "USE"]
    assert lines[1] == "vllm     127.0.0.1:8000  running  yes      0.32\\x1b[2J"
    assert hive("backend", "list", "--json").json["backends"][0]["backend"] == "vllm"


def test_what_it_wrote_is_printed_and_does_not_steer_the_terminal(hive: Hive) -> None:
    assert hive("backend", "logs", "-n", "2").out == "line 0\\x1b[2J\nline 1\\x1b[2J\n"
    assert json.loads(hive("backend", "logs", "vllm", "--tail", "1", "--json").out)["lines"] == ["line 0\x1b[2J"]
    assert hive("backend", "logs", "nonsense").code == 3
