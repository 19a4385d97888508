"""An agent in a container with a network: it answers `GET /` with how often it was asked, and takes messages."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Callers(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Callers.asked += 1
        self.answer(f"{Callers.asked}".encode())

    def do_POST(self) -> None:
        say(message=self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(address: str, callers: type[Callers]) -> None:
    server = ThreadingHTTPServer((address, int(os.environ["HIVE_AGENT_PORT"])), callers)
    say(ready=True)
    server.serve_forever()


if __name__ == "__main__":
    serve("0.0.0.0", Callers)
