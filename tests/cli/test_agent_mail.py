"""`hive agent send` and `hive agent messages` against a real daemon."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hive.cli.text import table
from hive.control import message_delivery
from tests.cli.conftest import CLOSED_PORT
from tests.cli.http_server import in_thread

Hive = Any
"""conftest.Hive: test modules import no siblings."""


class Inbox(BaseHTTPRequestHandler):
    """It refuses `refuse`, puts `later` off, and accepts all else."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        self.send_response({"refuse": 404, "later": 503}.get(text, 202))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def inbox() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inbox)
    with in_thread(server):
        yield server


@pytest.fixture
def ingress_port(request: pytest.FixtureRequest) -> int:
    if "inbox" not in request.fixturenames:
        return CLOSED_PORT
    port: int = request.getfixturevalue("inbox").server_port
    return port


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_message_is_sent_listed_and_dropped(hive: Hive) -> None:
    sent = re.fullmatch(
        r"message ([0-9a-f]{16}) waits for alice\n", hive("agent", "send", "alice", "the build is red").out
    )
    assert sent is not None
    message = sent[1]
    lines = hive("agent", "messages", "alice").out.splitlines()
    assert lines[0].split()[:4] == ["ID", "SENT", "FROM", "STATE"]
    assert lines[1].split()[0] == message
    assert "the build is red" in lines[1]
    assert "Messages: 1 waiting" in hive("agent", "show", "alice").out
    assert hive("agent", "messages", "alice", "--drop", message).out == f"message {message} is dropped\n"
    assert hive("agent", "messages", "alice").out == "no message waits for alice\n"
    assert hive("agent", "messages", "alice", "--drop", message).code == 3


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


@pytest.mark.usefixtures("inbox")
def test_waiting_ends_when_it_is_accepted_refused_or_too_late(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "FIRST_RETRY_S", 0.01)
    assert hive("agent", "send", "alice", "hello", "--wait").out.startswith("alice has accepted message ")
    refused = hive("agent", "send", "alice", "refuse", "-w")
    assert (refused.code, refused.out) == (1, "")
    assert (
        refused.err == "hive: alice refuses it: its inbox answered 404  [internal]\nhint: hive agent messages alice\n"
    )
    late = hive("agent", "send", "alice", "later", "--wait", "--timeout", "0.1")
    assert late.code == 7
    assert "alice has not accepted it in time" in late.err
    assert hive("agent", "send", "alice", "x", "--timeout", "3").code == 2


def test_what_an_agent_answers_forges_no_row(hive: Hive) -> None:
    """The page of an error, as Python's http.server answers, broke the table and could look like another message."""
    said = table(["ID", "ERROR"], [["m0", "501: <html>\nm1  accepted\t\x1b[2J"]])
    assert said.splitlines() == ["ID  ERROR", "m0  501: <html> m1 accepted \\x1b[2J"]
    hive("agent", "send", "alice", "two\nlines")
    assert "  two lines" in hive("agent", "messages", "alice").out.splitlines()[1]


def test_who_is_stopped_gets_it_later_and_that_is_said(hive: Hive) -> None:
    hive("agent", "stop", "alice")
    assert hive("agent", "send", "alice", "hello").out.endswith(" waits for alice; alice is stopped\n")


def test_an_agent_without_a_port_cannot_be_written_to(hive: Hive) -> None:
    hive("agent", "create", "mute", "--", "sleep", "9")
    said = hive("agent", "send", "mute", "hello")
    assert said.code == 2
    assert "mute has no port" in said.err
