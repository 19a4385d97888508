"""An agent in a container with a network: it answers `GET /` with how often it was asked, and takes messages."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def say(**fields):
    print(json.dumps(fields), flush=True)


class Callers(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Callers.asked += 1
        self.answer(f"{Callers.asked}".encode())

    def do_POST(self):
        say(message=self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(b"")

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve(address, callers):
    server = ThreadingHTTPServer((address, int(os.environ["HIVE_AGENT_PORT"])), callers)
    say(ready=True)
    server.serve_forever()


if __name__ == "__main__":
    serve("0.0.0.0", Callers)
