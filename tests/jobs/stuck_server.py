"""An MCP server over HTTP whose tool never answers, and which never lets a session go. Run with a port."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FOR_EVER_S = 600
TOOLS = [{"name": "hang", "description": "d", "inputSchema": {"type": "object"}}]


class Stuck(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_DELETE(self) -> None:
        time.sleep(FOR_EVER_S)

    def do_GET(self) -> None:
        self.send_error(405)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if asked.get("method") == "tools/call":
            time.sleep(FOR_EVER_S)
        if "id" not in asked:
            self._answer(202, b"")
            return
        self._answer(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": self._result(asked)}).encode())

    def _result(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["method"] == "tools/list":
            return {"tools": TOOLS}
        version = asked.get("params", {}).get("protocolVersion", "2025-06-18")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Mcp-Session-Id", "s1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Stuck).serve_forever()
