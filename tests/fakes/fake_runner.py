#!/usr/bin/env python3
"""Stands in for `hive-runner whisper`: takes whole forms at a unix socket and answers recorded bytes at once.

    fake_runner.py whisper --socket PATH --name NAME [--wait-s SECONDS] [--more …]

It knows no sound: its answer has the SHA-256 of the file and the text fields as it got them, beside a fixed text. The
fields' own words: `prompt` = `wait N` takes so long, `crash` ends it by SIGKILL amid its answer.
Standard library alone. Other flags of the real one are passed over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import socket
import threading
import time

FORM = re.compile(rb"content-type: multipart/form-data; boundary=(\S+)", re.IGNORECASE)
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
NAME = re.compile(rb'name="([^"]*)"')


def said(body: bytes, *, status: bytes = b"200 OK", fields: bytes = b"", kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status,
        kind,
        fields,
        len(body),
        body,
    )


class Runner:
    """One stand-in; `name`: its model."""

    def __init__(self, name: str, wait_s: float) -> None:
        self._name = name
        self._wait_s = wait_s

    def serve(self, connection: socket.socket) -> None:
        with connection:
            data = bytearray()
            while self._one(connection, data):
                pass

    def _one(self, connection: socket.socket, data: bytearray) -> bool:
        while (end := data.find(b"\r\n\r\n")) < 0:
            if not (more := connection.recv(65536)):
                return False
            data += more
        head = bytes(data[:end])
        del data[: end + 4]
        length = LENGTH.search(head)
        wanted = int(length[1]) if length else 0
        while len(data) < wanted:
            if not (more := connection.recv(262144)):
                return False
            data += more
        body = bytes(data[:wanted])
        del data[:wanted]
        self._answer(connection, head, body)
        return True

    def _answer(self, connection: socket.socket, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/health":
            connection.sendall(said(b'{"runner":"whisper","version":"stand-in","status":"ok"}'))
        elif path == b"/v1/models":
            row = {"id": self._name, "object": "model", "owned_by": "tests", "created": 1, "size_bytes": 1}
            connection.sendall(said(json.dumps({"object": "list", "data": [row]}).encode()))
        elif path == b"/metrics":
            connection.sendall(said(b"hive_runner_places 1\nhive_runner_waiting 0\n", kind=b"text/plain"))
        elif form := FORM.search(head):
            self._hear(connection, form[1], body)
        else:
            connection.sendall(said(b'{"error":{"message":"no"}}', status=b"404 Not Found"))

    def _hear(self, connection: socket.socket, boundary: bytes, body: bytes) -> None:
        texts: dict[str, str] = {}
        file = b""
        for piece in body.split(b"--" + boundary)[1:-1]:
            about, _, value = piece[2:].partition(b"\r\n\r\n")
            name = NAME.search(about)
            if name is not None and name[1] == b"file":
                file = value[:-2]
            elif name is not None:
                texts[name[1].decode()] = value[:-2].decode()
        word, _, rest = texts.get("prompt", "").partition(" ")
        time.sleep(float(rest) if word == "wait" else self._wait_s)
        answer = {"text": "the quick brown fox", "sha256": hashlib.sha256(file).hexdigest(), "fields": texts}
        whole = said(json.dumps(answer).encode(), fields=b"x-hive-cost: audio_s=6.020\r\n")
        if word == "crash":
            connection.sendall(whole[:-20])
            os.kill(os.getpid(), signal.SIGKILL)
        connection.sendall(whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--name", default="whisper")
    parser.add_argument("--wait-s", type=float, default=0.0)
    arguments, _ = parser.parse_known_args()
    runner = Runner(arguments.name, arguments.wait_s)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(arguments.socket)
        listening.listen(64)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=runner.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
