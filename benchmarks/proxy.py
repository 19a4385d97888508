"""Hive's proxy beside nginx's and others, in one run: `python benchmarks/proxy.py [--seconds 3] [--rounds 5]`.

The full path (token, allowlist, windows, size, body decoded and rebuilt, queue, pooled backend, metering, spool, link)
against nginx with keep-alive upstreams and no buffering (benchmarks/nginx.conf). Both stand between wrk and the same
nginx that returns a fixed answer. Interleaved: every round measures each once. Three questions:

- CPU a request: utime + stime of the proxy process alone, which does not drift with the machine's load as latency does;
- requests a second: the proxy has a core of its own, wrk and the backend have the others;
- what it adds: one connection, the three ways (direct, nginx, Hive) request by request in turn, asked by a process of
  its own.

`--router VENV` and `--litellm VENV` add vLLM's router (tests/tools/setup_router.sh) and LiteLLM (setup_litellm.sh): the
first and the last are measured once more with all of them in turn, and told as the table of docs/figures.md, with the
work that each does. Needs nginx and wrk. Loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from build_line import build_line
from peers import TOKEN, Daemon, Peer, Peers, free_port, percentile, spread

__all__ = ["Daemon", "free_port"]

ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":'
    '"assistant","content":"Hello there, how can I help you today?"},"finish_reason":"stop"}],"usage":{"prompt_tokens":'
    '19,"completion_tokens":9,"total_tokens":28}}'
)
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "x" * 1950}], "temperature": 0.7}, separators=(",", ":")
)
OPENAI_HEAD = {
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "keep-alive",
    "User-Agent": "OpenAI/Python 3.51.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Package-Version": "3.51.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.11.7",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}
TARGET = "/v1/chat/completions"
CPU_RATIO_MAX, CPU_RATIO_AIM = 2.5, 2.0
REQUESTS_MIN = 15_000
ADDED_MS_MAX, ADDED_P99_RATIO_MAX = 0.10, 3.0
LATENCY_RUNS = 7
LATENCY_REQUESTS = 2000
"""Of each way in a run; their p99 is the 20th slowest."""
LATENCY_REQUESTS_BESIDE = 600
"""The same beside a slow peer."""
RESOLUTION_MS = 0.001
"""The least that a peer is said to add, so that there is a ratio to it."""
WORK = {
    "nginx": ("nginx", "relays bytes; knows no keys, no models and no usage"),
    "router": (
        "vLLM's router",
        "chooses one of two servers by the prompts each has had and how busy it is; health checks, tries again, "
        "metrics; no keys, no limits, no usage",
    ),
    "hive": (
        "Hive",
        "knows the agent by its key; allowlist, limits of agent and tenant, a fair queue, the body read and rebuilt by "
        "its field table, usage metered and written to disk, metrics",
    ),
    "litellm": (
        "LiteLLM",
        "one master key (without a database it has no users, budgets or usage); the body read and rebuilt for the "
        "provider, routing, tries again, the price of each answer, callbacks",
    ),
}
"""Name and work of each, in the configuration that is measured here."""


def fields_of(head: dict[str, str]) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **head}


def whole_request(head: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "h", **fields_of(head)}.items())
    return f"POST {TARGET} HTTP/1.1\r\n{lines}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()


# CPU and requests a second -------------------------------------------------------------------------------------------


def wrk_script(path: Path, head: dict[str, str]) -> Path:
    lines = ['wrk.method = "POST"', f"wrk.body = [=[{BODY}]=]"]
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in fields_of(head).items()]
    path.write_text("\n".join(lines))
    return path


async def load(peer: Peer, script: Path, seconds: float, connections: int) -> tuple[float, float]:
    """(CPU µs a request, requests a second) of the process over one run of wrk."""
    before = peer.cpu_s
    wrk = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)),
        f"http://127.0.0.1:{peer.port}{TARGET}",
        stdout=subprocess.PIPE,
    )
    output = (await wrk.communicate())[0].decode()
    used = peer.cpu_s - before
    requests = int(next(line for line in output.splitlines() if "requests in" in line).split()[0])
    if "Non-2xx" in output or "Socket errors" in output:
        raise SystemExit(f"wrk saw errors at {peer.name}:\n{output}")
    return used / max(requests, 1) * 1e6, requests / seconds


async def compare_cpu(
    arguments: argparse.Namespace, directory: Path, peers: Sequence[Peer], label: str, head: dict[str, str]
) -> dict[str, float]:
    """Prints the CPU µs a request of each, beside nginx's, and returns them."""
    script = wrk_script(directory / "wrk.lua", head)
    figures: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for warm in range(arguments.rounds + 1):
        for peer in peers:
            us, _ = await load(peer, script, arguments.seconds if warm else 1, arguments.connections)
            if warm:
                figures[peer.name].append(us)
    medians = {name: statistics.median(found) for name, found in figures.items()}
    told = "   ".join(f"{name} {us:.1f} µs" for name, us in medians.items())
    ratio = spread([ours / theirs for ours, theirs in zip(figures["hive"], figures["nginx"], strict=True)])
    print(f"  {label:21} {told}   ratio {ratio}; at most {CPU_RATIO_MAX}, aim {CPU_RATIO_AIM}")
    return medians


async def compare_alone(
    arguments: argparse.Namespace, directory: Path, hive: Peer, nginx: Peer, others: Sequence[Peer]
) -> None:
    """The proxy that is measured has a processor of its own; everything else of this benchmark has the others.

    Where other programs run on the same machine, what it does in a second of CPU time is what it could do alone.
    """
    first, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        print("  requests a second: this machine has one processor")
        return
    script = wrk_script(directory / "wrk.lua", OPENAI_HEAD)
    os.sched_setaffinity(0, rest)  # wrk is born with it
    for peer in (*others, hive, nginx):
        peer.pin(rest)
    figures: dict[str, list[tuple[float, float]]] = {"hive": [], "nginx": []}
    try:
        for _ in range(arguments.rounds):
            for peer in (hive, nginx):
                os.sched_setaffinity(peer.pid, [first])
                figures[peer.name].append(await load(peer, script, arguments.seconds, arguments.connections))
                os.sched_setaffinity(peer.pid, rest)
    finally:
        os.sched_setaffinity(0, [first, *rest])
        for peer in (*others, hive, nginx):
            peer.pin([first, *rest])
    for name, what in (("requests a second", 1), ("of its CPU time", 0)):
        ours, theirs = ([1e6 / us if what == 0 else per_s for us, per_s in found] for found in figures.values())
        print(
            f"  {name:21} hive {spread(ours, ',.0f')}   nginx {statistics.median(theirs):,.0f}"
            f"   ratio {statistics.median(ours) / statistics.median(theirs):.2f}; at least {REQUESTS_MIN:,}"
        )


# what it adds --------------------------------------------------------------------------------------------------------


class Caller:
    """One kept connection, asked one request at a time by a client that only waits."""

    def __init__(self, port: int, request: bytes) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 10)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request

    def ask_ms(self) -> float:
        begun = time.perf_counter()
        self._sock.sendall(self._request)
        answer = b""
        while not _is_whole(answer):
            more = self._sock.recv(65536)
            if not more:
                raise SystemExit(f"the connection was closed after {answer[:200]!r}")
            answer += more
        took_ms = (time.perf_counter() - begun) * 1e3
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"answered {answer[:200]!r}")
        return took_ms

    def close(self) -> None:
        self._sock.close()


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    return bool(end) and (body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length[1]))


def latencies(ports: dict[str, int], count: int) -> dict[str, list[float]]:
    """Milliseconds of each request; in turn, so that whatever slows the machine slows all of them."""
    request = whole_request(OPENAI_HEAD)
    callers = {name: Caller(port, request) for name, port in ports.items()}
    found: dict[str, list[float]] = {name: [] for name in callers}
    for number in range(count + 20):
        for name, caller in callers.items():
            took_ms = caller.ask_ms()
            if number >= 20:
                found[name].append(took_ms)
    for caller in callers.values():
        caller.close()
    return found


Run = Mapping[str, Sequence[float]]
"""Milliseconds of each request of one run, by the way it took."""


async def latency_runs(groups: Sequence[dict[str, int]], count: int) -> list[list[Run]]:
    """All runs of each group of ways, the groups in turn.

    Asked by a process of its own: in this one the daemon's stand-in would take its turns between.
    """
    found: list[list[Run]] = [[] for _ in groups]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
        loop = asyncio.get_running_loop()
        for _ in range(LATENCY_RUNS):
            for ports, runs in zip(groups, found, strict=True):
                runs.append(await loop.run_in_executor(one, latencies, ports, count))
    return found


def added_ms(runs: Sequence[Run], name: str, part: float) -> list[float]:
    """Milliseconds that this way adds to the direct one in each run, at the same `part` (0.5, 0.99) of its requests."""
    return [percentile(run[name], part) - percentile(run["direct"], part) for run in runs]


def judge_latency(runs: Sequence[Run]) -> list[str]:
    """The two promises, each by the median of the runs: added p50, and added p99 beside nginx's own of the same run."""
    p50, p99 = added_ms(runs, "hive", 0.5), added_ms(runs, "hive", 0.99)
    nginx_p50, nginx_p99 = added_ms(runs, "nginx", 0.5), added_ms(runs, "nginx", 0.99)
    ratios = [ours / max(theirs, RESOLUTION_MS) for ours, theirs in zip(p99, nginx_p99, strict=True)]
    direct = statistics.median(percentile(run["direct"], 0.5) for run in runs)
    return [
        f"  {'added p50':21} hive {spread(p50, '.3f')} ms   nginx {statistics.median(nginx_p50):.3f} ms   "
        f"(direct {direct:.3f} ms); at most {ADDED_MS_MAX:.2f} ms: {kept(statistics.median(p50) <= ADDED_MS_MAX)}",
        f"  {'added p99':21} hive {spread(p99, '.3f')} ms   nginx {statistics.median(nginx_p99):.3f} ms   "
        f"ratio {spread(ratios)}; at most {ADDED_P99_RATIO_MAX:g}: "
        f"{kept(statistics.median(ratios) <= ADDED_P99_RATIO_MAX)}",
    ]


def kept(is_kept: bool) -> str:
    return "kept" if is_kept else "NOT KEPT"


async def compare_beside(
    arguments: argparse.Namespace, directory: Path, backend: Peer, rivals: Sequence[Peer]
) -> list[str]:
    """The table of docs/figures.md: what each costs, and the work that it does for it.

    Each is asked in turn with the direct way alone: whoever comes after LiteLLM finds the caches cold.
    """
    cpu = await compare_cpu(arguments, directory, rivals, "openai-python's head", OPENAI_HEAD)
    groups = [{"direct": backend.port, peer.name: peer.port} for peer in rivals]
    found = await latency_runs(groups, LATENCY_REQUESTS_BESIDE)
    runs = {peer.name: of_peer for peer, of_peer in zip(rivals, found, strict=True)}
    rows = ["| | CPU a request | added p50 / p99 | what it does |", "|---|---|---|---|"]
    for name in sorted(cpu, key=lambda name: cpu[name]):
        p50, p99 = (statistics.median(added_ms(runs[name], name, part)) for part in (0.5, 0.99))
        title, work = WORK[name]
        rows.append(f"| {title} | {cpu[name]:,.0f} µs | {p50:.2f} / {p99:.2f} ms | {work} |")
    return rows


# where it goes -------------------------------------------------------------------------------------------------------


def where() -> None:
    """Shares of Hive's time: each step alone, in this process."""
    import msgspec

    from hive.domain import UsageEvent
    from hive.endpoints import endpoints
    from hive.metering.metering import read_cost
    from hive.queue.limits import SlidingWindow
    from hive.wire.http1 import KnownHead, RequestParser, Response, ResponseParser

    class Nothing:
        def on_head(self, request: object) -> None: ...
        def on_body(self, request: object, size: int) -> None: ...
        def on_request(self, request: object) -> None: ...

    request = whole_request(OPENAI_HEAD)
    parser = RequestParser(Nothing(), max_body=1 << 24)
    parser.feed(request)
    reply = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode()
    )
    known = KnownHead(Response())
    ResponseParser(known).feed(reply)
    window = SlidingWindow(10, 60)
    encode = msgspec.json.Encoder().encode
    event = UsageEvent(
        id="e-1",
        epoch="e",
        event_no=1,
        agent_id="a",
        tenant="t",
        model="m",
        backend="b",
        endpoint=TARGET,
    )
    steps: dict[str, Callable[[], object]] = {
        "head and framing, known (1)": lambda: parser.feed(request),
        "token digest, first time (1)": lambda: hashlib.sha256(TOKEN.encode()).hexdigest(),
        "allowlist, first time (2)": lambda: endpoints.find(b"POST", TARGET.encode()),
        "window (3)": lambda: window.take(1e9),
        "answer parsed, known head (9)": lambda: ResponseParser(known).feed(reply),
        "answer parsed, new head (9)": lambda: ResponseParser().feed(reply),
        "usage read (9)": lambda: read_cost(ANSWER.encode()),
        "usage event encoded (10)": lambda: encode(event),
    }
    print(
        "where it goes (alone, µs); the rest is event loop, four system calls, a share of the spool's, Python between"
    )
    for name, step in steps.items():
        print(f"  {name:30} {min(timeit.repeat(step, number=2000, repeat=5)) / 2000 * 1e6:5.1f}")


async def run(arguments: argparse.Namespace) -> None:
    async with Peers() as peers:
        backend = peers.nginx("backend", answer=ANSWER)
        nginx = peers.nginx("proxy", backend=backend.port)
        hive = await peers.hive(backend.port)
        rivals = [hive, nginx]
        print(f"CPU of the proxy process per request, {len(BODY)}-byte chat body, {arguments.connections} connections")
        await compare_cpu(arguments, peers.directory, rivals, "openai-python's head", OPENAI_HEAD)
        await compare_cpu(arguments, peers.directory, rivals, "bare head", {})
        print("the proxy alone on its processor")
        await compare_alone(arguments, peers.directory, hive, nginx, [backend])
        print(f"what it adds, one connection, {LATENCY_RUNS} runs of {LATENCY_REQUESTS} requests")
        ports = {"direct": backend.port, "nginx": nginx.port, "hive": hive.port}
        (runs,) = await latency_runs([ports], LATENCY_REQUESTS)
        print("\n".join(judge_latency(runs)))
        if arguments.router is not None:
            other = peers.nginx("backend", "other", answer=ANSWER)  # else there is nothing to choose
            rivals.append(await peers.router(arguments.router, [backend.port, other.port]))
        if arguments.litellm is not None:
            rivals.append(await peers.litellm(arguments.litellm, backend.port))
        if len(rivals) > 2:
            print("beside others, all in turn")
            print("\n".join(await compare_beside(arguments, peers.directory, backend, rivals)))
    where()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=3, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="pairs measured")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--router", type=Path, metavar="VENV", help="compare with vLLM's router, too")
    parser.add_argument("--litellm", type=Path, metavar="VENV", help="compare with LiteLLM, too")
    arguments = parser.parse_args()
    print(build_line())
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
