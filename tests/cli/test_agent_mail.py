"""`hive agent send` and `hive agent messages` against the real API over services in memory."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from hive.cli.text import table

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_message_is_sent_listed_and_dropped(hive: Hive) -> None:
    assert hive("agent", "send", "alice", "the build is red").out == "message m0 waits for alice\n"
    lines = hive("agent", "messages", "alice").out.splitlines()
    assert lines[0].split()[:4] == ["ID", "SENT", "FROM", "STATE"]
    assert lines[1].split()[0] == "m0"
    assert "the build is red" in lines[1]
    assert "Messages: 1 waiting" in hive("agent", "show", "alice").out
    assert hive("agent", "messages", "alice", "--drop", "m0").out == "message m0 is dropped\n"
    assert hive("agent", "messages", "alice").out == "no message waits for alice\n"
    assert hive("agent", "messages", "alice", "--drop", "m0").code == 3


@pytest.mark.parametrize(("id", "code"), [("a/b", 3), ("../schedules", 3), ("50%2F", 3), ("", 2)])
def test_an_id_is_never_a_path(hive: Hive, id: str, code: int) -> None:
    said = hive("agent", "messages", "alice", "--drop", id, "--json")
    assert said.code == code
    assert (f"message {id!r}" if id else "names nothing") in said.error["message"]


def test_what_is_piped_in_is_sent_as_it_is(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "zwei\nZeilen – ü\n".encode())
    sent = hive("agent", "send", "alice", "-", "--json").json
    assert (sent["schema"], sent["state"]) == ("agent.send", "waiting")
    (kept,) = hive("agent", "messages", "alice", "--json").json["messages"]
    assert kept["text"] == "zwei\nZeilen – ü\n"


@pytest.mark.parametrize(
    ("data", "said"), [(b"\xff", "not UTF-8"), (b"x" * (256 * 1024 + 1), "more than 262144 bytes")]
)
def test_what_cannot_be_sent_is_exit_2(hive: Hive, monkeypatch: pytest.MonkeyPatch, data: bytes, said: str) -> None:
    stdin(monkeypatch, data)
    result = hive("agent", "send", "alice", "-")
    assert result.code == 2
    assert said in result.err


def test_waiting_ends_when_it_is_accepted_refused_or_too_late(hive: Hive) -> None:
    assert hive("agent", "send", "alice", "hello", "--wait").out == "alice has accepted message m0\n"
    refused = hive("agent", "send", "alice", "refuse", "-w")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "hive: alice refuses it: its inbox answered 404\nhint: hive agent messages alice\n"
    late = hive("agent", "send", "alice", "later", "--wait", "--timeout", "0.1")
    assert late.code == 7
    assert "alice has not accepted it in time" in late.err
    assert hive("agent", "send", "alice", "x", "--timeout", "3").code == 2


def test_what_an_agent_answers_forges_no_row(hive: Hive) -> None:
    """The page of an error, as Python's http.server answers, broke the table and could look like another message."""
    said = table(["ID", "ERROR"], [["m0", "501: <html>\nm1  accepted\t\x1b[2J"]])
    assert said.splitlines() == ["ID  ERROR", "m0  501: <html> m1 accepted \\x1b[2J"]
    hive("agent", "send", "alice", "two\nlines")
    assert len(hive("agent", "messages", "alice").out.splitlines()) == 2


def test_who_is_stopped_gets_it_later_and_that_is_said(hive: Hive) -> None:
    hive("agent", "stop", "alice")
    assert hive("agent", "send", "alice", "hello").out == "message m0 waits for alice; alice is stopped\n"


def test_an_agent_without_a_port_cannot_be_written_to(hive: Hive) -> None:
    hive("agent", "create", "mute", "--", "sleep", "9")
    said = hive("agent", "send", "mute", "hello")
    assert said.code == 2
    assert "mute has no port" in said.err
