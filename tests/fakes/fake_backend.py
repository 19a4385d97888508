#!/usr/bin/env python3
"""An inference server without a model: the bytes of Ollama, vLLM or llama-server, fast, seeded, and faulty on demand.

    fake_backend.py --kind ollama|vllm|llama (--port 0 | --socket PATH) [--seed N] [faults]

Prints `{"address": …}` when it listens. `GET /fake/stats` tells what it did; an answer is whole once its last byte
was handed to the socket. A request's `X-Fake-Id` (or with `--record` its number, which is the end of an OpenAI answer's
`id`) is listed there with its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter, deque
from functools import partial
from typing import Any

import httptools
import ollama_words
import uvloop
from fake_answers import (
    JSON,
    Refused,
    Script,
    chunk,
    control,
    encode,
    error_script,
    head,
    ollama_embedding,
    ollama_script,
    openai_script,
    read,
    stream_error,
)

# --- the server ----------------------------------------------------------------------------------------------------


class Fake:
    """State that the connections share: flags, counts, answers already made for the same bytes."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.open: set[Connection] = set()
        self.begun = self.whole = self.cancelled = self.tokens_in = self.tokens_out = 0
        self.by_id: dict[str, dict[str, Any]] = {}
        self.asked: Counter[str] = Counter()
        self._made: dict[tuple[str, bytes], tuple[Script, bytes]] = {}
        self.plain = not (
            flags.slow_head or flags.slow_first or flags.token_delay or flags.bad_head or flags.no_end_marker
        ) and all(number < 0 for number in (flags.die_mid_stream, flags.stall_after, flags.error_mid_stream))
        self.remembers = not (flags.spread or flags.record)

    def stats(self) -> dict[str, Any]:
        names = ("begun", "whole", "cancelled", "tokens_in", "tokens_out", "by_id")
        found = {name: getattr(self, name) for name in names}
        return {"kind": self.flags.kind, "open": len(self.open), "asked": dict(self.asked), **found}

    def answer(self, method: str, path: str, body: bytes) -> tuple[Script, bytes]:
        """The script for a request, and the same as the bytes of a kept-alive answer."""
        key = (path, body)
        if method == "POST" and (made := self._made.get(key)) is not None:
            return made
        script = self._script(method, path, body)
        made = script, b"" if script.streamed else head(self.flags.kind, script, close=False) + script.chunks[0]
        if method == "POST" and self.remembers and script.status == 200:
            if len(self._made) > 100:
                self._made.clear()
            self._made[key] = made
        return made

    def _script(self, method: str, path: str, body: bytes) -> Script:
        kind = self.flags.kind
        try:
            if path == "/fake/stats":
                return Script(JSON, [encode(self.stats())])
            if method != "POST":
                return control(path, self.flags)
            asked, found = read(body, path, self.flags, self.begun)
            if kind == "ollama" and path in ("/api/chat", "/api/generate"):
                return ollama_script(path, asked, found, self.flags.seed)
            if kind == "ollama" and path in ("/api/embed", "/api/embeddings"):
                return ollama_embedding(path, asked, found)
            if kind == "ollama" and path == "/api/show":
                return Script(
                    JSON, [encode({"details": {}, "model_info": {}, "capabilities": self.flags.capabilities})]
                )
            if path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
                return openai_script(kind, path, asked, found, self.flags.seed)
            raise Refused(404, "Not Found", "not_found_error")
        except Refused as error:
            return error_script(kind, path, error)

    def sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections idle for `--idle-close` seconds, looked at once a second."""
        for connection in list(self.open):
            connection.close_if_idle(loop.time() - self.flags.idle_close)
        loop.call_later(1.0, self.sweep, loop)


class Connection(asyncio.Protocol):
    """One client; requests are answered in their order."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.loop = asyncio.get_running_loop()
        self.transport: Any = None
        self.served = 0
        self.path = ""  # of the answer under way
        self.chunks: deque[bytes] | None = None
        self.sent = 0
        self.counted: tuple[Script, str] | None = None
        self.last_chunk = b""
        self.timer: asyncio.TimerHandle | None = None
        self.writable = True
        self.close_after_this = False
        self.waiting: deque[tuple[str, str, bytes, str, bool]] = deque()
        self.active_at = self.loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.fake.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fake.open.discard(self)
        if self.timer is not None:
            self.timer.cancel()
        if self.counted is not None:
            self._count("cancelled")
        self.chunks = None

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self.chunks is not None and self.timer is None:
            self._send()

    def close_if_idle(self, before: float) -> None:
        if self.chunks is None and self.active_at < before:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        self.url, self.body, self.fake_id, self.host = b"", b"", "", ""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 9 and name.lower() == b"x-fake-id":
            self.fake_id = value.decode("latin-1")
        elif len(name) == 4 and name.lower() == b"host":
            self.host = value.decode("latin-1")
        elif len(name) == 6 and name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body = self.body + body if self.body else body

    def on_message_complete(self) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")
        keep = self.parser.should_keep_alive()
        asked = (self.parser.get_method().decode(), path, self.body, self.fake_id, keep)
        if self.chunks is None:
            self._begin(*asked)
        else:
            self.waiting.append(asked)

    def _begin(self, method: str, path: str, body: bytes, fake_id: str, keep: bool) -> None:
        fake, flags = self.fake, self.fake.flags
        self.served += 1
        fake.asked[f"{method} {path}" if len(fake.asked) < 200 else "other"] += 1
        infers = method == "POST" and path != "/api/show"
        if infers:
            fake.begun += 1
        script, whole = fake.answer(method, path, body)
        if flags.kind == "ollama" and flags.port is not None and not ollama_words.is_for_itself(self.host):
            script = Script("text/plain", [b""], status=403)
            whole = head(flags.kind, script, close=False)
        refused = script.status >= 400
        self.close_after_this = not keep or self.served == flags.close_after or (refused and flags.kind == "llama")
        self.counted = (script, fake_id or (f"fake{fake.begun}" if flags.record else "")) if infers else None
        if whole and not self.close_after_this and method != "HEAD" and (fake.plain or not infers or refused):
            self.transport.write(whole)
            self._end()
            return
        self.path, self.sent = path, 0
        self._prepare(script, faulty=infers and not refused, head_only=method == "HEAD")

    def _prepare(self, script: Script, *, faulty: bool, head_only: bool) -> None:
        """Lays the answer out in pieces to be sent, faults of the flags worked in."""
        flags = self.fake.flags
        first = head(flags.kind, script, close=self.close_after_this)
        if faulty and flags.bad_head:
            first = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n"
        parts = list(script.chunks)
        ending = script.ending
        if faulty and script.streamed and 0 <= flags.error_mid_stream < len(parts):
            error, ending = stream_error(flags.kind, self.path)
            parts = [*parts[: flags.error_mid_stream], error]
        if faulty and flags.no_end_marker:
            ending = b""
        self.last_chunk = ending
        if script.streamed:
            parts = [chunk(part) for part in parts]
            self.last_chunk = (chunk(ending) if ending else b"") + b"0\r\n\r\n"
        elif faulty and flags.die_mid_stream >= 0:
            parts = [parts[0][: len(parts[0]) // 2], parts[0][len(parts[0]) // 2 :]]
        self.chunks = deque([] if head_only else parts)
        self.delay = flags.token_delay if faulty else 0.0
        self.die_at = min(flags.die_mid_stream, len(parts) - 1) if faulty else -1
        self.stall_at = flags.stall_after if faulty else -1
        if faulty and flags.slow_head:
            self.timer = self.loop.call_later(flags.slow_head, self._send_head, first, flags.slow_first)
        else:
            self._send_head(first, flags.slow_first if faulty else 0.0)

    def _send_head(self, first: bytes, then_wait_s: float) -> None:
        self.transport.write(first)
        if then_wait_s:
            self.timer = self.loop.call_later(then_wait_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        """Sends chunks until the pace, a slow reader or a fault says otherwise."""
        self.timer = None
        while self.chunks is not None and self.writable:
            if self.sent == self.stall_at:
                return
            if self.sent == self.die_at:
                # A killed process leaves what the kernel has to be read, and then a reset.
                self.timer = self.loop.call_later(0.02, self.transport.abort)
                return
            if not self.chunks:
                self.transport.write(self.last_chunk)
                self.chunks = None
                self._end()
                return
            self.transport.write(self.chunks.popleft())
            self.sent += 1
            if self.delay and self.chunks:
                self.timer = self.loop.call_later(self.delay, self._send)
                return

    def _end(self) -> None:
        if self.counted is not None:
            self._count("whole")
        self.active_at = self.loop.time()
        if self.close_after_this:
            self.transport.close()
        elif self.waiting:
            self._begin(*self.waiting.popleft())

    def _count(self, outcome: str) -> None:
        assert self.counted is not None
        (script, fake_id), self.counted = self.counted, None
        if outcome == "cancelled":
            self.fake.cancelled += 1
        else:
            self.fake.whole += 1
            self.fake.tokens_in += script.tokens_in
            self.fake.tokens_out += script.tokens_out
        if fake_id:
            told = {"tokens_in": script.tokens_in, "tokens_out": script.tokens_out, "status": script.status}
            self.fake.by_id[fake_id] = {"outcome": outcome, **told}


async def serve(flags: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    fake = Fake(flags)
    done = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    if flags.socket:
        server = await loop.create_unix_server(partial(Connection, fake), flags.socket, backlog=4096)
        address = flags.socket
    else:
        server = await loop.create_server(partial(Connection, fake), flags.host, flags.port, backlog=4096)
        address = f"{flags.host}:{server.sockets[0].getsockname()[1]}"
    if flags.idle_close:
        fake.sweep(loop)
    print(json.dumps({"address": address, "kind": flags.kind, "pid": os.getpid()}), flush=True)
    await done.wait()
    server.close()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="0 takes a free one")
    where.add_argument("--socket", help="path of a unix socket")
    parser.add_argument("--host", default="127.0.0.1", help="the address it listens at, with a port")
    parser.add_argument("--kind", choices=("ollama", "vllm", "llama"), default="ollama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=lambda text: [name for name in text.split(",") if name], default=["tiny"])
    parser.add_argument(
        "--capabilities",
        type=lambda text: text.split(","),
        default=["completion", "tools"],
        help="what an Ollama's models can: completion, tools, vision",
    )
    parser.add_argument("--broken", action="store_true", help="an Ollama whose runner does not start: 500")
    parser.add_argument("--tokens", type=int, default=16, help="words of an answer that is not limited")
    parser.add_argument("--spread", type=int, default=0, help="up to so many more, another number each time")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds between two chunks of a stream")
    parser.add_argument("--slow-head", type=float, default=0.0, help="seconds before the head, as llama-server queues")
    parser.add_argument("--slow-first", type=float, default=0.0, help="seconds after the head, as vLLM queues")
    parser.add_argument("--die-mid-stream", type=int, default=-1, help="reset after so many chunks; a body: half of it")
    parser.add_argument("--error-mid-stream", type=int, default=-1, help="an error in the stream after so many chunks")
    parser.add_argument("--stall-after", type=int, default=-1, help="nothing more after so many chunks")
    parser.add_argument("--no-end-marker", action="store_true", help="streams end without [DONE] or done: true")
    parser.add_argument("--bad-head", action="store_true", help="two different Content-Lengths")
    parser.add_argument("--busy", action="store_true", help="every prompt is 503, as each kind says it")
    parser.add_argument("--close-after", type=int, help="requests per connection; default: llama 100, else no limit")
    parser.add_argument("--idle-close", type=float, help="seconds; default: vllm and llama 5, else never")
    parser.add_argument("--record", action="store_true", help="list every answer in /fake/stats by its number")
    flags = parser.parse_args(arguments)
    if flags.close_after is None:
        flags.close_after = 100 if flags.kind == "llama" else 0
    if flags.idle_close is None:
        flags.idle_close = 0.0 if flags.kind == "ollama" else 5.0
    return flags


if __name__ == "__main__":
    uvloop.run(serve(parse(sys.argv[1:])))
