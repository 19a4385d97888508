"""Runs inside the virtual machine of test_vsock_vm.py: `python3 vsock_guest.py RESULTS`, Hive on the path.

The real `hive proxy` (on uvloop) and the real demo backend, with the daemon's end of the link in this process, which
says that the agent of CID 1, the machine's own loopback, is bob. What callers over AF_VSOCK were answered is written
to RESULTS as JSON.
"""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - other processes send no asyncio events, and the loop may wait for the disk
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import AgentGone, AgentIs, AgentRow, DaemonTable, Hello, ProxyTable
from hive.link.server import LinkServer
from hive.settings.table import Paths

LOOPBACK = 1
PORT = 11434
WITHIN_S = 60
"""Everything is some twenty times slower here."""
MODEL = "hive-demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Who calls?"}]}


class Daemon:
    """The daemon's end of the link: tells one agent and a backend, and changes its mind when told to."""

    def __init__(self, paths: Paths, backend: str) -> None:
        self._backend = backend
        self._link: Link | None = None
        self.ready = asyncio.Event()
        LinkServer(
            paths.link_socket,
            name="daemon",
            uids=frozenset(),
            on_link=self._here,
            on_message=self._heard,
            on_lost=lambda _: None,
        )

    def _here(self, link: Link) -> None:
        self._link = link
        backend = BackendInfo(kind=BackendKind.DEMO, address=self._backend, up=True)
        link.tell(Hello(role="daemon", epoch="guest"))
        link.tell(DaemonTable(agents=[bob(LOOPBACK)], backend=backend, models=[ModelInfo(name=MODEL)], marks={}))

    def _heard(self, _link: Link, message: LinkMessage, _reply: LinkReply | None) -> None:
        if isinstance(message, ProxyTable):
            self.ready.set()

    async def tell(self, message: LinkMessage) -> None:
        """Tells, and gives the proxy time to hear it."""
        assert self._link is not None
        self._link.tell(message)
        await asyncio.sleep(0.5)


def bob(cid: int | None) -> AgentRow:
    return AgentRow(id="b1", name="bob", generation=1, gate="open", status="running", tier=Tier.LOW, cid=cid)


class Relay:
    """Between the proxy and its backend: counts what comes through, and the answers the proxy did not want to the end.

    (This machine's TCP loopback is down.)
    """

    def __init__(self, path: Path, backend: Path) -> None:
        self.path = path
        self._backend = backend
        self.bytes = 0
        self.cut = 0

    async def start(self) -> None:
        await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_backend, to_backend = await asyncio.open_unix_connection(str(self._backend))
        ends: list[bytes] = []
        back = asyncio.ensure_future(_copy(from_backend, writer, lambda data: ends.append(data[-5:])))
        await _copy(reader, to_backend, self._count)
        self.cut += bool(ends) and not ends[-1].endswith((b"0\r\n\r\n", b"}"))
        await back

    def _count(self, data: bytes) -> None:
        self.bytes += len(data)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, see: Callable[[bytes], None]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            see(data)
            writer.write(data)
            await writer.drain()
    writer.close()


def ask(body: dict[str, Any], fields: str = "") -> dict[str, Any]:
    """One chat over a connection of its own: status, body as text, the connection's context ids; or what went wrong."""
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: hive\r\n{fields}connection: close\r\n"
    try:
        with socket.socket(socket.AF_VSOCK) as sock:
            sock.settimeout(WITHIN_S)
            sock.connect((LOOPBACK, PORT))
            sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            answer = b""
            while data := sock.recv(65536):
                answer += data
    except OSError as error:
        return {"error": repr(error)}
    status, _, rest = answer.partition(b"\r\n")
    return {"status": status.decode(), "text": rest.partition(b"\r\n\r\n")[2].decode(), "bytes": len(answer)}


def leave_in_the_middle() -> None:
    """Reads the beginning of a long stream and goes."""
    content = json.dumps({**CHAT, "stream": True, "max_tokens": 1000}).encode()
    with socket.socket(socket.AF_VSOCK) as sock:
        sock.settimeout(WITHIN_S)
        sock.connect((LOOPBACK, PORT))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: hive\r\ncontent-length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        sock.recv(100)


async def until(question: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not question():
            await asyncio.sleep(0.05)


async def story(directory: Path, results: dict[str, Any]) -> None:
    paths = Paths(directory / "state", directory / "run")
    paths.state.mkdir()
    paths.runtime.mkdir()
    (directory / "hive.conf").write_text("[proxy]\nvsock = on\n")
    demo = directory / "demo.sock"
    hive = [sys.executable, "-m", "hive"]
    started = [subprocess.Popen([*hive, "demo-backend", "--socket", str(demo)])]
    try:
        await until(demo.exists)
        relay = Relay(directory / "relay.sock", demo)
        await relay.start()
        daemon = Daemon(paths, str(relay.path))
        where = ["--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)]
        config = ["--config", str(directory / "hive.conf"), "--port", "0", "--ingress-port", "0"]
        started.append(subprocess.Popen([*hive, "proxy", *where, *config]))
        await until(lambda: daemon.ready.is_set() or started[1].poll() is not None)
        await callers(daemon, relay, results)
        results["proxy still runs"] = started[1].poll() is None
        results["uvloop"] = "uvloop" in Path(f"/proc/{started[1].pid}/maps").read_text()
    finally:
        for process in reversed(started):
            process.terminate()
        results["exit codes"] = [process.wait(WITHIN_S) for process in reversed(started)]


async def callers(daemon: Daemon, relay: Relay, results: dict[str, Any]) -> None:
    async def asked(body: dict[str, Any], fields: str = "") -> dict[str, Any]:
        before = relay.bytes
        answer = await asyncio.to_thread(ask, body, fields)
        return {**answer, "backend got": relay.bytes - before}

    results["chat"] = await asked(CHAT)
    results["stream"] = await asked({**CHAT, "stream": True})
    results["with a key"] = await asked(CHAT, "authorization: Bearer sk-none\r\n")
    large = [{"role": "user", "content": "x" * 4_000_000}]
    results["large"] = await asked({**CHAT, "messages": large})
    together = await asyncio.gather(*(asyncio.to_thread(ask, {**CHAT, "stream": True}) for _ in range(10)))
    results["together"] = [answer.get("status") for answer in together]
    before = relay.cut
    await asyncio.to_thread(leave_in_the_middle)
    with contextlib.suppress(TimeoutError):
        await until(lambda: relay.cut > before)
    results["cut"] = (before, relay.cut)
    await daemon.tell(AgentIs(row=bob(cid=5)))
    results["another cid"] = await asked(CHAT)
    await daemon.tell(AgentIs(row=bob(LOOPBACK)))
    results["its cid again"] = await asked(CHAT)
    await daemon.tell(AgentGone(agent="b1"))
    results["removed"] = await asked(CHAT, "authorization: Bearer sk-none\r\n")


def main() -> None:
    results: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version(), "pid": os.getpid()}
    directory = Path("/tmp/hive")
    directory.mkdir()
    try:
        asyncio.run(story(directory, results))
    except Exception:
        results["failed"] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
