"""CPU per request of Hive's proxy beside nginx's, in one run: `python benchmarks/proxy.py [--seconds 3] [--rounds 5]`.

The full path (token, allowlist, window, size, body decoded and rebuilt, line, pooled backend, metering, spool, Redis)
against nginx with keep-alive upstreams and no buffering (benchmarks/nginx.conf). Both stand between wrk and the same
nginx that returns a fixed answer. Interleaved: every round measures each once; figures are CPU time of the proxy
process alone (utime + stime), which does not drift with the machine's load the way latency does.
Needs nginx, wrk and redis-server. Loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.link import Link, Reply
from hive.link.messages import AgentRow, DaemonTable, Hello, Marks, Message, ProxyTable
from hive.link.server import LinkServer
from hive.settings import Paths

HERE = Path(__file__).parent
TOKEN = "hm_benchmark"
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
CONF = """
[proxy]
window_requests = 100000000
tier_high_concurrency = 1000
queue_depth = 1000
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Nginx:
    """One nginx process: the fixed answer (`backend`) or the proxy before it (`proxy`)."""

    def __init__(self, directory: Path, role: str, backend_port: int = 0) -> None:
        self.port = free_port()
        conf = (HERE / "nginx.conf").read_text()
        other = "proxy" if role == "backend" else "backend"
        before, _, rest = conf.partition(f"# BEGIN {other}")
        conf = before + rest.partition(f"# END {other}")[2]
        for name, value in {
            "DIR": str(directory),
            "NAME": role,
            "PORT": str(self.port),
            "BACKEND": str(backend_port or self.port),
            "ANSWER": ANSWER,
        }.items():
            conf = conf.replace(name, value)
        path = directory / f"{role}.conf"
        path.write_text(conf)
        self.process = subprocess.Popen(["nginx", "-c", str(path), "-p", str(directory)])
        wait_for_port(self.port)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Daemon:
    """Stands in for the daemon on the link: tells the proxy one agent and the backend, and passes on the marks."""

    def __init__(self, paths: Paths, backend: str, live: redis.Redis[bytes]) -> None:
        self._backend = backend
        self._live = live
        self._epoch = ""
        self._link: Link | None = None
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        LinkServer(
            paths.link_socket,
            name="daemon",
            uids=frozenset({os.getuid()}),
            on_link=self._here,
            on_message=self._heard,
            on_lost=lambda _: None,
        )

    def _here(self, link: Link) -> None:
        self._link = link
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        row = AgentRow(
            id="bench", name="bench", generation=1, gate="open", status="running", tier=Tier.HIGH, model_digest=digest
        )
        backend = BackendInfo(kind=BackendKind.LLAMA, address=self._backend, up=True)
        link.tell(Hello(role="daemon", epoch="bench"))
        link.tell(DaemonTable(agents=[row], backend=backend, models=[ModelInfo(name="m")], marks={}))

    def _heard(self, _link: Link, message: Message, _reply: Reply | None) -> None:
        if isinstance(message, Hello):
            self._epoch = message.epoch
        if isinstance(message, ProxyTable) and not self.port.done():
            self.port.set_result(message.port)

    def commit(self) -> None:
        """All that is in the stream counts as committed (what the real daemon does with SQLite)."""
        last = self._live.xrevrange("hive:usage", count=1)
        if last and self._link is not None:
            fields = last[0][1]
            self._live.xtrim("hive:usage", maxlen=0)
            self._link.tell(Marks(marks={self._epoch: int(fields.get(b"to", fields[b"n"]))}))


def wrk_script(path: Path, head: dict[str, str]) -> Path:
    fields = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **head}
    lines = ['wrk.method = "POST"', f"wrk.body = [=[{BODY}]=]"]
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in fields.items()]
    path.write_text("\n".join(lines))
    return path


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(pid: int, port: int, script: Path, seconds: float, connections: int) -> tuple[float, float]:
    """(CPU µs a request, requests a second) of the process over one run of wrk."""
    process = psutil.Process(pid)
    before = cpu_s(process)
    wrk = await asyncio.create_subprocess_exec(
        "wrk",
        *("-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script)),
        f"http://127.0.0.1:{port}/v1/chat/completions",
        stdout=subprocess.PIPE,
    )
    output = (await wrk.communicate())[0].decode()
    used = cpu_s(process) - before
    requests = int(next(line for line in output.splitlines() if "requests in" in line).split()[0])
    if "Non-2xx" in output or "Socket errors" in output:
        raise SystemExit(f"wrk saw errors:\n{output}")
    return used / requests * 1e6, requests / seconds


async def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hive-bench-") as name:
        directory = Path(name)
        paths = Paths(directory / "state", directory / "run")
        paths.state.mkdir()
        paths.runtime.mkdir()
        (directory / "hive.conf").write_text(CONF)
        started: list[subprocess.Popen[bytes]] = []
        try:
            started.append(
                subprocess.Popen(
                    ["redis-server", "--port", "0", "--unixsocket", str(paths.redis_socket), "--save", ""],
                    stdout=subprocess.DEVNULL,
                )
            )
            backend = Nginx(directory, "backend")
            proxy = Nginx(directory, "proxy", backend.port)
            started += [backend.process, proxy.process]
            while not paths.redis_socket.exists():
                await asyncio.sleep(0.02)
            live: redis.Redis[bytes] = redis.Redis(unix_socket_path=str(paths.redis_socket))
            daemon = Daemon(paths, f"127.0.0.1:{backend.port}", live)
            hive = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hive", "proxy"),
                    *("--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)),
                    *("--config", str(directory / "hive.conf"), "--port", "0", "--ingress-port", "0"),
                ],
            )
            started.append(hive)
            port = await asyncio.wait_for(daemon.port, 20)
            ticker = asyncio.get_running_loop().create_task(commits(daemon))
            await compare(arguments, directory, (hive.pid, port), (proxy.process.pid, proxy.port))
            ticker.cancel()
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(15)


async def commits(daemon: Daemon) -> None:
    while True:
        await asyncio.sleep(0.2)
        await asyncio.to_thread(daemon.commit)


async def compare(
    arguments: argparse.Namespace, directory: Path, hive: tuple[int, int], nginx: tuple[int, int]
) -> None:
    """Prints the figures: openai-python's head, then a bare one; Hive and nginx in turn, the ratio pair by pair."""
    print(f"CPU of the proxy process per request, {len(BODY)}-byte chat body, {arguments.connections} kept connections")
    for label, head in (("openai-python's head", OPENAI_HEAD), ("bare head", {})):
        script = wrk_script(directory / "wrk.lua", head)
        for pid, port in (hive, nginx):
            await measure(pid, port, script, 1, arguments.connections)
        pairs = []
        for _ in range(arguments.rounds):
            ours = await measure(*hive, script, arguments.seconds, arguments.connections)
            peer = await measure(*nginx, script, arguments.seconds, arguments.connections)
            pairs.append((ours, peer))
        ours_us = statistics.median(pair[0][0] for pair in pairs)
        peer_us = statistics.median(pair[1][0] for pair in pairs)
        ratios = sorted(pair[0][0] / pair[1][0] for pair in pairs)
        print(
            f"  {label:21} hive {ours_us:6.1f} µs   nginx {peer_us:6.1f} µs   ratio {statistics.median(ratios):.2f}"
            f" ({ratios[0]:.2f}-{ratios[-1]:.2f})   {statistics.median(pair[0][1] for pair in pairs):.0f} vs"
            f" {statistics.median(pair[1][1] for pair in pairs):.0f} requests/s"
        )
    where()


def where() -> None:
    """Where Hive's share goes: each step alone, in this process."""
    from hive.domain import UsageEvent
    from hive.proxy import body, endpoints
    from hive.proxy.limits import SlidingWindow
    from hive.proxy.metering import read_cost
    from hive.wire.http1 import RequestParser, ResponseParser

    class Nothing:
        def on_head(self, request: object) -> None: ...
        def on_body(self, request: object, size: int) -> None: ...
        def on_request(self, request: object) -> None: ...

    parser = RequestParser(Nothing(), max_body=1 << 24)
    fields = {"Host": "h", "Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **OPENAI_HEAD}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{lines}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
    reply = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n{ANSWER}"
    window = SlidingWindow(10, 60)
    encode = __import__("msgspec").json.Encoder().encode
    event = UsageEvent(
        id="e-1",
        epoch="e",
        event_no=1,
        agent_id="a",
        tenant="t",
        model="m",
        backend="b",
        endpoint="/v1/chat/completions",
    )
    steps: dict[str, Callable[[], object]] = {
        "head and framing (1)": lambda: parser.feed(request),
        "token digest (1)": lambda: hashlib.sha256(TOKEN.encode()).hexdigest(),
        "allowlist (2)": lambda: endpoints.find(b"POST", b"/v1/chat/completions"),
        "window (3)": lambda: window.take(1e9),
        "body decoded and rebuilt (5)": lambda: body.read(BODY.encode(), default_model="", streams=False),
        "answer parsed (9)": lambda: ResponseParser().feed(reply.encode()),
        "usage read (9)": lambda: read_cost(ANSWER.encode()),
        "usage event encoded (10)": lambda: encode(event),
    }
    print("where it goes (alone, µs); the rest is event loop, four system calls, the spool's write, and Python between")
    for name, step in steps.items():
        print(f"  {name:30} {min(timeit.repeat(step, number=2000, repeat=5)) / 2000 * 1e6:5.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="pairs measured")
    parser.add_argument("--connections", type=int, default=32)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
