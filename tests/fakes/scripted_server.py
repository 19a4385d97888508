#!/usr/bin/env python3
"""An inference server that does what a request's first message of the user says. The standard library alone: it starts
at once.

    scripted_server.py --socket PATH [--pids FILE] [--child HOW]… [--ignore-term] [--crash-at-start] [--chatter BYTES]
                       [--wait-for FIFO] [--asked FILE]

Words of a message, carried out in order: `head SECONDS` (before the head), `wait SECONDS`, `data N`, `every SECONDS`
(between two of them), `text TEXT`, `pings SECONDS` (comments each 50 ms), `burn SECONDS` (of CPU), `eat MIB` (of
memory), `error`, `status N`, `cut`, `crash N`, `stop` (SIGSTOP to itself), `leave` (its socket is gone, it lives on),
`whole` (end marker), `call NAME=ARGUMENTS` (of a tool, in pieces), `think TEXT`, `white N` (characters of white space),
`finish REASON`. A `|` stands between two turns: the n-th is carried out when n answers are in the messages. `--child
HOW`: one process beside it that ignores SIGTERM: `fork`, `titled` (it writes over its environment, as vLLM's do),
`setsid` or `double`. `--wait-for`: it listens once there is something to read. All pids go to FILE, all bodies to the
FILE of `--asked`, one a line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


class Gone(Exception):
    """The request has ended, whole or not."""


class Script:
    """One request that is carried out."""

    def __init__(self, connection: socket.socket, path: str) -> None:
        self._connection = connection
        self._path = path
        self._is_headed = False
        self._every_s = 0.0
        self._calls = 0

    def run(self, words: list[str]) -> None:
        left = iter(words)
        for word in left:
            getattr(self, f"do_{word}")(*([next(left)] if word in TAKES_ONE else []))
        self.do_whole()

    def do_head(self, seconds: str) -> None:
        time.sleep(float(seconds))
        self._head()

    def _head(self) -> None:
        if not self._is_headed:
            self._is_headed = True
            self._connection.sendall(HEAD)

    def do_wait(self, seconds: str) -> None:
        self._head()
        time.sleep(float(seconds))

    def do_every(self, seconds: str) -> None:
        self._every_s = float(seconds)

    def do_data(self, count: str) -> None:
        for number in range(int(count)):
            self._say(f"{number} ")
            time.sleep(self._every_s)

    def do_text(self, text: str) -> None:
        self._say(text.replace("_", "\n"))

    def do_white(self, count: str) -> None:
        for _ in range(int(count) // 64):
            self._say(" " * 63 + "\n")

    def do_think(self, text: str) -> None:
        self._delta({"reasoning_content": text.replace("_", "\n")})

    def do_call(self, call: str) -> None:
        name, _, arguments = call.partition("=")
        first = {"index": self._calls, "id": f"c{self._calls}", "type": "function", "function": {"name": name}}
        self._delta({"tool_calls": [first]})
        for at in range(0, len(arguments), 7):
            piece = {"index": self._calls, "function": {"arguments": arguments[at : at + 7]}}
            self._delta({"tool_calls": [piece]})
        self._calls += 1

    def _say(self, text: str) -> None:
        self._delta({"content": text})

    def _delta(self, delta: dict[str, object]) -> None:
        self._event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))

    def _event(self, data: str) -> None:
        self._chunk(f"data: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self._head()
        self._connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def do_pings(self, seconds: str) -> None:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            self._chunk(b":\n\n")
            time.sleep(0.05)

    def do_burn(self, seconds: str) -> None:
        until = time.thread_time() + float(seconds)
        while time.thread_time() < until:
            pass

    def do_eat(self, mib: str) -> None:
        EATEN.append(b"x" * (int(mib) << 20))

    def do_error(self) -> None:
        self._event(json.dumps({"error": {"message": "scripted", "code": 500}}))

    def do_status(self, status: str) -> None:
        body = json.dumps({"error": {"message": "scripted refusal"}}).encode()
        head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        self._connection.sendall(head + body)
        raise Gone

    def do_cut(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        raise Gone

    def do_crash(self, code: str) -> None:
        print("scripted crash", flush=True)
        os._exit(int(code))

    def do_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_leave(self) -> None:
        os.unlink(self._path)

    def do_finish(self, reason: str) -> None:
        self._event(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))

    def do_whole(self) -> None:
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        self._event(json.dumps(last))
        self._event(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}))
        self._event("[DONE]")
        self._connection.sendall(b"0\r\n\r\n")
        raise Gone


TAKES_ONE = {"head", "wait", "every", "data", "text", "pings", "burn", "eat", "status", "crash"}
TAKES_ONE |= {"call", "think", "white", "finish"}
EATEN: list[bytes] = []
ABOUT = {
    "/health": b"{}",
    "/v1/models": b'{"object":"list","data":[{"id":"scripted","object":"model"}]}',
    "/props": b'{"build_info":"b1-0c1e570"}',
}
"""Answers to questions of Hive's to a llama-server."""


def read(connection: socket.socket) -> tuple[str, bytes]:
    """Target and body of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (piece := connection.recv(65536))
        if not piece:
            raise Gone
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(lengths[0] if lengths else 0):
        body += connection.recv(65536)
    return head.split()[1].decode(), body


def words_of(messages: list[dict[str, object]]) -> list[str]:
    """The script of this turn; beyond the last one, a short answer."""
    said = [one for one in messages if one["role"] == "user"] or messages
    turns = str(said[0]["content"]).split("|")
    number = sum(one["role"] == "assistant" for one in messages)
    return turns[number].split() if number < len(turns) else ["data", "1"]


def answer(connection: socket.socket, path: str, asked_file: str) -> None:
    with connection:
        try:
            target, body = read(connection)
            if not body:
                target = target.partition("?")[0]
                said, status = ABOUT.get(target, b"{}"), b"200 OK" if target in ABOUT else b"404 Not Found"
                head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(said))
                connection.sendall(head + said)
                return
            asked = json.loads(body)
            words = words_of(asked["messages"])
            print("asked", json.dumps(asked), flush=True)
            if asked_file:
                with open(asked_file, "a") as file:
                    file.write(json.dumps(asked) + "\n")
            Script(connection, path).run(["data", "1"] if words == ["Hi"] else words)
        except (Gone, OSError):
            return


def beside(how: str, pids: str) -> None:
    """A process that ignores SIGTERM, known by its pid in the file."""
    if os.fork():
        return
    if how in ("setsid", "double"):
        os.setsid()
    if how == "double" and os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "titled":
        forget_environment()
    note(pids)
    while True:
        time.sleep(60)


def forget_environment() -> None:
    """Fills what the kernel shows as this process's environment with zeros."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)


def note(pids: str) -> None:
    if pids:
        with open(pids, "a") as file:
            file.write(f"{os.getpid()}\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--pids", default="")
    parser.add_argument("--child", action="append", default=[], choices=("fork", "titled", "setsid", "double"))
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--crash-at-start", type=int, default=0)
    parser.add_argument("--chatter", type=int, default=0)
    parser.add_argument("--wait-for", default="", help="it listens once this can be read")
    parser.add_argument("--asked", default="")
    flags = parser.parse_args()
    if flags.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(flags.pids)
    for how in flags.child:
        beside(how, flags.pids)
    if flags.crash_at_start:
        print("scripted end at start", flush=True)
        return int(flags.crash_at_start)
    for _ in range(flags.chatter // 100):
        print("x" * 99)
    sys.stdout.flush()
    if flags.wait_for:
        with open(flags.wait_for) as gate:
            gate.read()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(flags.socket)
    listener.listen(64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, flags.socket, flags.asked), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
