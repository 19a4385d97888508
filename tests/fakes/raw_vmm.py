"""A Firecracker, real or fake, as a process of its own, and its API byte by byte: Hive's own client is not asked."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.firecracker_programs import Programs

BOOT_ARGS = "console=ttyS0 reboot=k panic=1 pci=off"
UP = "as init process"
"""In the last line of a kernel before its first program: the keyboard's driver is up by then."""
SILENCE_S = 0.15
PAUSED, RESUMED = {"state": "Paused"}, {"state": "Resumed"}


class Answer:
    def __init__(self, raw: bytes) -> None:
        self.head, _, body = raw.partition(b"\r\n\r\n")
        self.status = int(self.head.split()[1])
        self.said: dict[str, Any] = json.loads(body) if body else {}


def read_answer(sock: socket.socket) -> bytes:
    """Up to the end of its body."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        if not (chunk := sock.recv(65536)):
            return raw
        raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def request_of(method: str, path: str, fields: dict[str, Any] | None) -> bytes:
    body = b"" if fields is None else json.dumps(fields, separators=(",", ":")).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Vmm:
    """One fake in a directory of its own."""

    def __init__(self, programs: Programs, directory: Path, *arguments: str) -> None:
        self.programs = programs
        self.directory = directory
        self.api, self.vsock = directory / "api.sock", directory / "v.sock"
        self.console = directory / "console"
        with self.console.open("wb") as console:
            self.process = subprocess.Popen(
                [programs.firecracker, "--id", "f1", "--api-sock", str(self.api), *arguments],
                stdout=console,
                stderr=console,
            )
        until(self.listens)

    def listens(self) -> bool:
        return listens(self.api)

    def connect(self) -> socket.socket:
        return connected(self.api)

    def call(self, method: str, path: str, fields: dict[str, Any] | None = None) -> Answer:
        with self.connect() as sock:
            sock.sendall(request_of(method, path, fields))
            return Answer(read_answer(sock))

    def ok(self, method: str, path: str, fields: dict[str, Any]) -> None:
        answer = self.call(method, path, fields)
        assert (answer.status, answer.said) == (204, {}), answer.said

    def boot(self, kind: str) -> None:
        """A machine whose guest runs this."""
        self.ok("PUT", "/boot-source", {"kernel_image_path": str(self.programs.kernel), "boot_args": BOOT_ARGS})
        rootfs = {"drive_id": "rootfs", "is_root_device": True, "path_on_host": str(self.programs.guest(kind))}
        self.ok("PUT", "/drives/rootfs", rootfs)
        self.ok("PUT", "/vsock", {"guest_cid": 3, "uds_path": str(self.vsock)})
        self.ok("PUT", "/actions", {"action_type": "InstanceStart"})

    def pause(self) -> None:
        self.ok("PATCH", "/vm", PAUSED)

    def resume(self) -> None:
        self.ok("PATCH", "/vm", RESUMED)

    def state(self) -> str:
        return str(self.call("GET", "/").said.get("state"))

    def says(self, line: str) -> None:
        """Waits for a line on the console."""
        until(lambda: line in self.console.read_text())

    def dial(self, port: int) -> socket.socket:
        """`CONNECT`, whose answer is not read."""
        sock = connected(self.vsock)
        sock.sendall(f"CONNECT {port}\n".encode())
        return sock


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def listens(path: Path) -> bool:
    try:
        connected(path).close()
    except OSError:
        return False
    return True


def until(predicate: Callable[[], object], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not predicate():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def hears_nothing(sock: socket.socket, for_s: float = SILENCE_S) -> bool:
    """Whether nothing comes in that time. For what is to come, read: how long that takes is the machine's affair."""
    sock.settimeout(for_s)
    try:
        return sock.recv(100) is None
    except TimeoutError:
        return True
    finally:
        sock.settimeout(60)
