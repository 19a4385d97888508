"""The commands about inference servers: what is shown of a switch, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hive.cli import backend
from tests.control.services_box import LLAMA, VLLM, ServicesBox
from tests.control.threaded_box import threaded_box
from tests.waiting import until

Hive = Any
"""conftest.Hive: test modules import no siblings."""


@pytest.fixture
def hive(no_daemon: Hive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Hive]:
    """A command line beside a daemon with services, of which llama was chosen and runs."""
    with threaded_box(ServicesBox) as daemon:
        box = daemon.box
        assert isinstance(box, ServicesBox)
        daemon.do(begin(box))
        monkeypatch.setenv("HIVE_SOCKET", str(daemon.socket))
        yield type(no_daemon)(daemon.socket, capsys, daemon)
        daemon.call(end, box)


async def begin(box: ServicesBox) -> None:
    box.units.printed = "\x1b[2J"
    await box.record(LLAMA)
    await box.start_helper()
    await box.start_daemon()
    await box.start_proxy()
    await until(lambda: box.inference()["running"])


def end(box: ServicesBox) -> None:
    for server in box.units.running.values():
        server.stop()


def hold(box: ServicesBox) -> None:
    """Requests at the backend do not end, so that a switch lasts."""
    box.proxy.holds_backend = asyncio.Event()


def test_a_switch_shows_how_far_it_is_and_what_it_came_to(hive: Hive) -> None:
    hive.box.proxy.cut = 1
    said = hive("backend", "switch", "vllm")
    assert said.code == 0
    assert said.err
    assert re.fullmatch(
        r"vllm is in use now \(was llama\), after \d+s, 1 of its requests did not end in time\n", said.out
    )


def test_rolled_back_is_exit_6_with_the_last_lines(hive: Hive) -> None:
    hive.box.units.broken[VLLM] = "dead"
    said = hive("backend", "switch", "vllm")
    assert (said.code, said.out) == (6, "")
    assert said.err.splitlines()[-3:] == [
        "hive: vllm: vllm.service failed (exit-code); llama is active again  [rolled_back]",
        "its last lines:",
        "  the last line of vllm\\x1b[2J",
    ]
    error = hive("backend", "switch", "vllm", "--json").error
    assert (error["code"], error["exit_code"]) == ("rolled_back", 6)
    assert "the last line of vllm" in error["message"]


def test_where_it_is_in_use_already_nothing_is_done(hive: Hive) -> None:
    said = hive("backend", "switch", "llama")
    assert (said.code, said.out, said.err) == (0, "llama is in use already\n", "")


def test_without_waiting_it_is_a_job_that_others_can_look_at_and_end(hive: Hive) -> None:
    hive.daemon.call(hold, hive.box)
    begun = hive("backend", "switch", "vllm", "--no-wait", "--json").json
    assert (begun["schema"], begun["state"]) == ("backend.switch", "running")
    assert hive("backend", "status").out.startswith(f"Switching (job {begun['id']}): ")
    assert hive("backend", "switch", "vllm").code == 1
    assert hive("backend", "switch", "--cancel").out == "vllm: it was cancelled; llama is active as before\n"
    assert hive("backend", "switch", "--cancel").code == 3


def test_what_to_switch_to_has_to_be_named(hive: Hive) -> None:
    assert hive("backend", "switch").code == 2
    assert hive("backend", "switch", "vllm", "--cancel").code == 2


@pytest.mark.wide
def test_ctrl_c_ends_the_waiting_and_says_that_the_switch_goes_on(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    # This module's only: the daemon beside it sleeps, too.
    monkeypatch.setattr(backend, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    hive.daemon.call(hold, hive.box)
    said = hive("backend", "switch", "vllm")
    assert said.code == 130
    assert "the switch goes on" in said.err


def test_what_there_is_is_listed(hive: Hive) -> None:
    lines = hive("backend", "list").out.splitlines()
    assert lines[0].split() == ["BACKEND", "WHERE", "STATE", "ANSWERS", "VERSION", "IN", "USE"]
    assert lines[1].split()[0] == "llama"
    assert hive("backend", "list", "--json").json["backends"][0]["backend"] == "llama"


def test_what_it_wrote_is_printed_and_does_not_steer_the_terminal(hive: Hive) -> None:
    assert hive("backend", "logs", "-n", "2").out == "the last line of llama\\x1b[2J\n"
    lines = json.loads(hive("backend", "logs", "vllm", "--tail", "1", "--json").out)["lines"]
    assert lines == ["the last line of vllm\x1b[2J"]
    assert hive("backend", "logs", "nonsense").code == 3
