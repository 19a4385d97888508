"""An agent with a network of its own, or a filtered one: `GET /` counts, a WebSocket echoes, `POST /` tries what it is
told to reach and asks the model in the way any SDK would."""

import base64
import hashlib
import json
import os
import socket
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def reach(where: str) -> str:
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 0.5).close()
    except OSError as error:
        return type(error).__name__
    return "reached"


def chat() -> object:
    """By what its environment says, and nothing else."""
    body = {"model": os.environ.get("HIVE_MODEL", "m"), "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return json.load(answer)["usage"]["completion_tokens"]
    except (OSError, urllib.error.URLError) as error:
        return str(error)


class Callers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        if self.headers.get("Upgrade", "").lower() == "websocket":
            self.echo()
            return
        Callers.asked += 1
        self.answer(str(Callers.asked))

    def do_POST(self) -> None:
        places = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(json.dumps({"reached": {where: reach(where) for where in places}, "tokens": chat()}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def echo(self) -> None:
        """Sends back what comes, as it came; frames are not looked at."""
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + GUID).encode()).digest()).decode()
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\n\r\n"
        )
        self.wfile.flush()
        while data := self.connection.recv(4096):
            self.connection.sendall(data)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Callers)
print(json.dumps({"ready": True}), flush=True)
server.serve_forever()
