"""The tools of a job, ready to be called: opened at its begin, closed at its end."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hive.errors import BadRequest, NotSupported
from hive.jobs.access import JobAccess
from hive.jobs.agent_tools import agent_tool
from hive.jobs.running import Tool, ToolFailed
from hive.jobs.tool_specs import FunctionSpec, McpSpec, ToolSpec, read_tool_specs
from hive.jobs.tools import ToolTable
from hive.worker.dialogue import DialogueFailed

if TYPE_CHECKING:
    from types import ModuleType

OPEN_S = 30.0
"""For an MCP server to list its tools, from the begin of the job; its agent may have to be woken for it."""
TOOLS_UNAVAILABLE = "tools_unavailable"
"""Reason of a job that failed before its first turn, as its tools are not there."""
_lock = asyncio.Lock()

Close = Callable[[], Awaitable[None]]


class HasTools(Protocol):
    """An order, as far as this module looks at it."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...


def check_tools(entries: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """The tools of an order that may be begun. Raises BadRequest, NotSupported. Runs and imports nothing."""
    specs = read_tool_specs(entries)
    if any(isinstance(one, McpSpec) for one in specs) and not has_mcp():
        raise NotSupported(
            "this Hive was installed without the package mcp, so it speaks to no MCP server",
            hint="install it with the extra: pip install 'hive[mcp]'",
        )
    return specs


def has_mcp() -> bool:
    """Whether MCP servers can be spoken to here."""
    return all(importlib.util.find_spec(name) is not None for name in ("mcp", "mcp_types"))


async def open_tools(order: HasTools, access: JobAccess, *, open_s: float = OPEN_S) -> tuple[list[Tool], Close]:
    """The tools that an order names, and what closes them, which raises nothing and is called once.

    Raises DialogueFailed (`tools_unavailable`) where one is not there; nothing is left open then.
    """
    specs = read_tool_specs(order.tools)
    tools = [agent_tool(one, access) for one in specs if isinstance(one, FunctionSpec)]
    wanted = [one for one in specs if isinstance(one, McpSpec)]
    if not wanted:
        return tools, _nothing
    mcp = await _mcp_tools()
    servers = [mcp.mcp_server(spec, access, open_s=open_s) for spec in wanted]

    async def close() -> None:
        await mcp.close_all(servers)

    try:
        found = await asyncio.gather(*map(mcp.tools_of, servers, wanted))
        tools += [tool for some in found for tool in some]
        ToolTable([tool.definition for tool in tools])
    except (ToolFailed, BadRequest) as error:
        await close()
        raise DialogueFailed(TOOLS_UNAVAILABLE, str(error)) from None
    except BaseException:
        await close()
        raise
    return tools, close


async def _mcp_tools() -> ModuleType:
    """The module that speaks MCP. Imported in a thread: it takes a second, and other jobs go on."""
    if not has_mcp():
        raise DialogueFailed(TOOLS_UNAVAILABLE, "the package mcp is not installed here: pip install 'hive[mcp]'")
    async with _lock:
        return await asyncio.to_thread(importlib.import_module, "hive.jobs.mcp_tools")


async def _nothing() -> None:
    """Closes nothing."""
