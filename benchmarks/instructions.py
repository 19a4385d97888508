"""Instructions of Hive's proxy for a request and for a chunk: `python benchmarks/instructions.py`.

CPU time varies by more than a change costs that nobody should make without a reason; a count of instructions does not,
whatever else the machine does. The proxy is made as `hive proxy` makes it, with everything on, in one process under
callgrind: scripted transports on both sides, a scripted clock, a scripted loop in uvloop's place; PYTHONHASHSEED=0, no
address randomisation, no garbage collection. Of each way 1,000 are counted after the first 500, so that neither a start
nor a warm-up is. Needs valgrind and setarch; Debian's python3.11 runs it, with the packages of this tree.

`instructions.json` has what each way may take, and on what that was counted: the builds of Python, libc and valgrind,
msgspec, httptools. Over that by more than 3 % fails; on other builds the figures are printed and nothing fails.
`--write` writes the file anew; where that raises a count, `--write WHY` with the words of CHANGELOG.md that say what
for.

`--ways chat chunk`: only these. `--count 100`: of fewer, for a look at a change (half a minute of CPU time; compare it
with itself). `--rounds 5`: how far counts are apart. `--keep DIRECTORY` leaves what callgrind wrote, for
callgrind_annotate; `--cprofile WAY` shows Python's own functions instead, without callgrind.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import hashlib
import importlib.metadata
import json
import operator
import os
import pstats
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BASELINE = HERE.with_suffix(".json")
DEBIANS = Path("/usr/bin/python3.11")
COUNT = 1000
OVER_MAX = 0.03
APART_MAX = 0.003
"""Rounds that are further apart say that something is counted that is not the proxy's."""
STEP_S = 0.001
MARK = "getppid"
"""A call of C that nothing else makes: callgrind writes what it has counted so far when it comes to it."""


# the script ----------------------------------------------------------------------------------------------------------


def scripted_clock() -> list[float]:
    """Seconds since 1970 that only the script moves. Reading them runs no Python, as with the real clocks."""
    now = [1_780_000_000.0]
    time.monotonic = time.time = partial(operator.getitem, now, 0)  # type: ignore[assignment]
    return now


class ScriptedLoop(asyncio.AbstractEventLoop):
    """Runs what is due when the script says so. No timer ends: nothing here waits that long."""

    def __init__(self) -> None:
        self._due: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        asyncio._set_running_loop(self)

    def run_due(self) -> None:
        due = self._due
        while due:
            call, arguments = due.popleft()
            call(*arguments)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # noqa: ARG002
        self._due.append((callback, args))

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # noqa: ARG002
        return asyncio.TimerHandle(when, callback, args, self)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # noqa: ARG002
        return self.call_at(self.time() + delay, callback, *args)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def time(self) -> float:
        return time.monotonic()

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)


class ScriptedTransport(asyncio.Transport):
    """Takes all that is written; a server's gives `answer` for each request, at the loop's next turn."""

    def __init__(self, protocol: Any = None, answer: bytes = b"") -> None:
        super().__init__()
        self.protocol = protocol
        self.last = b""
        self._answer = answer
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.last = data
        if self._answer:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, self._answer)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Script:
    """One proxy of its own, one agent's connection to it, and what the servers answer.

    `marks` are called before and after what is counted.
    """

    def __init__(
        self, directory: Path, now: list[float], count: int, marks: tuple[Callable[[], object], ...], answer: bytes
    ) -> None:
        from peers import CONF, TOKEN

        from hive.domain import Tier
        from hive.link.messages import AgentRow
        from hive.proxy.server import ProxyServer
        from hive.settings.file import load_text
        from hive.settings.table import Paths
        from hive.wire import upstream

        self._now = now
        self.warm, self.steps = count // 2, count // 2 + count
        self._marks = marks
        self._loop = asyncio.get_running_loop()
        self._answer = answer
        self.server: Any = None
        """The connection to the server that was made last."""
        upstream.dial = self._dial  # type: ignore[assignment]
        directory.mkdir()
        paths, settings = Paths(directory / "state", directory / "run"), load_text(CONF, env={}).settings
        paths.state.mkdir()
        self.proxy = ProxyServer(paths, settings, handed={}, ports=(0, 0), move=True, descriptors=4096)
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        row = AgentRow(
            id="bench",
            name="bench",
            generation=1,
            gate="open",
            status="running",
            tier=Tier.HIGH,
            address="127.0.0.1:2",
            model_digest=digest,
            ingress_digest=digest,
        )
        self.proxy.registry.replace_all([row], "")

    async def _dial(self, address: str, make: Callable[[], Any], **_: object) -> Any:  # noqa: ARG002
        self.server = make()
        self.server.connection_made(ScriptedTransport(self.server, self._answer))
        return self.server

    def connect(self, make: Callable[[socket.socket], Any]) -> None:
        self._client = make(socket.socket())
        self._transport = ScriptedTransport()
        self._client.connection_made(self._transport)

    def ask(self, request: bytes) -> None:
        self._now[0] += STEP_S
        self._client.data_received(request)
        self._loop.run_due()
        if self._client.exchange is not None or not self._transport.last.startswith(b"HTTP/1.1 200 "):
            raise AssertionError(self._transport.last)

    def begin_stream(self, request: bytes) -> None:
        self._client.data_received(request)
        self._loop.run_due()

    def stream(self, chunk: bytes) -> None:
        self._now[0] += STEP_S
        self.server.data_received(chunk)
        self._loop.run_due()
        if chunk[-20:] != self._transport.last[-20:]:
            raise AssertionError(self._transport.last)

    def count(self, step: Callable[[int], None]) -> None:
        for number in range(self.warm):
            step(number)
        self._marks[0]()
        for number in range(self.warm, self.steps):
            step(number)
        self._marks[-1]()


# the ways ------------------------------------------------------------------------------------------------------------


def answer_of(head: str, body: str) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\n{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )


def chat(begin: Callable[[bytes], Script], content_bytes: int = 0, *, is_pooled: bool = False) -> None:
    """openai-python's head, everything on; `is_pooled`: to a model of the pool instead of the active backend."""
    import proxy as shapes

    from hive.domain import BackendInfo, BackendKind, ModelInfo
    from hive.link.pool import SlotRow
    from hive.proxy.slot_orders import SlotOrders

    script = begin(answer_of("Server: llama.cpp\r\n", shapes.ANSWER))
    backend, models = BackendInfo(kind=BackendKind.LLAMA, address="127.0.0.1:1", up=True), [ModelInfo(name="m")]
    if is_pooled:
        SlotOrders(script.proxy.path, lambda _: None).heard(
            [SlotRow(id="m-1", generation=1, is_open=True, backend=backend, models=models)]
        )
    else:
        script.proxy.path.open_backend(backend, models)
    request = shapes.whole_request(shapes.OPENAI_HEAD)
    if content_bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        body = body.replace(b"x" * 1950, b"x" * content_bytes)
        head = re.sub(rb"(?<=Content-Length: )\d+", b"%d" % len(body), head)
        request = head + b"\r\n\r\n" + body
    script.connect(script.proxy._model_connection)
    script.count(lambda _: script.ask(request))


def call(begin: Callable[[bytes], Script]) -> None:
    """A caller of an agent, through ingress, which makes a connection for each."""
    from peers import TOKEN

    script = begin(answer_of("Date: Sat, 28 Nov 2026 19:42:00 GMT\r\nServer: uvicorn\r\n", '{"said":"Hello there"}'))
    body = '{"text":"Hello"}'
    request = (
        "POST /agents/bench/turn HTTP/1.1\r\nHost: h\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        f"Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nX-Hive-Token: {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    script.connect(script.proxy._ingress_connection)
    script.count(lambda _: script.ask(request))


def chunk(begin: Callable[[bytes], Script]) -> None:
    """A chunk of vLLM's in the middle of a stream, whose usage Hive has asked for."""
    import streams as shapes

    from hive.domain import BackendInfo, BackendKind, ModelInfo

    shapes.now_ns = lambda: 10**15  # type: ignore[assignment]
    script = begin(shapes.HEAD + shapes.chunk(0))
    chunks = [shapes.chunk(number) for number in range(script.steps)]
    script.proxy.path.open_backend(
        BackendInfo(kind=BackendKind.VLLM, address="127.0.0.1:1", up=True), [ModelInfo(name="m")]
    )
    script.connect(script.proxy._model_connection)
    script.begin_stream(shapes.request_for("flow", 1, 1))
    script.count(lambda number: script.stream(chunks[number]))


WAYS: dict[str, tuple[str, Callable[[Callable[[bytes], Script]], None]]] = {
    "chat": ("openai-python's 17 fields, 2 KB", chat),
    "long chat": ("the same with 32 KB", partial(chat, content_bytes=32 * 1024)),
    "pool": ("the same with 2 KB, to a model of the pool", partial(chat, is_pooled=True)),
    "call": ("of an agent, through ingress", call),
    "chunk": ("of a stream", chunk),
}


def child(ways: list[str], count: int, *marks: Callable[[], object]) -> None:
    """The part that is counted: runs in a process of its own."""
    now = scripted_clock()
    gc.disable()
    ScriptedLoop()
    with tempfile.TemporaryDirectory(prefix="hive-instructions-") as directory:
        for number, way in enumerate(ways):
            WAYS[way][1](partial(Script, Path(directory) / str(number), now, count, marks))


# counting ------------------------------------------------------------------------------------------------------------


def counted_on() -> dict[str, str]:
    """The builds on which the counts depend, of the interpreter that this runs in."""
    is_new = " avx2 " in Path("/proc/cpuinfo").read_text()
    return {
        "python": sys.version,
        "libc": os.confstr("CS_GNU_LIBC_VERSION") or "",
        "msgspec": importlib.metadata.version("msgspec"),
        "httptools": importlib.metadata.version("httptools"),
        "processor": f"{os.uname().machine}{' avx2' if is_new else ''}",
    }


def started(ways: list[str], count: int, directory: Path) -> tuple[dict[str, str], dict[str, int]]:
    """(on what it ran, instructions of each way)."""
    python = str(DEBIANS if DEBIANS.exists() else sys.executable)
    words = ["setarch", "-R", "valgrind", "--tool=callgrind", f"--callgrind-out-file={directory / 'out'}"]
    words += [f"--dump-before={MARK}", python, str(HERE), "--child", "--count", str(count), "--ways", *ways]
    packages = sysconfig.get_path("purelib")
    environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "PYTHONPATH": f"{HERE.parents[1]}:{packages}"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(words)}\n{ran.stderr[-3000:]}")
    counts = {}
    for number, way in enumerate(ways, 1):
        found = re.search(r"^(?:summary|totals): (\d+)", (directory / f"out.{2 * number}").read_text(), re.MULTILINE)
        assert found is not None
        counts[way] = round(int(found[1]) / count)
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {**json.loads(ran.stdout), "valgrind": valgrind}, counts


def compare(built: dict[str, str], counts: dict[str, int]) -> bool:
    """Prints each way beside the baseline; whether all are within it."""
    baseline = json.loads(BASELINE.read_text())
    others = [f"{name} {built[name]!r}, not {was!r}" for name, was in baseline["on"].items() if built[name] != was]
    more = {way: count / baseline["instructions"][way] - 1 for way, count in counts.items()}
    for way, count in counts.items():
        print(f"  {way:10} {count:9,} instructions  {more[way]:+7.2%}   {WAYS[way][0]}")
    if others:
        print(f"nothing is compared: the baseline is of another build: {'; '.join(others)}")
        return True
    over = [way for way in counts if more[way] > OVER_MAX]
    if over:
        print(f"MORE THAN {OVER_MAX:.0%} OVER THE BASELINE: {', '.join(over)}. Make it cheaper, or say in CHANGELOG.md")
        print("what it is for and run `python benchmarks/instructions.py --write 'THOSE WORDS'`")
    elif min(more.values()) < -OVER_MAX:
        print("less than the baseline: `--write` keeps it")
    return not over


def write(built: dict[str, str], counts: dict[str, int], why: str) -> None:
    """The baseline is this. Where it raises a count, it needs a reason."""
    was = json.loads(BASELINE.read_text())
    raised = [way for way, count in counts.items() if count > was["instructions"].get(way, count) * (1 + APART_MAX)]
    if raised and not why and was["on"] == built:
        sys.exit(f"{', '.join(raised)}: more than before; name the words of CHANGELOG.md that say what for")
    baseline = {"why": why or was["why"], "on": built, "instructions": {**was["instructions"], **counts}}
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    parser.add_argument("--count", type=int, default=COUNT, help="of each way")
    parser.add_argument("--rounds", type=int, default=1, help="of counting")
    parser.add_argument("--write", nargs="?", const="", metavar="WHY", help="write the baseline anew")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave what callgrind wrote there")
    parser.add_argument("--cprofile", choices=WAYS, help="show Python's functions, without callgrind")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.ways, arguments.count, os.getppid)
        print(json.dumps(counted_on()))
        return 0
    if arguments.cprofile is not None:
        profile = cProfile.Profile()
        child([arguments.cprofile], arguments.count, profile.enable, profile.disable)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return 0
    rounds = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory:
            if arguments.keep is not None:
                directory = arguments.keep / str(number)
                os.makedirs(directory)
            built, counts = started(arguments.ways, arguments.count, Path(directory))
        rounds.append(counts)
    if arguments.rounds > 1:
        for way in arguments.ways:
            found = [counts[way] for counts in rounds]
            apart = max(found) / min(found) - 1
            print(f"  {way:10} {min(found):,} to {max(found):,}: {apart:.3%} apart; at most {APART_MAX:.1%}")
    if arguments.write is not None:
        write(built, counts, arguments.write)
    return 0 if compare(built, counts) else 1


if __name__ == "__main__":
    sys.exit(main())
