"""The cost of translating over relaying, in one run: `python benchmarks/translation.py [--seconds 4] [--rounds 5]`.

One proxy of Hive before one backend that speaks OpenAI's dialect. Four clients in turn, each round: OpenAI's is
relayed, Ollama's, Anthropic's and Responses are translated. All see the same stream of the same backend. Two questions:

- CPU a chunk: utime + stime of the proxy process while `--streams` streams of `--rate` chunks a second run;
- what it adds to a request: answers in one piece and short streams, one connection each, request by request in turn.

LiteLLM's proxy beside it in the same run, relaying OpenAI's and translating Anthropic's (it takes no client of
Ollama's): from `--litellm VENV`, else what tests/tools/setup_litellm.sh left; without, it is left out and that is said.
Loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import streams
import uvloop
from build_line import build_line
from peers import TOKEN, Peer, Peers, free_port, spread, wait_for_port

from hive.domain import BackendKind

US_A_CHUNK_MAX = 15
ADDED_MS_MAX = 0.3
LATENCY_REQUESTS = 300
"""Of each client in a round."""
SHORT = 16
"""Chunks of a short stream, sent at once."""
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there, how can I help you today?"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 19, "completion_tokens": 9, "total_tokens": 28},
    },
    separators=(",", ":"),
).encode()


class Backend(streams.Backend):
    """The backend of benchmarks/streams.py; it answers in one piece too, and a short stream at once."""

    def __init__(self) -> None:
        super().__init__()
        self._request = b""

    def data_received(self, data: bytes) -> None:
        self._request += data
        head, end, body = self._request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *([0-9]+)", head)
        if not end or length is None or len(body) < int(length[1]):
            return
        self._request, body = b"", body.replace(b'": ', b'":')  # as LiteLLM writes it
        if b"short" in body:
            self._write(_short_stream())
        elif b'"stream":true' in body:
            super().data_received(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            self._write(_in_one_piece())


def _in_one_piece() -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
    return head + ANSWER


def _short_stream() -> bytes:
    end = streams.LAST + streams.USAGE + streams.DONE
    chunks = b"".join(streams.chunk(number) for number in range(SHORT))
    return streams.HEAD + chunks + b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# the clients ----------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One client at one proxy. `piece`: what each chunk of a stream has once; `end`: what the last one has."""

    name: str
    target: str
    piece: bytes
    end: bytes


WAYS = {
    "openai": Way("OpenAI, relayed", "/v1/chat/completions", b'"delta":{"content":"', b"[DONE]"),
    "ollama": Way("Ollama → OpenAI", "/api/chat", b'"done":false', b'"done":true'),
    "anthropic": Way("Anthropic → OpenAI", "/v1/messages", b"text_delta", b'"message_stop"'),
    "responses": Way("Responses → chats", "/v1/responses", b'"response.output_text.delta"', b'"response.completed"'),
}


def request_for(way: str, words: str, *, stream: bool) -> bytes:
    """2 KB; `words`: what the backend goes by."""
    found: dict[str, Any] = {"model": "m", "stream": stream, "temperature": 0.7}
    said = [{"role": "user", "content": words}]
    if way == "anthropic":
        found |= {"max_tokens": 4096, "system": "x" * 1900, "messages": said}
    elif way == "responses":
        found |= {"instructions": "x" * 1900, "input": said}
    else:
        found["messages"] = [{"role": "system", "content": "x" * 1900}, *said]
    if way == "ollama":
        found["options"] = {"temperature": found.pop("temperature")}
    body = json.dumps(found, separators=(",", ":"))
    return (
        f"POST {WAYS[way].target} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {TOKEN}\r\nx-api-key: {TOKEN}\r\nanthropic-version: 2023-06-01\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


class Stream(asyncio.Protocol):
    """One stream; counts its chunks. `begun` and `ended` as they say."""

    def __init__(self, way: Way, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.chunks = 0
        self._way = way
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{self._way.name}: answered {data[:300]!r}")
            self.begun.set_result(None)
        piece = self._way.piece
        found = self._tail + data.replace(b'": ', b'":')
        self.chunks += found.count(piece)
        self._tail = found[-len(piece) + 1 :]
        if self._way.end in found and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(ConnectionResetError(f"{self._way.name}: the stream was cut"))
                future.exception()


async def us_a_chunk(peer: Peer, way: str, count: int, rate: int, seconds: float) -> float:
    """CPU µs of the proxy for each chunk, while `count` streams run."""
    loop = asyncio.get_running_loop()
    request = request_for(way, f"flow {int(rate * (seconds + streams.LEAD_S))} {rate}", stream=True)
    clients = []
    for _ in range(count):
        _, client = await loop.create_connection(lambda: Stream(WAYS[way], request), "127.0.0.1", peer.port)
        clients.append(client)
    await asyncio.wait_for(asyncio.gather(*(client.begun for client in clients)), 60)
    before, chunks = peer.cpu_s, sum(client.chunks for client in clients)
    await asyncio.sleep(seconds)
    used, chunks = peer.cpu_s - before, sum(client.chunks for client in clients) - chunks
    await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), seconds + 60)
    return used / chunks * 1e6


class Asker:
    """One kept connection, asked one request at a time by a client that only waits."""

    def __init__(self, peer: Peer, way: str, *, stream: bool) -> None:
        self._way = WAYS[way]
        self._end = self._way.end if stream else b"}"
        self._request = request_for(way, "short" if stream else "whole", stream=stream)
        self._peer = peer
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask_ms(self) -> float:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._peer.port)
        begun = time.perf_counter()
        self._writer.write(self._request)
        answer = b""
        while not self._is_whole(answer):
            more = await self._reader.read(65536)
            if not more:
                raise SystemExit(f"{self._way.name}: closed after {answer[:300]!r}")
            answer += more
        took_ms = (time.perf_counter() - begun) * 1e3
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{self._way.name}: answered {answer[:300]!r}")
        return took_ms

    def _is_whole(self, answer: bytes) -> bool:
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        return at >= 0 and len(body) >= int(head[at + 16 :].split(b"\r\n")[0])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def p50_ms(askers: dict[str, Asker], count: int) -> dict[str, float]:
    """Each in turn, so that whatever slows the machine slows all of them."""
    found: dict[str, list[float]] = {name: [] for name in askers}
    for number in range(count + 20):
        for name, asker in askers.items():
            took_ms = await asker.ask_ms()
            if number >= 20:
                found[name].append(took_ms)
    for asker in askers.values():
        asker.close()
    return {name: statistics.median(times) for name, times in found.items()}


# what is measured -----------------------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """A proxy, the ways it can be gone, and how many streams it bears."""

    peer: Peer
    ways: Sequence[str]
    streams: int


async def compare_chunks(arguments: argparse.Namespace, rivals: Sequence[Rival]) -> None:
    """CPU µs a chunk, relayed and translated."""
    found: dict[tuple[str, str], list[float]] = {(rival.peer.name, way): [] for rival in rivals for way in rival.ways}
    for warm in range(arguments.rounds + 1):
        for rival in rivals:
            for way in rival.ways:
                seconds = arguments.seconds if warm else 0.5
                us = await us_a_chunk(rival.peer, way, rival.streams, arguments.rate, seconds)
                if warm:
                    found[rival.peer.name, way].append(us)
                await asyncio.sleep(0.1)
    _told(rivals, found, "µs of CPU a chunk", ".1f", US_A_CHUNK_MAX)


async def compare_requests(arguments: argparse.Namespace, rivals: Sequence[Rival], *, stream: bool) -> None:
    """Milliseconds at the median, relayed and translated."""
    found: dict[tuple[str, str], list[float]] = {(rival.peer.name, way): [] for rival in rivals for way in rival.ways}
    for _ in range(arguments.rounds):
        for rival in rivals:
            askers = {way: Asker(rival.peer, way, stream=stream) for way in rival.ways}
            count = LATENCY_REQUESTS if rival.peer.name == "hive" else LATENCY_REQUESTS // 5
            for way, ms in (await p50_ms(askers, count)).items():
                found[rival.peer.name, way].append(ms)
    what = f"a stream of {SHORT} chunks" if stream else "an answer in one piece"
    _told(rivals, found, f"ms p50, {what}", ".3f", ADDED_MS_MAX)


def _told(
    rivals: Sequence[Rival], found: dict[tuple[str, str], list[float]], unit: str, form: str, most: float
) -> None:
    """Prints every row; what is added is the difference within a round."""
    added: dict[str, dict[str, float]] = {}
    print(unit)
    for rival in rivals:
        name = rival.peer.name
        base = found[name, "openai"]
        print(f"  {name:8} {WAYS['openai'].name:20} {spread(base, form)}")
        added[name] = {}
        for way in rival.ways[1:]:
            more = [ours - theirs for ours, theirs in zip(found[name, way], base, strict=True)]
            added[name][way] = statistics.median(more)
            limit = f"; at most {most:g}" if name == "hive" else ""
            print(
                f"  {name:8} {WAYS[way].name:20} {statistics.median(found[name, way]):{form}}"
                f"   added {spread(more, form)}{limit}"
            )
    if "litellm" in added:
        whole = [statistics.median(found[name, "anthropic"]) for name in ("hive", "litellm")]
        both = {"whole": whole, "added": [of["anthropic"] for of in added.values()]}
        for what, (ours, theirs) in both.items():
            told = f"hive {ours:{form}}   LiteLLM {theirs:{form}}{_ratio(ours, theirs)}"
            print(f"  {WAYS['anthropic'].name}, {what}: {told}")


def _ratio(ours: float, theirs: float) -> str:
    """Empty where a difference is lost in the noise of the machine."""
    return f"   ratio {ours / theirs:.3f}" if ours > 0 and theirs > 0 else ""


def litellm_venv(given: Path | None) -> Path | None:
    """`--litellm`, else what tests/tools/setup_litellm.sh left in its cache; None where neither is."""
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    venv = given or Path(cache, "litellm", "venv")
    return venv if os.access(venv / "bin" / "litellm", os.X_OK) else None


async def run(arguments: argparse.Namespace) -> None:
    async with Peers() as peers:
        port = free_port()
        peers.run(sys.executable, __file__, "--serve", str(port))
        wait_for_port(port)
        hive = await peers.hive(port, kind=BackendKind.VLLM, other_tenant=True)
        rivals = [Rival(hive, ("openai", "ollama", "anthropic", "responses"), arguments.streams)]
        venv = litellm_venv(arguments.litellm)
        if venv is None:
            print("LiteLLM is left out: run tests/tools/setup_litellm.sh or name its environment with --litellm")
        else:
            # As `openai` it would translate Anthropic's to /v1/responses, which few servers have.
            litellm = await peers.litellm(venv, port, provider="hosted_vllm")
            rivals.append(Rival(litellm, ("openai", "anthropic"), 8))
        print(f"streams of {arguments.rate} chunks a second: {', '.join(f'{r.peer.name} {r.streams}' for r in rivals)}")
        await compare_chunks(arguments, rivals)
        await compare_requests(arguments, rivals, stream=False)
        await compare_requests(arguments, rivals, stream=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--rate", type=int, default=50, help="chunks a second of one stream")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured")
    parser.add_argument("--litellm", type=Path, metavar="VENV", help="LiteLLM's environment")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.serve:
        print(build_line())
    uvloop.run(serve(arguments.serve) if arguments.serve else run(arguments))


if __name__ == "__main__":
    main()
