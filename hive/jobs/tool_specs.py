"""The tools that an order of a job names, and where each runs: always inside an agent. Pure.

No entry leads anywhere else: there are no addresses of other machines in it and no command of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hive.errors import BadRequest
from hive.jobs.tools import NAME, ToolDefinition, read_definition

SPECS_MAX = 128
"""Entries of one order."""
SERVERS_MAX = 8
"""MCP servers of one order; each is a program or a session that is open as long as the job runs."""
WORDS_MAX, WORD_MAX_BYTES = 64, 4096
PREFIX_MAX = 32
PATH_MAX = 512
FORMS = (
    '{"type": "function", "agent": NAME, "function": {"name": ..., "parameters": ...}}'
    ' or {"type": "mcp", "agent": NAME, "command": [PROGRAM, ...] or "path": "/mcp"}'
)


class FunctionSpec(msgspec.Struct, frozen=True):
    """A tool that an agent answers at `/tools/NAME`. `agent`: its name or id, as the order has it."""

    agent: str
    definition: ToolDefinition


class McpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An MCP server of an agent: the program `command`, run inside it and spoken to over its stdin and stdout, or what
    it serves at `path` of its port (streamable HTTP).

    `names`: the tools of it that the model gets, as the server calls them; None: all. `prefix`: goes in front of each.
    """

    agent: str
    command: tuple[str, ...] = ()
    path: str = ""
    names: tuple[str, ...] | None = None
    prefix: str = ""

    @property
    def title(self) -> str:
        """For messages.

        >>> McpSpec(agent="scribe", command=("python3", "-m", "mcp_server_time")).title
        'the MCP server python3 of agent scribe'
        """
        what = self.command[0].rpartition("/")[2] if self.command else self.path
        return f"the MCP server {what[:64]} of agent {self.agent}"


ToolSpec = FunctionSpec | McpSpec


def read_tool_specs(entries: Sequence[Any]) -> tuple[ToolSpec, ...]:
    """The `tools` of an order. Raises BadRequest that says which entry is wrong, and how.

    >>> read_tool_specs([{"type": "mcp", "agent": "scribe", "path": "/mcp", "prefix": "s_"}])[0].title
    'the MCP server /mcp of agent scribe'
    >>> read_tool_specs([{"type": "mcp", "agent": "scribe", "url": "http://elsewhere"}])
    Traceback (most recent call last):
    hive.errors.BadRequest: tools[0]: there is no "url"; an MCP server has a "command" or a "path"
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise BadRequest(f"tools is a list of {FORMS}")
    if len(entries) > SPECS_MAX:
        raise BadRequest(f"tools has {len(entries)} entries: at most {SPECS_MAX}")
    found = tuple(_spec(entry, f"tools[{number}]") for number, entry in enumerate(entries))
    if (servers := sum(isinstance(one, McpSpec) for one in found)) > SERVERS_MAX:
        raise BadRequest(f"tools has {servers} MCP servers: at most {SERVERS_MAX}")
    names = [one.definition.name for one in found if isinstance(one, FunctionSpec)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadRequest(f"there are two tools of the name {', '.join(twice)}")
    return found


def agents_of(specs: Iterable[ToolSpec]) -> tuple[str, ...]:
    """The agents that they name, each once."""
    return tuple(dict.fromkeys(one.agent for one in specs))


def commands_of(specs: Iterable[ToolSpec]) -> frozenset[tuple[str, tuple[str, ...]]]:
    """The programs that may be run for a job, each with the agent that it is run in."""
    return frozenset((one.agent, one.command) for one in specs if isinstance(one, McpSpec) and one.command)


def _spec(entry: Any, place: str) -> ToolSpec:
    if not isinstance(entry, Mapping) or entry.get("type") not in ("function", "mcp"):
        raise BadRequest(f"{place}: a tool is {FORMS}")
    agent = entry.get("agent")
    if not isinstance(agent, str) or not agent or "/" in agent or not agent.isprintable() or len(agent) > 128:
        raise BadRequest(f'{place}: "agent" names the agent that runs it')
    return _function(entry, agent, place) if entry["type"] == "function" else _mcp(entry, agent, place)


def _function(entry: Mapping[str, Any], agent: str, place: str) -> FunctionSpec:
    if others := entry.keys() - {"type", "agent", "function"}:
        raise BadRequest(f'{place}: there is no "{min(others)}"; a function has a "function" and an "agent"')
    try:
        return FunctionSpec(agent, read_definition({"type": "function", "function": entry.get("function")}))
    except BadRequest as error:
        raise BadRequest(f"{place}: {error.message}") from None


def _mcp(entry: Mapping[str, Any], agent: str, place: str) -> McpSpec:
    if others := entry.keys() - {"type", "agent", "command", "path", "names", "prefix"}:
        raise BadRequest(f'{place}: there is no "{min(others)}"; an MCP server has a "command" or a "path"')
    if ("command" in entry) == ("path" in entry):
        raise BadRequest(f'{place}: an MCP server has either a "command" or a "path"')
    command = _words(entry["command"], place) if "command" in entry else ()
    path = _path(entry["path"], place) if "path" in entry else ""
    names, prefix = entry.get("names"), entry.get("prefix", "")
    if names is not None and not _is_texts(names):
        raise BadRequest(f'{place}: "names" is a list of tools of that server')
    if not isinstance(prefix, str) or len(prefix) > PREFIX_MAX or (prefix and not NAME.fullmatch(prefix)):
        raise BadRequest(f'{place}: "prefix" has up to {PREFIX_MAX} letters, digits, _ and -')
    return McpSpec(
        agent=agent, command=command, path=path, names=None if names is None else tuple(names), prefix=prefix
    )


def _words(found: Any, place: str) -> tuple[str, ...]:
    if not _is_texts(found) or not found or not found[0]:
        raise BadRequest(f'{place}: "command" is a list: a program, and its arguments')
    if len(found) > WORDS_MAX or any(len(word.encode(errors="replace")) > WORD_MAX_BYTES for word in found):
        raise BadRequest(f'{place}: "command" has up to {WORDS_MAX} words of up to {WORD_MAX_BYTES} bytes')
    if any("\0" in word for word in found):
        raise BadRequest(f'{place}: "command" has a NUL')
    return tuple(found)


def _path(found: Any, place: str) -> str:
    """A path of the agent's own port. `..`, `?` and what a URL would write otherwise are refused, not mended."""
    if (
        not isinstance(found, str)
        or not found.startswith("/")
        or len(found) > PATH_MAX
        or not all(character.isascii() and (character.isalnum() or character in "/-._~") for character in found)
        or any(part in (".", "..") or part == "" for part in found[1:].split("/")[:-1])
        or found.endswith(("/.", "/.."))
        or found.startswith(("/.hive/", "/t/"))
    ):
        raise BadRequest(f'{place}: "path" is a path at the agent\'s port, as /mcp')
    return found


def _is_texts(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(isinstance(one, str) for one in found)
