"""The tools of an order: what is one, and what is refused, each with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from hive.errors import BadRequest
from hive.jobs.tool_specs import FunctionSpec, McpSpec, agents_of, commands_of, read_tool_specs

MCP: dict[str, Any] = {"type": "mcp", "agent": "scribe", "path": "/mcp"}
FUNCTION: dict[str, Any] = {"type": "function", "agent": "scribe", "function": {"name": "look"}}
RUN: dict[str, Any] = {"type": "mcp", "agent": "scribe", "command": ["python3", "-m", "server"]}


def test_an_entry_says_what_runs_where() -> None:
    function, served, run = read_tool_specs([FUNCTION, {**MCP, "prefix": "s_", "names": ["a"]}, RUN])
    assert isinstance(function, FunctionSpec)
    assert (function.agent, function.definition.name) == ("scribe", "look")
    assert served == McpSpec(agent="scribe", path="/mcp", names=("a",), prefix="s_")
    assert run == McpSpec(agent="scribe", command=("python3", "-m", "server"))
    assert agents_of([function, served, run]) == ("scribe",)
    assert commands_of([function, served, run]) == {("scribe", ("python3", "-m", "server"))}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("look", "a tool is"),
        ({"type": "web_search"}, "a tool is"),
        ({**FUNCTION, "agent": ""}, '"agent" names'),
        ({**FUNCTION, "agent": "a/b"}, '"agent" names'),
        ({**FUNCTION, "agent": 3}, '"agent" names'),
        ({**FUNCTION, "command": ["sh"]}, 'there is no "command"'),
        ({**FUNCTION, "function": {"name": "no such name"}}, "tools[0]: tool name"),
        ({**FUNCTION, "function": None}, "tools[0]: a tool is"),
        ({**MCP, "url": "http://elsewhere"}, 'there is no "url"'),
        ({**MCP, "command": ["sh"]}, 'either a "command" or a "path"'),
        ({"type": "mcp", "agent": "scribe"}, 'either a "command" or a "path"'),
        ({**RUN, "command": "sh -c id"}, '"command" is a list'),
        ({**RUN, "command": []}, '"command" is a list'),
        ({**RUN, "command": [""]}, '"command" is a list'),
        ({**RUN, "command": ["a\0b"]}, "NUL"),
        ({**RUN, "command": ["a", 3]}, '"command" is a list'),
        ({**RUN, "command": ["a"] * 100}, "up to 64 words"),
        ({**RUN, "command": ["a" * 5000]}, "up to 64 words"),
        *(
            ({**MCP, "path": path}, '"path" is a path')
            for path in (
                "mcp",
                "//other/",
                "/../other",
                "/a/../../b",
                "/a/..",
                "/mcp?x=1",
                "/m cp",
                "/%2e%2e/x",
                "/\r\n",
            )
        ),
        *(({**MCP, "path": path}, '"path" is a path') for path in ("/.hive/state", "/t/token/x", 3, "/" + "a" * 600)),
        ({**MCP, "names": "a"}, '"names" is a list'),
        ({**MCP, "names": [3]}, '"names" is a list'),
        ({**MCP, "prefix": "a b"}, '"prefix" has'),
        ({**MCP, "prefix": "a" * 40}, '"prefix" has'),
    ],
    ids=str,
)
def test_what_is_no_tool_is_refused_with_its_place(entry: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_tool_specs([entry])
    assert refused.value.message.startswith("tools[0]: ")
    assert words in refused.value.message


def test_an_order_has_so_many_tools_at_most() -> None:
    for entries, words in (
        ([FUNCTION] * 200, "at most 128"),
        ([MCP] * 9, "at most 8"),
        ([FUNCTION, FUNCTION], "two tools of the name look"),
        ("look", "tools is a list"),
    ):
        with pytest.raises(BadRequest, match=words):
            read_tool_specs(entries)
