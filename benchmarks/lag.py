"""Time for which the largest bodies hold up everybody else: `python benchmarks/lag.py [--bodies 48] [--concurrent 8]`.

The real data path over loopback; clients and backend are another process. A timer of 1 ms on the proxy's loop sees how
late it comes (which other programs on a busy machine add to) and how much the loop's own thread computed at one go
(which they do not). First as it would be with every body read on the loop, then with the workers. Promised: no more
than 5 ms at one go.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / part) for part in ("tests/proxy", "tests", "")]

import uvloop
from build_line import build_line
from harness import JSON_ANSWER, MODEL_TOKEN, Proxy, answer, post, proxied

from hive.bodies.body_workers import DeepReaders
from hive.domain import BackendInfo, BackendKind

SAMPLE_S = 0.001
EDGES_MS = (0.5, 1, 2, 5, 10, 20, 50, 100)
PROMISED_MS = 5


class Sampler:
    """A timer that notes how late it comes and what its thread computed since it came last, in ms."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.busy: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._due, self._cpu = time.perf_counter(), time.thread_time()
        self._timer = self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.late.append((now - self._due) * 1e3)
        self.busy.append((cpu - self._cpu) * 1e3)
        self._due, self._cpu = now + SAMPLE_S, cpu
        self._timer = self._loop.call_later(SAMPLE_S, self._beat)

    def stop(self) -> None:
        self._timer.cancel()


def histogram(label: str, samples: list[float]) -> None:
    samples.sort()
    counts = [sum(sample < edge for sample in samples) for edge in EDGES_MS]
    rows = [after - before for before, after in zip([0, *counts], [*counts, len(samples)], strict=True)]
    names = [*(f"<{edge:g}" for edge in EDGES_MS), f">{EDGES_MS[-1]:g}"]
    shown = "  ".join(f"{name} ms: {count}" for name, count in zip(names, rows, strict=True) if count)
    print(f"  {label:9} max {samples[-1]:6.2f} ms  p99 {samples[int(len(samples) * 0.99)]:5.2f} ms   {shown}")


async def measure(arguments: argparse.Namespace, readers: DeepReaders | None) -> None:
    settings = {"tier_low_concurrency": 64, "queue_depth": 64, "window_requests": 10_000}
    with tempfile.TemporaryDirectory() as directory:
        async with proxied(Path(directory), **settings) as (proxy, _):
            proxy.path.readers = readers
            if readers is not None:
                readers.start()
                await asyncio.sleep(1)
            with contextlib.ExitStack() as stack:
                if readers is not None:
                    stack.callback(readers.close)
                await run(arguments, proxy)
    await asyncio.sleep(0.1)


async def run(arguments: argparse.Namespace, proxy: Proxy) -> None:
    words = [sys.executable, __file__, "--load", str(proxy.port)]
    words += ["--bodies", str(arguments.bodies), "--concurrent", str(arguments.concurrent), "--mib", str(arguments.mib)]
    load = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE)
    assert load.stdout is not None
    assert load.stdin is not None
    port = int(await load.stdout.readline())
    proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=f"127.0.0.1:{port}", up=True), [])
    sampler, begun = Sampler(), time.perf_counter()
    load.stdin.write(b"go\n")
    answered = (await load.stdout.read()).decode().strip()
    took_s = time.perf_counter() - begun
    sampler.stop()
    await load.wait()
    print(f"  {answered}, {arguments.bodies * arguments.mib / took_s:.0f} MiB/s")
    histogram("late", sampler.late)
    histogram("at one go", sampler.busy)


# the other process: clients and backend -------------------------------------------------------------------------------


def picture(mib: int) -> bytes:
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}'
    text = b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % part
    return text % (b"A" * (mib * 1024 * 1024 - len(text)))


async def load(arguments: argparse.Namespace) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    sys.stdin.readline()
    request = post(b"/v1/chat/completions", picture(arguments.mib), token=MODEL_TOKEN)
    numbers, statuses = iter(range(arguments.bodies)), []
    await asyncio.gather(*(ask(arguments.load, request, numbers, statuses) for _ in range(arguments.concurrent)))
    good = sum(b" 200 " in status for status in statuses)
    print(f"{good} of {len(statuses)} bodies of {arguments.mib} MiB answered with 200")


async def ask(port: int, request: bytes, numbers: Iterator[int], statuses: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in numbers:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        statuses.append(head.split(b"\r\n")[0])
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes requests and forgets them."""
    with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            missing = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            while missing and (data := await reader.read(min(missing, 1024 * 1024))):
                missing -= len(data)
            writer.write(answer(JSON_ANSWER))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=48)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--mib", type=int, default=15, help="size of each body")
    parser.add_argument("--load", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        uvloop.run(load(arguments))
        return
    print(build_line())
    print(f"promised: ≤ {PROMISED_MS} ms at one go")
    for label, readers in (("read on the loop", None), ("read in two workers", DeepReaders())):
        print(label)
        uvloop.run(measure(arguments, readers))


if __name__ == "__main__":
    main()
