"""An agent with tools: `look` answers where the bees are, `fail` answers 500. What it was called with is its output."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Tools(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        called = self.rfile.read(int(self.headers["Content-Length"])).decode()
        print(json.dumps({"path": self.path, "called": called, "job": self.headers["X-Hive-Job"]}), flush=True)
        known = self.path == "/tools/look"
        body = b"the bees are over the meadow" if known else b"there is nobody"
        self.send_response(200 if known else 500)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Tools)
    print(json.dumps({"ready": True}), flush=True)
    server.serve_forever()
