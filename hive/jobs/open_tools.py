"""The tools of a job, ready to be called: opened at its begin, closed at its end."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from hive.errors import BadRequest, NotSupported
from hive.jobs.access import JobAccess
from hive.jobs.agent_tools import agent_tool
from hive.jobs.mcp_extra import check_mcp
from hive.jobs.order import JobOrder
from hive.jobs.running import Tool, ToolFailed
from hive.jobs.tool_specs import FunctionSpec, McpSpec, read_tool_specs
from hive.jobs.tools import ToolTable
from hive.worker.dialogue import DialogueFailed

if TYPE_CHECKING:
    from types import ModuleType

OPEN_S = 30.0
"""For an MCP server to list its tools, from the begin of the job; its agent may have to be woken for it."""
TOOLS_UNAVAILABLE = "tools_unavailable"
"""Reason of a job that failed before its first turn, as its tools are not there."""

Close = Callable[[], Awaitable[None]]


async def open_tools(order: JobOrder, access: JobAccess, *, open_s: float = OPEN_S) -> tuple[list[Tool], Close]:
    """The tools that an order names, and what closes them, which raises nothing and is called once.

    Raises DialogueFailed (`tools_unavailable`) where one is not there; nothing is left open then.
    """
    specs = read_tool_specs(order.tools)
    tools = [agent_tool(one, access) for one in specs if isinstance(one, FunctionSpec)]
    wanted = [one for one in specs if isinstance(one, McpSpec)]
    if not wanted:
        return tools, _nothing
    mcp = await _mcp_tools(wanted)
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


async def _mcp_tools(specs: Sequence[McpSpec]) -> ModuleType:
    """The module that speaks MCP. Imported in a thread: it takes a second, and other jobs go on."""
    try:
        check_mcp(specs)
    except NotSupported as error:
        raise DialogueFailed(TOOLS_UNAVAILABLE, error.message) from None
    return await asyncio.to_thread(importlib.import_module, "hive.jobs.mcp_tools")


async def _nothing() -> None:
    """Closes nothing."""
