"""Two ways to an MCP server of an agent: the stdin and stdout of a program inside it, and HTTP through ingress.

This module and `mcp_tools` import the package `mcp` (0.9 s of CPU, 57 MB): only the process of jobs does, and only for
an order that names an MCP server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types.jsonrpc import jsonrpc_message_adapter

from hive.errors import HiveError
from hive.jobs.access import JobAccess
from hive.jobs.inside_streams import InsideStreams
from hive.jobs.mcp_lines import MESSAGE_MAX_BYTES, TOO_LONG, UNREADABLE, Flooded, MessageId, MessageSieve, Sifted
from hive.jobs.tool_specs import McpSpec

ORIGIN = "http://127.0.0.1:1"
"""The server sees it as `Host`. MCP servers refuse all but their own machine with a port (DNS rebinding)."""
GRACE_S = 1.0
"""For a server to end by itself, once its stdin has."""
TOLD_BYTES = 500
ROOM_BYTES = 64 * 1024 * 1024
"""Messages of all servers together that are not whole yet."""
OWN_BYTES = 256 * 1024
"""Of them, what each server may have whatever the others do."""

for name in ("mcp", "client"):  # the package's loggers: their lines hold what servers write
    logging.getLogger(name).setLevel(logging.CRITICAL)

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


class ServerLog:
    """Notes on why a server fails. `why`: empty while nothing is."""

    def __init__(self) -> None:
        self.why = ""


class MessageRoom:
    """Bytes of unfinished messages, of all servers that share it."""

    def __init__(self, limit: int = ROOM_BYTES) -> None:
        self._limit = limit
        self._held: dict[object, int] = {}

    def __repr__(self) -> str:
        return f"<MessageRoom {sum(self._held.values())} of {self._limit} B>"

    def hold(self, whose: object, size: int) -> bool:
        """Whether `whose` may keep so much."""
        self._held[whose] = size
        return size <= OWN_BYTES or sum(self._held.values()) <= self._limit

    def leave(self, whose: object) -> None:
        self._held.pop(whose, None)


ROOM = MessageRoom()


@contextlib.asynccontextmanager
async def stdio_inside(
    spec: McpSpec, access: JobAccess, told: ServerLog, room: MessageRoom = ROOM
) -> AsyncIterator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    """Runs the server inside its agent; at the end it is killed with all that it started. Raises HiveError."""
    program = await access.programs.begin(spec.agent, spec.command)
    streams = InsideStreams(program)
    sieve = MessageSieve()
    incoming, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    is_over, has_spoken = anyio.Event(), anyio.Event()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_listen, streams, sieve, incoming, told, room, is_over)
            group.start_soon(_speak, streams, sieve, outgoing, incoming, has_spoken)
            try:
                yield from_server, to_server
            finally:
                from_server.close()
                to_server.close()
                with anyio.move_on_after(GRACE_S, shield=True):
                    await has_spoken.wait()
                    streams.end_input()
                    await is_over.wait()
                group.cancel_scope.cancel()
    finally:
        incoming.close()
        outgoing.close()
        room.leave(sieve)
        with anyio.CancelScope(shield=True):
            await streams.close()
            await access.programs.end(program.run)


async def _listen(
    streams: InsideStreams,
    sieve: MessageSieve,
    incoming: Incoming,
    told: ServerLog,
    room: MessageRoom,
    is_over: anyio.Event,
) -> None:
    """Its messages to the session; the end of them is the end of the session."""
    async with incoming:
        try:
            async for data in streams.output():
                for sifted in sieve.feed(data):
                    await _deliver(incoming, sifted)
                if not room.hold(sieve, sieve.held):
                    sieve.give_up()
            told.why = "it ended"
        except (Flooded, HiveError) as error:
            told.why = str(error)
        finally:
            is_over.set()
        if words := streams.last_words:
            told.why += f"; its last words: {words}"


async def _deliver(incoming: Incoming, sifted: Sifted) -> None:
    """Hands a message to the session; one that is closed takes none, and its server's last words are of no use."""
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await incoming.send(_message(sifted))


def _message(sifted: Sifted) -> SessionMessage:
    if sifted.fault:
        return _fault(sifted.id, sifted.fault)
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(sifted.message, by_name=False))
    except ValueError:
        return _fault(sifted.id, UNREADABLE)


def _fault(id: MessageId | None, why: str) -> SessionMessage:
    return SessionMessage(
        types.JSONRPCError(jsonrpc="2.0", id=id, error=types.ErrorData(code=types.INTERNAL_ERROR, message=why))
    )


async def _speak(
    streams: InsideStreams, sieve: MessageSieve, outgoing: Outgoing, incoming: Incoming, has_spoken: anyio.Event
) -> None:
    try:
        async for said in outgoing:
            if isinstance(said.message, types.JSONRPCRequest):
                sieve.asked(said.message.id)
            line = said.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            if not await streams.write(line):
                break
    finally:
        has_spoken.set()
    incoming.close()  # else the session would wait for an answer for ever


# HTTP -----------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def http_through_ingress(spec: McpSpec, access: JobAccess, told: ServerLog) -> AsyncIterator[tuple[Any, Any]]:
    """A session with what the agent serves at its port. The agent may sleep between two questions."""
    below = f"/agents/{spec.agent}/"
    own = _OwnAgentOnly(httpx2.AsyncHTTPTransport(uds=str(access.socket)), below, told)
    fields = {**access.fields, "Connection": "close"}
    async with (
        httpx2.AsyncClient(transport=own, headers=fields, timeout=None, trust_env=False) as client,
        streamable_http_client(f"{ORIGIN}/agents/{spec.agent}{spec.path}", http_client=client) as streams,
    ):
        yield streams


class _OwnAgentOnly(httpx2.AsyncBaseTransport):
    """Asks this one agent, wherever an answer of its may want to lead; reads no more of an answer than is of use.

    The stream that a server may have open for its own messages (GET) is refused here: it would keep the agent awake.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport, below: str, told: ServerLog) -> None:
        self._inner = inner
        self._below = below
        self._told = told

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.startswith(self._below) or "/../" in request.url.path:
            self._told.why = f"it leads elsewhere: {request.url.path[:200]}"
            return httpx2.Response(403, request=request)
        if request.method == "GET":
            return httpx2.Response(405, request=request)
        response = await self._inner.handle_async_request(request)
        if response.status_code >= 400 and isinstance(response.stream, httpx2.AsyncByteStream):
            return await self._refused(response)
        if isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Bounded(response.stream, self._told)
        return response

    async def _refused(self, response: httpx2.Response) -> httpx2.Response:
        """The same refusal, read; its words are told if the session fails by it."""
        content = bytearray()
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        async for piece in response.stream:
            content += piece
            if len(content) > MESSAGE_MAX_BYTES:
                break
        await response.stream.aclose()
        words = bytes(content[:TOLD_BYTES]).decode(errors="replace").strip()
        self._told.why = f"it answered {response.status_code}: {words}"
        fields = [(name, value) for name, value in response.headers.raw if name.lower() == b"content-type"]
        return httpx2.Response(response.status_code, headers=fields, content=bytes(content))

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    """The body of one answer, as far as MESSAGE_MAX_BYTES."""

    def __init__(self, inner: httpx2.AsyncByteStream, told: ServerLog) -> None:
        self._inner = inner
        self._told = told

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._inner:
            size += len(piece)
            if size > MESSAGE_MAX_BYTES:
                self._told.why = TOO_LONG
                raise httpx2.StreamError(TOO_LONG)
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()
