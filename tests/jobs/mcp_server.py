"""An MCP server made with the package's own class, for jobs: over its stdin and stdout, or with `--port` over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import mcp_types as types
from mcp.server.mcpserver import MCPServer

server = MCPServer("for tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def say(text: str) -> str:
    """Say it again."""
    return text


@server.tool()
def pid() -> str:
    """The server's process, and what it may."""
    return f"{os.getpid()} {os.geteuid()} {os.getcwd()}"


@server.tool()
def long(size: int) -> str:
    """A long text."""
    return "x" * size


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it cannot be done")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """End at once."""
    print("I am dying", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def flood() -> str:
    """Write what nobody asked for, without an end."""
    line = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}\n' * 100
    while True:
        os.write(1, line)


@server.tool()
def endless() -> str:
    """Write a line without an end."""
    while True:
        os.write(1, b"x" * 65536)


@server.tool()
def picture() -> types.ImageContent:
    """A picture."""
    return types.ImageContent(data="aGk=", mime_type="image/png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--stateless", action="store_true")
    given = parser.parse_args()
    if given.port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=given.port, stateless_http=given.stateless)


if __name__ == "__main__":
    main()
