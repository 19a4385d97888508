"""An agent with a heap that is worth paging out; it answers `GET /` and takes messages. Argument: MiB of it."""

import json
import os
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def say(**fields):
    print(json.dumps(fields), flush=True)


class Callers(BaseHTTPRequestHandler):
    heap = ()

    def do_GET(self):
        self.answer(f"{len(self.heap)}\n".encode())

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


def main():
    chance = random.Random(0)
    # Half of it is noise: what real agents have in memory zram makes a third to a half of.
    Callers.heap = [chance.randbytes(512) + bytes(512) for _ in range(int(sys.argv[1]) * 1024)]
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Callers)
    say(ready=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
