"""The API on TCP, and its callers."""

from __future__ import annotations

import http.client
import json
import socket
import time
from asyncio import to_thread
from typing import Any, NamedTuple

from hive.api.failures import Failures
from hive.api.middleware import TcpEntry
from hive.api.server import Tcp
from hive.control.api_tokens import LiveTokens
from hive.control.listening import WantedAddress, listen
from hive.domain import Role


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class TcpApi:
    """`tcp` is what a server is given. Every question is a connection of its own, asked in a thread."""

    def __init__(self, api_tokens: LiveTokens, *, failures: Failures | None = None, hosts: str = "") -> None:
        self.api_tokens = api_tokens
        sock = listen(WantedAddress("127.0.0.1", 0, move=False))
        self.port = int(sock.getsockname()[1])
        names = frozenset(name for name in hosts.split(",") if name)
        self.tcp = Tcp(sock, TcpEntry(api_tokens, "127.0.0.1", names, failures or Failures(limit=100_000)))

    async def token(self, name: str, role: Role, *, expires_in_s: float | None = None) -> str:
        now = time.time()
        expires_at = None if expires_in_s is None else now + expires_in_s
        made_at = min(now, expires_at or now) - 0.001
        _, secret = await self.api_tokens.create(name, role, expires_at=expires_at, actor="uid:0", now=made_at)
        return secret

    async def ask(
        self, method: str, path: str, *, token: str | None = None, body: object = None, **headers: str
    ) -> Answered:
        """`headers`: with _ for -."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        return await to_thread(self._ask, method, path, data, given)

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in {"Content-Length": str(len(body or b"")), **headers}.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return Answered(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        sock.settimeout(60)
        return sock


def until_closed(sock: socket.socket) -> bytes:
    """All that comes until the other side closes, or resets."""
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found
