"""MCP over HTTP where the other end is rude: a server on the socket that stands for the proxy's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.jobs.access import JobAccess
from hive.jobs.open_tools import open_tools
from hive.jobs.running import ToolFailed
from hive.worker.dialogue import DialogueFailed
from tests.jobs.local_programs import LocalPrograms
from tests.jobs.test_mcp_tools import order_with
from tests.listening import listening

ENTRY = {"type": "mcp", "agent": "scribe", "path": "/mcp"}
JSON = "application/json"


class RudeHttp:
    """Answers MCP's questions as it should, but calls of tools as `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.asked: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.fields: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            self.asked.append((method, path))
            self.fields.append(head.lower())
            lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length")]
            body = await reader.readexactly(int(lengths[0]) if lengths else 0)
            await self.answer(writer, json.loads(body or b"{}"))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        result: dict[str, Any] = {}
        match asked.get("method"):
            case "initialize":
                version = asked["params"]["protocolVersion"]
                info = {"name": "rude", "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
            case "tools/call":
                await self.call(writer, asked["id"])
                return
            case "notifications/initialized":
                self.say(writer, b"", status="202 Accepted")
                return
            case _:
                self.say(writer, b"", status="404 Not Found")
                return
        self.reply(writer, asked["id"], result)

    async def call(self, writer: asyncio.StreamWriter, id: int) -> None:
        good = {"content": [{"type": "text", "text": "ok"}]}
        match self.how:
            case "elsewhere":
                self.say(writer, b"", "Location: /agents/other/tools/x", status="307 No")
            case "far":
                self.say(writer, b"", "Location: http://elsewhere/mcp", status="307 No")
            case "refused":
                self.say(writer, b'{"error":{"message":"the agent is asleep"}}', status="503 No")
            case "session":
                self.say(writer, b"{}", status="404 Not Found")
            case "no-mcp":
                self.say(writer, b"<html>", kind="text/html")
            case "cut":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            case "flood" | "event-flood":
                kind = "text/event-stream" if self.how == "event-flood" else JSON
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
                while True:
                    writer.write(b"data: x\n\n" * 10_000)
                    await writer.drain()
            case "hangs-up":
                writer.transport.abort()
            case _:
                self.reply(writer, id, good)

    def reply(self, writer: asyncio.StreamWriter, id: int, result: dict[str, Any]) -> None:
        found = json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode()
        self.say(writer, found, "Mcp-Session-Id: s1")

    def say(
        self, writer: asyncio.StreamWriter, body: bytes, *fields: str, status: str = "200 OK", kind: str = JSON
    ) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *fields]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)


@asynccontextmanager
async def served(folder: Path, how: str) -> AsyncIterator[tuple[RudeHttp, JobAccess]]:
    rude = RudeHttp(how)
    socket = folder / "jobs.sock"
    async with listening(rude.serve, socket):
        yield rude, JobAccess("job1", socket, {"Authorization": "Bearer secret"}, LocalPrograms())


async def test_a_good_server_is_asked_with_the_jobs_token_and_never_for_its_own_stream(short_path: Path) -> None:
    async with served(short_path, "good") as (rude, access):
        tools, close = await open_tools(order_with(ENTRY), access)
        assert await tools[0].runner.run("t", {}, max_bytes=9) == "ok"
        await close()
    assert {path for _, path in rude.asked} == {"/agents/scribe/mcp"}
    assert {method for method, _ in rude.asked} == {"POST", "DELETE"}, "its session is ended, and no GET was made"
    assert all("authorization: bearer secret" in fields for fields in rude.fields)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("elsewhere", "it leads elsewhere: /agents/other/tools/x"),
        ("far", "edirect"),
        ("refused", "the agent is asleep"),
        ("session", "is gone"),
        ("no-mcp", "text/html"),
        ("cut", "the MCP server /mcp of agent scribe"),
        ("flood", "longer than 4194304 bytes"),
        ("event-flood", "Failed to parse SSE message"),
        ("hangs-up", "the MCP server /mcp of agent scribe"),
    ],
)
async def test_a_rude_answer_costs_its_call_alone(short_path: Path, how: str, words: str) -> None:
    async with served(short_path, how) as (rude, access):
        tools, close = await open_tools(order_with(ENTRY), access)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ToolFailed) as failed:
                    await tools[0].runner.run("t", {}, max_bytes=9)
            assert words in str(failed.value)
            rude.how = "good"
            assert await tools[0].runner.run("t", {}, max_bytes=9) == "ok"
        finally:
            await close()
    assert {path for _, path in rude.asked} == {"/agents/scribe/mcp"}


async def test_a_proxy_that_is_gone_is_named_and_the_next_call_finds_the_new_one(short_path: Path) -> None:
    async with served(short_path, "good") as (_, access):
        tools, close = await open_tools(order_with(ENTRY), access)
    (short_path / "jobs.sock").unlink(missing_ok=True)
    with pytest.raises(ToolFailed, match="is gone"):
        await tools[0].runner.run("t", {}, max_bytes=9)
    async with served(short_path, "good"):
        assert await tools[0].runner.run("t", {}, max_bytes=9) == "ok"
        await close()
    (short_path / "jobs.sock").unlink(missing_ok=True)
    with pytest.raises(DialogueFailed, match="cannot be used"):
        await open_tools(order_with(ENTRY), access)
