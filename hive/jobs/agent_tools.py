"""Tools that agents answer themselves: `POST /tools/NAME` through ingress, which wakes the agent for it.

The arguments are the body, a JSON object; the answer's body is the result, text or JSON as it is. A result is data for
the model: nothing in it is looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hive.host.http_call import HttpCall
from hive.http_answer import CallFailed
from hive.jobs.access import JobAccess
from hive.jobs.running import Tool, ToolFailed, cut
from hive.jobs.tool_specs import FunctionSpec

ACCEPT = {"Accept": "application/json, text/plain, */*"}
TOLD_BYTES = 2000
"""Of an answer that is an error."""


class AgentTool:
    """One tool of one agent. An answer longer than a result may be is not read to its end."""

    def __init__(self, agent: str, access: JobAccess) -> None:
        self.agent = agent
        self._access = access

    def __repr__(self) -> str:
        return f"<AgentTool {self.agent}>"

    async def run(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:
        target, body = f"/agents/{self.agent}/tools/{name}", msgspec.json.encode(arguments)
        try:
            async with self._access.asking("POST", target, body, ACCEPT) as call:
                status = await call.status()
                content = await _read(call, max_bytes if status < 300 else TOLD_BYTES)
        except (OSError, CallFailed) as error:
            raise ToolFailed(f"agent {self.agent} did not answer: {error}") from None
        text = content.decode(errors="replace")
        if status < 300:
            return text
        raise ToolFailed(f"{self._why(name, status)}: {cut(_told(text), TOLD_BYTES)}")

    def _why(self, name: str, status: int) -> str:
        if status in (404, 405, 501):
            return f"agent {self.agent} has no tool {name} ({status})"
        return f"agent {self.agent} answered {status}"


def agent_tool(spec: FunctionSpec, access: JobAccess) -> Tool:
    """The tool that an order names."""
    return Tool(spec.definition, AgentTool(spec.agent, access))


async def _read(call: HttpCall, limit: int) -> bytes:
    """The body, or a little more of it than `limit` bytes."""
    content = bytearray()
    async for piece in call.pieces():
        content += piece
        if len(content) > limit:
            break
    return bytes(content[: limit + 4])  # what cuts it off shall see that there was more


def _told(text: str) -> str:
    """The sentence of an error in Hive's or OpenAI's form; else the text.

    >>> _told('{"error": {"message": "no place came free"}}'), _told("oops")
    ('no place came free', 'oops')
    """
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text.strip() or "no words"
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else text
