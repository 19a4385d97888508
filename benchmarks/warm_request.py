"""Cost of the pool for a request whose model is loaded: `python benchmarks/warm_request.py --before TREE`.

Instructions of the proxy's own objects, from the first byte of a request to the last of its answer, counted by
callgrind: CPU time varies by more than what is looked for. One process, one agent, no sockets: scripted transports on
both sides, a scripted clock, PYTHONHASHSEED=0, no address randomisation, no garbage collection. What counts is the
slope, (count at 1,200 requests - count at 200) / 1,000, so that neither start nor warm-up does.

`--before`: a checkout of the last commit without the pool (07ae4a4: `git worktree add --detach TREE 07ae4a4`); its own
code runs in it, with this interpreter's packages. Three ways are counted: before, now with the one active backend, and
now with a model of the pool, whose flows are told to the daemon. CPU time per instruction is measured in the same
process without callgrind, and makes microseconds of the difference. Needs valgrind and setarch. Some four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FEW, MANY = 200, 1200
NATIVE = 6000
MORE_US_MAX = 5.0
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1950}], "temperature": 0.7})
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    "User-Agent: OpenAI/Python 3.51.0\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n"
)
REQUEST = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
SAID = (
    '{"id":"c","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    '"content":"Hello there"},"finish_reason":"stop"}],"usage":{"prompt_tokens":19,"completion_tokens":9,'
    '"total_tokens":28}}'
)
ANSWER = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(SAID)}\r\n\r\n{SAID}".encode()


class Clock:
    """Seconds that only `step` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedTransport(asyncio.Transport):
    """Takes all that is written; a backend's answers each write at the loop's next turn."""

    def __init__(self, protocol: Any = None) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = 0
        self.last: Any = b""

    def write(self, data: Any) -> None:
        self.written += 1
        self.last = data
        if self.protocol is not None:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, ANSWER)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return

    def close(self) -> None:
        return

    def abort(self) -> None:
        return


class Outside:
    """The receiver of what the data path tells others; nothing comes of it."""

    def wake(self, *_: Any) -> None:
        raise AssertionError("nobody sleeps here")

    def tell_quiet(self, _: str) -> None:
        return

    def record(self, _: Any, then: Any = None) -> int:
        if then is not None:
            asyncio.get_running_loop().call_soon(then)
        return 0


async def requests(count: int, clock: Clock, *, is_pooled: bool) -> float:
    """So many requests one after the other; CPU seconds they took, without the first of them."""
    import msgspec

    from hive.domain import BackendInfo, BackendKind, ModelInfo
    from hive.link.messages import AgentRow
    from hive.proxy.datapath import DataPath
    from hive.proxy.forward import Exchange
    from hive.proxy.registry import Registry
    from hive.settings.table import Settings
    from hive.wire import connection as wire
    from hive.wire import upstream
    from hive.wire.deadlines import Deadlines

    async def dial(_: str, make: Any, **__: Any) -> Any:
        protocol = make()
        protocol.connection_made(ScriptedTransport(protocol))
        return protocol

    upstream.dial = dial  # type: ignore[assignment]
    settings = Settings()
    proxy = msgspec.structs.replace(settings.proxy, window_requests=1 << 30)
    settings = msgspec.structs.replace(settings, proxy=proxy)
    outside, deadlines = Outside(), Deadlines()
    registry = Registry(outside, proxy, settings.tenants)
    path = DataPath(
        registry=registry,
        settings=settings,
        deadlines=deadlines,
        usage=outside,
        epoch="e",
        on_activity=lambda _: None,
    )
    registry.replace_all([AgentRow(id="a1", name="alice", generation=1, gate="open", status="running")], "")
    backend = BackendInfo(kind=BackendKind.LLAMA, address="127.0.0.1:1", up=True)
    models = [ModelInfo(name="m", owned_by="t")]
    if is_pooled:
        from hive.link.pool import SlotRow
        from hive.proxy.slot_orders import SlotOrders

        path.use_backend(None, [])
        orders = SlotOrders(path, lambda _: None)
        rows = [SlotRow(id="m-1", generation=1, is_open=True, backend=backend, models=models, wait_s=30.0)]
        other = msgspec.structs.replace(rows[0], id="n-1", models=[ModelInfo(name="n")])
        orders.heard([*rows, other])
    else:
        path.use_backend(backend, models)
    client = ScriptedTransport()
    connection = wire.Connection(
        socket.socketpair()[0],
        limits=wire.ConnectionLimits(proxy.head_s, proxy.body_idle_s, proxy.keepalive_s, proxy.body_max_bytes),
        deadlines=deadlines,
        open_exchange=partial(Exchange, path),
        stays_open=lambda _: False,
        on_closed=lambda _: None,
    )
    alice = registry.by_id["a1"]
    connection.owner, connection.needs_token = alice, False
    path.shares.enter(connection, alice.connections)
    connection.connection_made(client)
    began = 0.0
    for number in range(count):
        if number == FEW // 2:
            began = time.process_time()
        clock.now += 0.001
        before = client.written
        connection.data_received(REQUEST)
        while connection.exchange is not None or client.written == before:
            await asyncio.sleep(0)
        if not bytes(client.last).startswith(b"HTTP/1.1 200 "):
            raise AssertionError(client.last)
    took = time.process_time() - began
    deadlines.close()
    return took


def child(count: int, *, is_pooled: bool) -> None:
    """The part that is counted: runs in a process of its own."""
    import hive

    clock = Clock()
    time.monotonic = clock  # type: ignore[assignment]
    gc.disable()
    took = asyncio.run(requests(count, clock, is_pooled=is_pooled))
    print(json.dumps({"hive": hive.__file__, "cpu_us": took / (count - FEW // 2) * 1e6}))


def started(tree: Path, count: int, *, is_pooled: bool, counted: bool) -> tuple[dict[str, Any], int]:
    """(what the child said, its instructions; 0 where they were not counted)."""
    words = [sys.executable, "-P", str(HERE), "--child", str(count), *(["--pooled"] if is_pooled else [])]
    if counted:
        words = ["setarch", "-R", "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *words]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{tree}: {ran.stderr[-2000:]}")
    said = json.loads(ran.stdout)
    if not Path(said["hive"]).is_relative_to(tree):
        sys.exit(f"{said['hive']} ran, not {tree}")
    found = re.search(r"Collected : (\d+)", ran.stderr)
    return said, int(found[1]) if found else 0


def slope(tree: Path, *, is_pooled: bool) -> float:
    """Instructions of one request."""
    few, many = (started(tree, count, is_pooled=is_pooled, counted=True)[1] for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout of 07ae4a4")
    parser.add_argument("--rounds", type=int, default=1, help="of counting each way")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pooled", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags.child, is_pooled=flags.pooled)
        return 0
    if flags.before is None:
        parser.error("--before: where is the checkout of 07ae4a4?")
    before, now = flags.before.resolve(), HERE.parents[1]
    ways = {
        "before the pool": (before, False),
        "now, active backend": (now, False),
        "now, a model of the pool": (now, True),
    }
    counts: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(2) as two:
        for _ in range(flags.rounds):
            for name, count in zip(
                ways, two.map(lambda way: slope(way[0], is_pooled=way[1]), ways.values()), strict=True
            ):
                counts[name].append(count)
    native_us = min(started(before, NATIVE, is_pooled=False, counted=False)[0]["cpu_us"] for _ in range(5))
    base = sorted(counts["before the pool"])[flags.rounds // 2]
    ns_each = native_us * 1000 / base
    print(f"{native_us:.1f} us of CPU a request before the pool, {ns_each:.3f} ns an instruction")
    over = False
    for name, found in counts.items():
        middle, apart = sorted(found)[flags.rounds // 2], (max(found) - min(found)) / min(found)
        more_us = (middle - base) * ns_each / 1000
        over = over or more_us > MORE_US_MAX
        print(f"{name:26} {middle:10,.0f} instructions (spread {apart:.2%}), {more_us:+.2f} us")
    print(f"at most {MORE_US_MAX:g} us more: {'NOT REACHED' if over else 'reached'}")
    return over


if __name__ == "__main__":
    sys.exit(main())
