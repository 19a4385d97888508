"""The API of a fake Firecracker: micro-http's server, and what a request has to look like.

What each behaviour is and where it is written: fake_firecracker.py.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_CONNECTIONS = 10
MAX_BODY_BYTES = 51200
SERVER_FULL = (
    b"HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n"
    b'{ "error": "Too many open connections" }'
)

Fields = dict[str, tuple[type, bool]]
"""name → (type, required)"""
SCHEMAS: dict[str, Fields] = {
    "PUT machine-config": {
        "vcpu_count": (int, True),
        "mem_size_mib": (int, True),
        "smt": (bool, False),
        "cpu_template": (str, False),
        "track_dirty_pages": (bool, False),
        "huge_pages": (str, False),
    },
    "PUT boot-source": {"kernel_image_path": (str, True), "initrd_path": (str, False), "boot_args": (str, False)},
    "PUT drives": {
        "drive_id": (str, True),
        "is_root_device": (bool, True),
        "is_read_only": (bool, False),
        "path_on_host": (str, False),
        "partuuid": (str, False),
        "cache_type": (str, False),
        "io_engine": (str, False),
        "rate_limiter": (dict, False),
        "socket": (str, False),
    },
    "PUT network-interfaces": {
        "iface_id": (str, True),
        "host_dev_name": (str, True),
        "guest_mac": (str, False),
        "mtu": (int, False),
        "rx_rate_limiter": (dict, False),
        "tx_rate_limiter": (dict, False),
    },
    "PUT vsock": {"vsock_id": (str, False), "guest_cid": (int, True), "uds_path": (str, True)},
    "PUT balloon": {
        "amount_mib": (int, True),
        "deflate_on_oom": (bool, True),
        "stats_polling_interval_s": (int, False),
        "free_page_hinting": (bool, False),
        "free_page_reporting": (bool, False),
    },
    "PATCH balloon": {"amount_mib": (int, True)},
    "PUT actions": {"action_type": (str, True)},
    "PATCH vm": {"state": (str, True)},
    "PUT snapshot/create": {"snapshot_type": (str, False), "snapshot_path": (str, True), "mem_file_path": (str, True)},
    "PUT snapshot/load": {
        "snapshot_path": (str, True),
        "mem_backend": (dict, True),
        "track_dirty_pages": (bool, False),
        "resume_vm": (bool, False),
        "network_overrides": (list, False),
        "vsock_override": (dict, False),
        "clock_realtime": (bool, False),
    },
}
SINCE = {
    "free_page_reporting": (1, 14),
    "free_page_hinting": (1, 14),
    "vsock_override": (1, 16),
    "clock_realtime": (1, 16),
    "mtu": (1, 16),
}
IN_WORDS = {int: "an integer", bool: "a boolean", str: "a string", dict: "a map", list: "a sequence"}


Version = tuple[int, int, int]
Answer = tuple[int, object]
"""Status, and what is said."""


class Fault(Exception):
    """Becomes a 400 with this `fault_message`."""


class Request(NamedTuple):
    """One request that was understood: `what` names it, as `PUT vsock`."""

    what: str
    fields: dict[str, Any]


def parse(method: str, target: str, body: bytes, version: Version) -> Request:
    """Raises Fault with the sentence the real one has for it."""
    path, *more = target.strip("/").split("/")
    if method == "GET":
        if body:
            raise Fault("GET request cannot have a body.")
        what = "/".join([path, *more])
        if what not in ("", "version", "vm/config", "machine-config", "balloon"):
            raise Fault(f"Invalid request method and/or path: GET {path}.")
        return Request(f"GET {what}", {})
    if not body:
        raise Fault(f"Empty {method} request.")
    what = f"{method} {path}/{more[0]}" if path == "snapshot" and more else f"{method} {path}"
    if what not in SCHEMAS:
        raise Fault(f"Invalid request method and/or path: {method} {path}.")
    if path in ("drives", "network-interfaces"):
        if not more or not more[0]:
            raise Fault("The ID cannot be empty.")
        if not all(letter.isalnum() or letter == "_" for letter in more[0]):
            raise Fault("API Resource IDs can only contain alphanumeric characters and underscores.")
    fields = read_fields(body, SCHEMAS[what], version)
    if path == "drives" and fields["drive_id"] != more[0]:
        raise Fault("The id from the path does not match the id from the body!")
    if path == "network-interfaces" and fields["iface_id"] != more[0]:
        raise Fault(f"The id from the path [{more[0]}] does not match the id from the body [{fields['iface_id']}]!")
    return Request(what, fields)


def read_fields(body: bytes, schema: Fields, version: Version) -> dict[str, Any]:
    """As serde with `deny_unknown_fields`. (Where a value is of another type it says where; only roughly so here.)"""
    began = "An error occurred when deserializing the json body of a request: "
    end = f" at line 1 column {len(body)}."
    known = {name: kind for name, kind in schema.items() if SINCE.get(name, (0, 0)) <= version[:2]}
    try:
        found = json.loads(body)
    except ValueError:
        raise Fault(f"{began}expected value at line 1 column 1.") from None
    if not isinstance(found, dict):
        raise Fault(f"{began}invalid type: expected struct{end}")
    for name, value in found.items():
        if name not in known:
            expected = one_of([f"`{one}`" for one in known])
            column = body.find(json.dumps(name).encode()) + len(name) + 2
            raise Fault(f"{began}unknown field `{name}`, expected {expected} at line 1 column {column}.")
        if value is not None and type(value) is not known[name][0]:
            raise Fault(f"{began}invalid type: expected {IN_WORDS[known[name][0]]}{end}")
    for name, (_, required) in known.items():
        if required and found.get(name) is None:
            raise Fault(f"{began}missing field `{name}`{end}")
    return found


def one_of(names: list[str]) -> str:
    """As serde says it: of one and of two it makes other sentences."""
    if len(names) < 3:
        return " or ".join(names)
    return f"one of {', '.join(names)}"


class Api:
    """micro-http's server; `run` is a thread of its own."""

    def __init__(
        self,
        path: str,
        version: Version,
        ask: Callable[[Request], Answer],
        busy: threading.Lock,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """`ask`: has the VMM do it; raises Fault. `busy`: held while an answer is due. `log`: is told of each request.
        Raises OSError where something is at `path`."""
        self.log = log
        self.busy = busy
        self.version = version
        self.ask = ask
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(128)
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.connections: dict[int, tuple[socket.socket, bytearray]] = {}

    def run(self) -> None:
        while True:
            asked: list[tuple[socket.socket, str, str, bytes]] = []
            hung_up: list[int] = []
            for descriptor, events in self.epoll.poll():
                if descriptor == self.listener.fileno():
                    self.accept()
                elif events & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
                    hung_up.append(descriptor)
                else:
                    asked += self.read(descriptor)
            for descriptor in hung_up:
                self.epoll.unregister(descriptor)
                self.connections.pop(descriptor)[0].close()
            for sock, method, target, body in asked:
                with self.busy:
                    self.answer(sock, method, target, body)

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        if len(self.connections) == MAX_CONNECTIONS:
            with contextlib.suppress(OSError):
                sock.send(SERVER_FULL)
            sock.close()
            return
        self.connections[sock.fileno()] = (sock, bytearray())
        self.epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def read(self, descriptor: int) -> list[tuple[socket.socket, str, str, bytes]]:
        """The requests that are whole now."""
        sock, buffer = self.connections[descriptor]
        buffer += sock.recv(65536)
        whole = []
        while b"\r\n\r\n" in buffer:
            head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", 0))
            if length > MAX_BODY_BYTES:
                self.respond(sock, 400, {"error": f"Request payload with size {length} is larger than the limit."})
                buffer.clear()
                break
            if len(rest) < length:
                break
            whole.append((sock, method, target, rest[:length]))
            buffer[:] = rest[length:]
        return whole

    def answer(self, sock: socket.socket, method: str, target: str, body: bytes) -> None:
        if self.log is not None:
            name, with_body = method.capitalize(), f" with body {body.decode(errors='replace')!r}" if body else ""
            self.log(f'The API server received a {name} request on "{target}"{with_body}.')
        try:
            request = parse(method, target, body, self.version)
            status, said = self.ask(request)
        except Fault as fault:
            status, said = 400, {"fault_message": str(fault)}
        self.respond(sock, status, said)

    @staticmethod
    def respond(sock: socket.socket, status: int, said: object) -> None:
        head = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
        content = b"" if status == 204 else json.dumps(said).encode()
        if status != 204:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        with contextlib.suppress(OSError):
            sock.sendall(head.encode() + b"\r\n" + content)
