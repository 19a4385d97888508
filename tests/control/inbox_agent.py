"""An agent that takes messages: POST at any path is written to `inbox.jsonl` in its home, as a line of JSON.

Its home steers it: `status` holds the status it answers with (204 without it); while `hold` exists it does not answer;
`kill` holds the pid of a process that it kills after the message was written and before it is answered.
"""

import json
import os
import signal
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Inbox(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = int(Path("status").read_text()) if Path("status").exists() else 204
        line = {"path": self.path, "key": self.headers["Idempotency-Key"], "type": self.headers["Content-Type"]}
        line |= {"token": self.headers["X-Hive-Token"], "status": status, "message": json.loads(body)}
        with Path("inbox.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with suppress(FileNotFoundError):
            os.kill(int(Path("kill").read_text()), signal.SIGKILL)
            Path("kill").unlink()
        while Path("hold").exists():
            time.sleep(0.01)
        told = b"" if status == 204 else b"not this one"
        self.send_response(status)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Inbox).serve_forever()
