"""An agent with tools of its own: `POST /tools/NAME` at the port that is its argument. The standard library alone."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Tools(BaseHTTPRequestHandler):
    """Has a method for each tool, by its name."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tool = getattr(self, f"tool_{self.path.removeprefix('/tools/')}", None)
        if tool is None:
            self.send_error(404)
        else:
            tool(asked)

    def answer(self, content: bytes, status: int = 200, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def tool_echo(self, asked: object) -> None:
        self.answer(json.dumps(asked).encode(), kind="application/json")

    def tool_fields(self, asked: object) -> None:
        """The request's own fields."""
        self.answer(json.dumps({name.lower(): value for name, value in self.headers.items()}).encode())

    def tool_pid(self, asked: object) -> None:
        self.answer(f"{os.getpid()} {os.geteuid()}".encode())

    def tool_fail(self, asked: object) -> None:
        self.answer(b'{"error": {"message": "the shelf is empty"}}', 500, "application/json")

    def tool_hang(self, asked: object) -> None:
        time.sleep(600)

    def tool_long(self, asked: object) -> None:
        self.answer(b"x" * 10_000_000)

    def tool_endless(self, asked: object) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + b"y" * 0x10000 + b"\r\n")

    def tool_cut(self, asked: object) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"half")
        self.close_connection = True

    def tool_die(self, asked: object) -> None:
        os._exit(3)

    def tool_bytes(self, asked: object) -> None:
        self.answer(b"\xff\x00\xfe")

    def tool_empty(self, asked: object) -> None:
        self.answer(b"", 204)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Tools).serve_forever()
