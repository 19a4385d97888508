"""HIVE_API_URL: a proxy whose link to the daemon is down wakes agents by HTTP. Real daemon, helper, proxy and agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.control.listening import WantedAddress
from hive.errors import ConfigError, DependencyDown, NotPermitted, TimedOut
from hive.proxy.api_wake import ANSWER_MAX_BYTES, ApiWake, api_wake
from hive.store.audit import Filter
from tests.control.box import AWAKE, Box
from tests.waiting import until

TOKEN = "0123456789abcdef-of-the-test"
LIST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def asked(path: Path) -> tuple[int, Any]:
    """The answer that the agent at this socket gets from the proxy."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(LIST)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.fixture
async def asleep(box: Box, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An agent that sleeps, and a proxy that knows it and has lost its link."""
    monkeypatch.setenv("HIVE_INTERNAL_TOKEN", TOKEN)
    await box.start_helper()
    await box.start_daemon(AWAKE, api=WantedAddress("127.0.0.1", 0, move=False))
    port = box.services.health.view()["api"]["port"]
    monkeypatch.setenv("HIVE_API_URL", f"http://127.0.0.1:{port}/")
    await box.start_real_proxy()
    agent = await box.create()
    await box.pause(agent["id"], timeout_s=20, now=False, deep=False, actor="uid:0")
    assert box.daemon is not None
    box.daemon._proxy_link.stop()
    box.daemon._proxy_link.stop = lambda: None  # type: ignore[method-assign]  # it would, once more, at its end
    await until(lambda: not box.services.health.view()["proxy"]["connected"])
    return dict(agent)


async def test_a_request_of_a_sleeper_wakes_it_over_http(box: Box, asleep: dict[str, Any]) -> None:
    status, _ = await asked(box.paths.agent_socket(asleep["id"]))
    assert status == 200
    assert (await box.view("bob"))["status"] == "running"
    [row] = await box.audit(Filter(act="order.resume"))
    assert (row["actor"], row["origin"], row["target"]) == ("internal", "tcp:127.0.0.1", asleep["id"])


async def test_one_that_is_not_to_be_woken_is_503_by_what_it_is_and_asked_for_again(
    box: Box, asleep: dict[str, Any]
) -> None:
    await box.stop("bob", "uid:0")
    for _ in range(2):
        status, body = await asked(box.paths.agent_socket(asleep["id"]))
        assert (status, "the agent is stopped" in json.dumps(body)) == (503, True)
    rows = await box.audit(Filter(act="order.resume"))
    assert [row["outcome"] for row in rows] == ["wrong_state"] * 2, "by then it might have been started"


async def test_without_the_right_token_it_is_asked_for_and_not_woken(
    box: Box, asleep: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = ApiWake(f"http://127.0.0.1:{box.services.health.view()['api']['port']}", "hive_wrong")
    with pytest.raises(Exception, match="answers 401: this token is not known here"):
        await wake.wake(asleep["id"], within_s=10)
    assert (await box.view("bob"))["status"] == "paused"


# --- strictly ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def answering() -> AsyncIterator[Callable[[bytes], Any]]:
    """`await answering(answer)` is the address of a server that gives every caller this answer."""
    servers: list[asyncio.Server] = []
    writers: list[asyncio.StreamWriter] = []

    async def start(answer: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
            writer.write(answer)
            if answer:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    begun: list[asyncio.Server | asyncio.StreamWriter] = [*servers, *writers]
    for open_one in begun:
        open_one.close()
        with contextlib.suppress(OSError):
            await open_one.wait_closed()


def answer(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (answer("200 OK", b"<html>"), DependencyDown, "is no Hive"),
        (answer("200 OK", b'{"id":"a1"}'), DependencyDown, "is no Hive"),
        (answer("200 OK", b'{"id":"a1","status":"fine","generation":1}'), DependencyDown, "is no Hive"),
        (answer("200 OK", b'{"id":"b2","status":"running","generation":1}'), DependencyDown, "another agent"),
        (answer("302 Found", b"", "Location: http://127.0.0.1:9/\r\n"), DependencyDown, "answers with 302"),
        (answer("404 Not Found", b"<html>"), DependencyDown, "answers with 404"),
        (answer("403 Forbidden", b'{"code":"not_permitted","detail":"no"}'), NotPermitted, "answers 403: no"),
        (answer("200 OK", b" " * (ANSWER_MAX_BYTES + 1)), DependencyDown, "larger than"),
        (b"SSH-2.0-x\r\n", DependencyDown, "cannot be asked"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", DependencyDown, "cannot be asked"),
        (b"", TimedOut, "within 0.3 s"),
    ],
)
async def test_what_is_no_plain_answer_wakes_nobody(
    answering: Callable[[bytes], Any], said: bytes, error: type[Exception], words: str
) -> None:
    wake = ApiWake(await answering(said), TOKEN)
    with pytest.raises(error, match=words):
        await wake.wake("a1", within_s=0.3 if said == b"" else 10)


async def test_an_agent_that_is_not_known_there_is_told_as_removed(answering: Callable[[bytes], Any]) -> None:
    wake = ApiWake(await answering(answer("404 Not Found", b'{"code":"not_found","detail":"x"}')), TOKEN)
    assert (await wake.wake("a1", within_s=10)).status == "removed"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://a..b:3000"])
async def test_nobody_there_is_said_at_once(url: str) -> None:
    wake = ApiWake(url, TOKEN)
    with pytest.raises(DependencyDown, match="cannot be asked"):
        await wake.wake("a1", within_s=10)


async def test_what_is_in_the_environment_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = {"HIVE_API_URL": "http://127.0.0.1:3000"}
    assert api_wake({"HIVE_INTERNAL_TOKEN": TOKEN}) is None
    assert api_wake(url) is None
    assert "api_url_unused" in caplog.text
    handed = tmp_path / "internal-token"
    handed.write_text(TOKEN + "\n")
    for env in ({"HIVE_INTERNAL_TOKEN": TOKEN}, {"CREDENTIALS_DIRECTORY": str(tmp_path)}):
        wake = api_wake(url | env)
        assert wake is not None
        assert TOKEN not in repr(wake)
    with pytest.raises(ConfigError, match="names no host"):
        api_wake({"HIVE_API_URL": "http:///x", "HIVE_INTERNAL_TOKEN": TOKEN})
    for given in ("127.0.0.1:3000", "ftp://127.0.0.1", "http://[::1", "http://x:port"):
        with pytest.raises(ConfigError, match=r"HIVE_API_URL (names no host|is no address)"):
            api_wake({"HIVE_API_URL": given, "HIVE_INTERNAL_TOKEN": TOKEN})
    with pytest.raises(ConfigError, match="is no token"):
        api_wake(url | {"HIVE_INTERNAL_TOKEN": "tökén"})
