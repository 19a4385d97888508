"""Costs and gains of sleep, per depth: `python benchmarks/sleep.py [--mib 60 300] [--swap zram file] [--rounds 200]`.

Real process agents (a Python with the syntax trees of the standard library on its heap) under a real helper: freeze,
confirm, page out, thaw. Wake: the question lies in the agent's socket, thaw is asked → first byte of its answer. The
turn after it touches 30 % of the heap. RAM kept counts what zram takes for the agent. Then the same through a whole
Hive, and to a container: last byte of the ingress request → first byte of the answer. Needs root (swap is turned on
for the run) and redis-server; two sessions wait for each other; ends by itself.
"""

# ruff: noqa: ASYNC240 - nobody else waits for this loop
from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

import docker_engine
import pytest
import uvloop
from build_line import build_line
from journeys.stack import stack  # a Hive of its own, as the tests have it
from peers import percentile
from sandbox.harness import A, HelperProcess, kill_all_under, spec
from swapspace import file_swap, zram_swap
from wake import call_ms, free_port

from hive.host.memory import HeldMemory, held_by, read_zram
from hive.host.process import TICK_US, read_stat
from hive.sandbox.client import SandboxClient
from hive.settings.table import Paths
from tests.waiting import until

MIB = 1024 * 1024
PROMISED = {"light": "p50 ≤ 5 ms, p99 ≤ 50 ms", "deep": "p50 ≤ 10 ms", "docker": "p50 ≤ 25 ms"}
SWAPS = {"zram": zram_swap, "file": file_swap}
PROMISED_KEPT = {"zram": 35, "file": 10}
"""Per cent of a 300 MiB agent's RAM."""

HEAP = """
import ast, glob, os, socket, sys
trees = []

def rss_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

def sources():
    while True:
        for name in sorted(glob.glob(os.path.dirname(ast.__file__) + "/**/*.py", recursive=True)):
            try:
                yield open(name, encoding="utf-8").read()
            except (OSError, UnicodeDecodeError):
                pass

def grow(mib):
    for source in sources():
        if rss_mib() >= mib:
            return len(trees)
        try:
            trees.append(ast.parse(source))
        except (SyntaxError, ValueError):
            continue

def touch(share):
    return sum(1 for tree in trees[:max(1, int(len(trees) * share))] for node in ast.walk(tree))

grow(int(sys.argv[1]))
"""
AGENT = (
    HEAP
    + """
server = socket.socket(socket.AF_UNIX)
server.bind("s")
server.listen(64)
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    word = connection.recv(64).decode()
    if word.startswith("grow "):
        answer = grow(int(word.removeprefix("grow ")))
    else:
        answer = touch(float(word)) if word != "ping" else 0
    connection.sendall(b"%d" % answer)
    connection.close()
"""
)
"""Serves `ping`, a share of the heap to touch, and `grow MIB` at the socket `s` in its home."""
HTTP_AGENT = (
    HEAP
    + """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *words):
        pass

HTTPServer(("0.0.0.0", int(sys.argv[2])), Answers).serve_forever()
"""
)


class Round(NamedTuple):
    """Milliseconds; `kept`: share of its RAM before."""

    freeze: float
    wake: float
    turn: float
    kept: float
    paging: float = 0.0
    paging_cpu: float = 0.0


class Bench:
    """One agent under one helper."""

    def __init__(self, client: SandboxClient, helper_pid: int, paths: Paths, pid: int) -> None:
        self.client = client
        self.helper_pid = helper_pid
        self.socket = str(paths.home(A) / "s")
        self.pid = pid
        self.generation = 0

    def held(self) -> HeldMemory:
        return held_by([self.pid])

    async def ask(self, word: str) -> float:
        """Milliseconds from the question to its answer's first byte."""
        begun = time.perf_counter()
        reader, writer = await self._put(word)
        await self._answer(reader, writer)
        return (time.perf_counter() - begun) * 1e3

    async def _put(self, word: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        writer.write(word.encode())
        return reader, writer

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await reader.read(64):
            raise SystemExit("the agent hung up")
        writer.close()

    async def freeze(self) -> float:
        self.generation += 1
        took_ms = (await self.client.freeze(A, self.generation)).took_ms
        await self.client.confirm(A, self.generation)
        return took_ms

    async def wake(self) -> float:
        reader, writer = await self._put("ping")
        begun = time.perf_counter()
        thawing = asyncio.ensure_future(self.client.thaw(A))
        await self._answer(reader, writer)
        took_ms = (time.perf_counter() - begun) * 1e3
        await thawing
        return took_ms

    def helper_cpu_ms(self) -> float:
        stat = read_stat(self.helper_pid)
        return 0.0 if stat is None else stat.cpu_ticks * TICK_US / 1e3

    async def light(self) -> Round:
        frozen = await self.freeze()
        return Round(freeze=frozen, wake=await self.wake(), turn=await self.ask("0.3"), kept=1.0)

    async def deep(self, device: str) -> Round:
        """All of its memory is touched first: only what changed since is written again."""
        await self.ask("1")
        before, zram_before, cpu_before = self.held(), zram_bytes(device), self.helper_cpu_ms()
        frozen = await self.freeze()
        paged = await self.client.page_out(A, self.generation)
        cpu_ms = self.helper_cpu_ms() - cpu_before
        # Of a swap file the copies in the swap cache are not counted: they go as soon as somebody needs room.
        kept = (await self.client.stat([A]))[A].pss_bytes or paged.kept_bytes
        kept += zram_bytes(device) - zram_before
        wake = await self.wake()
        return Round(
            freeze=frozen,
            wake=wake,
            turn=await self.ask("0.3"),
            kept=kept / (before.rss_bytes + before.swap_bytes),
            paging=paged.took_ms,
            paging_cpu=cpu_ms,
        )


def zram_bytes(device: str) -> int:
    """RAM a zram device takes; 0 for a file."""
    zram = read_zram(device)
    return 0 if zram is None else zram.memory_bytes


@contextlib.asynccontextmanager
async def bench(mib: int, freezer: str) -> AsyncIterator[Bench]:
    """A helper of its own process with one agent of `mib`."""
    with tempfile.TemporaryDirectory(prefix="hive-") as directory:
        top = Path(directory)
        top.chmod(0o711)
        paths = Paths(state=top / "d", runtime=top / "r")
        helper = HelperProcess(paths, freezer)
        connected = asyncio.Event()
        await until(paths.sandbox_socket.exists)
        client = SandboxClient(paths.sandbox_socket, role="daemon", epoch="bench", on_connected=connected.set)
        try:
            await connected.wait()
            await client.define(A, spec(paths, A, ["/usr/bin/python3", "-S", "-c", AGENT, str(mib)]))
            pid = (await client.start(A)).pid
            await until(lambda: "ready" in paths.log(A).read_text(), within_s=300)
            yield Bench(client, helper.process.pid, paths, pid)
            await client.stop(A, grace_s=0)
        finally:
            client.close()
            helper.process.terminate()
            helper.process.wait()
            kill_all_under(paths)


def line(label: str, times: list[float], unit: str = "ms") -> str:
    return f"{label} p50 {statistics.median(times):7.2f} p99 {percentile(times, 0.99):7.2f} {unit}"


def show(depth: str, rounds: list[Round], rss_mib: float) -> None:
    print(
        f"  {depth:12} {line('freeze', [r.freeze for r in rounds])}   {line('wake', [r.wake for r in rounds])}   "
        f"{line('first turn', [r.turn for r in rounds])}"
    )
    kept = statistics.median(r.kept for r in rounds)
    text = f"RAM kept {kept:4.0%} of {rss_mib:.0f} MiB ({1 / kept:.1f} ×)"
    if depth != "light":
        cpu_s = statistics.median(r.paging_cpu for r in rounds) / 1e3
        text += f"   page-out p50 {statistics.median(r.paging for r in rounds):.0f} ms, {cpu_s:.2f} CPU s"
    print(f"  {'':12} {text}")


def promise(depth: str, swap: str, mib: int) -> str:
    kept = f", keeps ≤ {PROMISED_KEPT[swap]} % of RAM" if depth == "deep" and mib == 300 else ""
    return f"  {'':12} promised: wake {PROMISED[depth]}{kept}"


async def run_light(mib: int, rounds: int, freezer: str) -> None:
    async with bench(mib, freezer) as one:
        rss_mib = one.held().rss_bytes / MIB
        awake = [await one.ask("ping") for _ in range(rounds)]
        turns = [await one.ask("0.3") for _ in range(5)]
        print(f"{rss_mib:.0f} MiB agent, frozen by {freezer}; awake: {line('answer', awake)}   {line('turn', turns)}")
        show("light", [await one.light() for _ in range(rounds)], rss_mib)
        print(promise("light", "", mib))


async def run_deep(mib: int, rounds: int, freezer: str, swap: str) -> None:
    try:
        with SWAPS[swap](mib + 128) as device:
            async with bench(mib, freezer) as one:
                rss_mib = one.held().rss_bytes / MIB
                show(f"deep, {swap}", [await one.deep(device) for _ in range(rounds)], rss_mib)
                print(promise("deep", swap, mib))
    except pytest.skip.Exception as skipped:
        print(f"  deep, {swap}: {skipped}")


# the whole way, through Hive's ingress --------------------------------------------------------------------------------


def run_ingress(mib: int, rounds: int, swap: str | None) -> None:
    """`swap` None: light."""
    label, order = (f"deep, {swap}", {"deep": True}) if swap else ("light", {})
    try:
        with SWAPS[swap](mib + 128) if swap else contextlib.nullcontext(), stack() as hive:
            port, size = free_port(), str(mib)
            command = ["/usr/bin/python3", "-S", "-c", HTTP_AGENT, size, str(port)]
            hive.post("/api/agents", {"name": "echo", "command": command, "port": port})
            ingress, token = hive.health()["proxy"]["ingress_port"], hive.get("/api/agents/echo/tokens")["ingress"]
            wait_for(port)
            times = []
            for _ in range(rounds):
                hive.post("/api/agents/echo/pause", order)
                times.append(call_ms(ingress, token))
            print(f"  {label:12} {line('ingress request → first byte of the answer', times)}")
    except pytest.skip.Exception as skipped:
        print(f"  {label:12} {skipped}")


def run_docker(mib: int, rounds: int) -> None:
    """A container on a bridge. Its engine's own time for an unpause is printed beside it: most of the wake."""
    label = "light, docker"
    try:
        with docker_engine.private() as engine, stack(config=f"[sandbox]\ndocker_socket = {engine.socket}\n") as hive:
            command = ["/usr/bin/python3", "-S", "-c", HTTP_AGENT, str(mib), "8000"]
            docker = {"image": docker_engine.IMAGE, "mounts": [docker_engine.HOST_PROGRAMS]}
            hive.post(
                "/api/agents",
                {"name": "echo", "runtime": "docker", "command": command, "docker": docker, "port": 8000},
            )
            ingress, token = hive.health()["proxy"]["ingress_port"], hive.get("/api/agents/echo/tokens")["ingress"]
            (container,) = engine.containers(hive.state)
            networks = engine.inspect(container["Id"])["NetworkSettings"]["Networks"].values()
            wait_for(8000, next(network["IPAddress"] for network in networks))
            times = []
            for _ in range(rounds):
                hive.post("/api/agents/echo/pause")
                times.append(call_ms(ingress, token))
            print(f"  {label:12} {line('ingress request → first byte of the answer', times)}")
            engines = [unpause_ms(engine, container["Id"]) for _ in times]
            print(f"  {'':12} {line('of it the engine, an unpause', engines)}")
            print(f"  {'':12} promised: wake {PROMISED['docker']}")
            engine.clear(hive.state)
    except pytest.skip.Exception as skipped:
        print(f"  {label:12} {skipped}")


def unpause_ms(engine: docker_engine.DockerEngine, container: str) -> float:
    engine.do(container, "pause")
    begun = time.perf_counter()
    engine.do(container, "unpause")
    return (time.perf_counter() - begun) * 1e3


def wait_for(port: int, host: str = "127.0.0.1") -> None:
    """Until the agent has its heap and listens."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)
    raise SystemExit("the agent does not listen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[60, 300], help="sizes of the agent")
    parser.add_argument("--swap", nargs="+", choices=("zram", "file"), default=["zram", "file"])
    parser.add_argument("--rounds", type=int, default=200, help="of light sleep")
    parser.add_argument("--deep-rounds", type=int, default=20)
    parser.add_argument("--docker-rounds", type=int, default=50)
    parser.add_argument("--freezer", choices=("cgroup", "signals"), default="cgroup")
    arguments = parser.parse_args()
    print(build_line())
    for mib in arguments.mib:
        uvloop.run(run_light(mib, arguments.rounds, arguments.freezer))
        for swap in arguments.swap:
            uvloop.run(run_deep(mib, arguments.deep_rounds, arguments.freezer, swap))
        print(f"{mib} MiB agent, through ingress")
        run_ingress(mib, arguments.rounds, None)
        for swap in arguments.swap:
            run_ingress(mib, arguments.deep_rounds, swap)
        run_docker(mib, arguments.docker_rounds)


if __name__ == "__main__":
    main()
