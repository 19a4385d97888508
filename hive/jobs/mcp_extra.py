"""Check for the package `mcp`, which comes with the extra of that name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from hive.errors import NotSupported
from hive.jobs.tool_specs import McpSpec, ToolSpec


def has_mcp() -> bool:
    """Imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in ("mcp", "mcp_types"))


def check_mcp(specs: Iterable[ToolSpec]) -> None:
    """Raises NotSupported for tools of MCP servers where nobody here speaks MCP."""
    if any(isinstance(one, McpSpec) for one in specs) and not has_mcp():
        raise NotSupported(
            "this Hive was installed without the package mcp, so its jobs speak to no MCP server",
            hint=f"it is Hive's extra of that name: {sys.executable} -m pip install 'mcp>=2.3,<3'",
        )
