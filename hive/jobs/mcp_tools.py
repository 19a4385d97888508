"""Tools of MCP servers: what a server lists as definitions, and calls of them as results.

A session is opened at the begin of a job and closed with it. Where its server ends in between, the call at hand fails,
and the next one opens another; a server that goes on ending is given up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types as types
import msgspec
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

import hive
from hive.errors import BadRequest, HiveError
from hive.jobs.access import JobAccess
from hive.jobs.mcp_transports import ServerLog, http_through_ingress, stdio_inside
from hive.jobs.running import Tool, ToolFailed, named
from hive.jobs.tool_specs import McpSpec
from hive.jobs.tools import ToolDefinition, define
from hive.tasks import spawn

TOOLS_MAX = 128
"""Tools of one server; each is text that the model reads with every turn."""
PAGES_MAX = 16
DEFINITION_MAX_BYTES = 16 * 1024
DEFINITIONS_MAX_BYTES = 256 * 1024
DESCRIPTION_MAX = 4096
"""Characters; the rest is cut off."""
OPENED_MAX = 4
CLOSING_S = 5.0
_STRANGE = re.compile(r"[^A-Za-z0-9_-]")

Opening = Callable[[ServerLog], AbstractAsyncContextManager[Any]]


class McpServer:
    """One server of a job. `open` a transport to it; `open_s`: for a session to be there, and its list of tools."""

    def __init__(self, title: str, opening: Opening, *, open_s: float) -> None:
        self.title = title
        self._opening = opening
        self._open_s = open_s
        self._turn = asyncio.Lock()
        self._client: Client | None = None
        self._told = ServerLog()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opened = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<McpServer {self.title} {'open' if self._client else 'not open'}, opened {self._opened} times>"

    async def tools(self) -> list[types.Tool]:
        """All that it lists. Raises ToolFailed."""
        try:
            async with asyncio.timeout(self._open_s):
                client = await self._session()
                return await self._listed(client)
        except TimeoutError:
            await self._end_session()
            raise ToolFailed(f"{self.title} did not list its tools within {self._open_s:g} s") from None

    async def _listed(self, client: Client) -> list[types.Tool]:
        found: list[types.Tool] = []
        cursor: str | None = None
        try:
            for _ in range(PAGES_MAX):
                page = await client.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
                found += page.tools
                cursor = page.next_cursor
                if len(found) > TOOLS_MAX:
                    raise ToolFailed(f"{self.title} lists more than {TOOLS_MAX} tools")
                if cursor is None:
                    return found
        except MCPError as error:
            raise await self._failure(error, client) from None
        except ValidationError as error:
            raise ToolFailed(f"{self.title} lists something that is no list of tools: {_first(error)}") from None
        raise ToolFailed(f"{self.title} lists its tools on more than {PAGES_MAX} pages")

    async def call(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:
        """Text of the result. Raises ToolFailed, also where the server says that it is an error."""
        client = await self._session()
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
        try:
            # Not `call_tool`: that holds the result to the server's own schema with Python's `re`, which a pattern can
            # keep busy for hours.
            result = await client.session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
        except MCPError as error:
            raise await self._failure(error, client) from None
        except ValidationError as error:
            raise ToolFailed(f"{self.title} gave no result: {_first(error)}") from None
        text = text_of_result(result, max_bytes)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """Ends the session and its server. Raises nothing."""
        self._is_closed = True
        await self._end_session()

    # the session ------------------------------------------------------------------------------------------------------

    async def _session(self) -> Client:
        """The session, opened where there is none. Raises ToolFailed."""
        async with self._turn:
            if self._client is not None:
                return self._client
            if self._is_closed:
                raise ToolFailed(f"{self.title} is closed")
            if self._opened >= OPENED_MAX:
                raise ToolFailed(f"{self.title} has ended {self._opened} times and is not opened again: {self._why}")
            self._opened += 1
            self._told, self._stop = ServerLog(), asyncio.Event()
            ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._task = spawn(self._hold(ready, self._told, self._stop), name="an MCP session")
            try:
                async with asyncio.timeout(self._open_s):
                    self._client = await ready
            except TimeoutError:
                await self._ended()
                raise ToolFailed(f"{self.title} did not answer within {self._open_s:g} s; {self._why}") from None
            except HiveError as error:
                raise ToolFailed(f"{self.title} cannot be used: {error.message}") from None
            except Exception as error:
                raise ToolFailed(f"{self.title} cannot be used: {self._told.why or _deepest(error)}") from None
            except BaseException:
                await self._ended()
                raise
            self._told.why = ""  # what there was while it was agreed how to speak
            return self._client

    @property
    def _why(self) -> str:
        return self._told.why or "it says nothing"

    async def _hold(self, ready: asyncio.Future[Client], told: ServerLog, stop: asyncio.Event) -> None:
        """Has a session open until `stop`, all of it in this one task, as `anyio` wants it."""
        info = types.Implementation(name="hive", version=hive.__version__)
        client: Client | None = None
        try:
            async with Client(self._opening(told), cache=None, client_info=info) as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            elif not told.why:
                told.why = _deepest(error)
        finally:
            if self._client is client:
                self._client = None
            ready.cancel()

    async def _failure(self, error: MCPError, client: Client) -> ToolFailed:
        """Words for a call that failed; where its session is at an end, that is closed."""
        code, message = error.error.code, error.error.message
        is_over = code == types.CONNECTION_CLOSED or message == "Session terminated"
        if not is_over:
            why, self._told.why = self._told.why, ""
            return ToolFailed(f"{message}; {why}" if why else message)
        await self._end_session(client)
        more = "the next call opens it anew" if self._opened < OPENED_MAX else "it is not opened again"
        return ToolFailed(f"{self.title} is gone: {self._why}; {more}")

    async def _end_session(self, of: Client | None = None) -> None:
        """Ends it. `of`: only where it is this one still, as another call may have opened the next one."""
        async with self._turn:
            if of is None or self._client is of:
                await self._ended()

    async def _ended(self) -> None:
        task, self._task, client, self._client = self._task, None, self._client, None
        self._stop.set()
        if task is None:
            return
        if client is None:
            task.cancel()  # it is not open yet, and may never be
        await asyncio.wait([task], timeout=CLOSING_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CLOSING_S)


class McpTool:
    """One tool of a server. `agent`: whose that is; `name`: the server's own for it."""

    def __init__(self, server: McpServer, agent: str, name: str) -> None:
        self.agent = agent
        self._server = server
        self._name = name

    async def run(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:  # noqa: ARG002
        return await self._server.call(self._name, arguments, max_bytes=max_bytes)


def mcp_server(spec: McpSpec, access: JobAccess, *, open_s: float) -> McpServer:
    """The server that an order names, not opened yet."""

    def opening(told: ServerLog) -> AbstractAsyncContextManager[Any]:
        return stdio_inside(spec, access, told) if spec.command else http_through_ingress(spec, access, told)

    return McpServer(spec.title, opening, open_s=open_s)


async def tools_of(server: McpServer, spec: McpSpec) -> list[Tool]:
    """Those of its tools that the model gets. Raises ToolFailed for a server that lists none that can be used."""
    listed = await server.tools()
    return [Tool(definition, McpTool(server, spec.agent, name)) for name, definition in chosen(listed, spec)]


def chosen(listed: Iterable[types.Tool], spec: McpSpec) -> list[tuple[str, ToolDefinition]]:
    """The listed tools that an order wants, each with the server's name for it. Raises ToolFailed.

    What a name may not have for a model becomes `_`.

    >>> one = types.Tool(name="files/read", input_schema={"type": "object"})
    >>> [(name, tool.name) for name, tool in chosen([one], McpSpec(agent="a", path="/mcp", prefix="a_"))]
    [('files/read', 'a_files_read')]
    """
    by_name = {tool.name: tool for tool in listed}
    names = list(by_name) if spec.names is None else list(dict.fromkeys(spec.names))
    if missing := [name for name in names if name not in by_name]:
        raise ToolFailed(f"{spec.title} has no tool {missing[0][:64]}; it has: {', '.join(list(by_name)[:64])[:2000]}")
    found = [(name, _definition(by_name[name], spec)) for name in names]
    if sum(len(msgspec.json.encode(tool.raw)) for _, tool in found) > DEFINITIONS_MAX_BYTES:
        raise ToolFailed(
            f"{spec.title} describes its tools in more than {DEFINITIONS_MAX_BYTES} bytes; choose by names"
        )
    return found


def _definition(tool: types.Tool, spec: McpSpec) -> ToolDefinition:
    name = _STRANGE.sub("_", f"{spec.prefix}{tool.name}")[:64]
    try:
        found = define(name, (tool.description or tool.title or "")[:DESCRIPTION_MAX], tool.input_schema)
    except BadRequest as error:
        raise ToolFailed(f"{spec.title}: {error.message}") from None
    if len(msgspec.json.encode(found.raw)) > DEFINITION_MAX_BYTES:
        raise ToolFailed(f"{spec.title} describes {name} in more than {DEFINITION_MAX_BYTES} bytes")
    return found


def text_of_result(result: types.CallToolResult, max_bytes: int) -> str:
    """A result as the model reads it: its texts, one below the other; of what is no text, a word that it was there.

    >>> text_of_result(types.CallToolResult(content=[types.TextContent(text="a"), types.TextContent(text="b")]), 9)
    'a\\nb'
    >>> text_of_result(types.CallToolResult(content=[], structured_content={"n": 1}), 9)
    '{"n":1}'
    """
    parts: list[str] = []
    length = 0
    for block in result.content:
        parts.append(_text_of(block))
        length += len(parts[-1])
        if length > max_bytes:
            break
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


def _text_of(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"[{block.resource.uri}: no text, left out]"
        case types.ResourceLink():
            return f"[{block.uri}]"
        case _:
            return f"[{block.mime_type}: no text, left out]"


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[:1]
    return ": ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}" for one in found)[:300]


def _deepest(error: BaseException) -> str:
    """The cause in a group of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.message if isinstance(error, HiveError) else named(error)[:300]


async def close_all(servers: Iterable[McpServer]) -> None:
    """Closes each, whatever comes of the others."""
    await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)
