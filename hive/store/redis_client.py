"""Redis' protocol (RESP2), read by hiredis: one connection, on which questions are asked one after the other.

redis-py would be 7 MiB of the daemon and 90 ms of its start (docs/decisions/073-redis-without-redis-py.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import hiredis
import msgspec

Command = Sequence[str | bytes | int | float]
"""A command with its arguments, like `("SET", "key", b"value", "EX", 60)`."""
READ_BYTES = 64 * 1024
NOT_LET_IN = ("NOAUTH", "WRONGPASS", "NOPERM")
"""Codes of refusals of a user or a password."""


class RedisRefused(Exception):
    """An error that Redis answered. `is_let_in`: it may answer another question to this user."""

    def __init__(self, words: str) -> None:
        """
        >>> RedisRefused("NOAUTH Authentication required."), RedisRefused("NOGROUP No such key").is_let_in
        (RedisRefused('Authentication required.'), True)
        """
        code, _, rest = words.partition(" ")
        self.is_let_in = code not in NOT_LET_IN
        super().__init__(words if self.is_let_in else rest)


class RedisPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis at a socket file, or at a port with TLS or without, and the user it is asked as. Printed without that.

    >>> RedisPlace(host="db.example", user="u", password="secret"), RedisPlace(path="/r.sock")
    (<RedisPlace db.example:6379/0>, <RedisPlace /r.sock>)
    """

    path: str = ""
    host: str = "localhost"
    port: int = 6379
    has_tls: bool = False
    user: str = ""
    password: str = ""
    db: int = 0

    def __repr__(self) -> str:
        return f"<RedisPlace {self.path or f'{self.host}:{self.port}/{self.db}'}>"

    @property
    def greeting(self) -> list[Command]:
        """The commands that begin a connection.

        >>> RedisPlace(password="s", db=2).greeting, RedisPlace(user="u", password="s").greeting
        ([('AUTH', 's'), ('SELECT', 2)], [('AUTH', 'u', 's')])
        """
        user = (self.user,) if self.user else ()
        entering: list[Command] = [("AUTH", *user, self.password)] if self.password else []
        return entering + ([("SELECT", self.db)] if self.db else [])


def packed(commands: Sequence[Command]) -> bytes:
    """
    >>> packed([("SET", "k", 1.5), ("PING",)])
    b'*3\\r\\n$3\\r\\nSET\\r\\n$1\\r\\nk\\r\\n$3\\r\\n1.5\\r\\n*1\\r\\n$4\\r\\nPING\\r\\n'
    """
    as_tuples: list[tuple[Any, ...]] = [tuple(command) for command in commands]
    return b"".join(hiredis.pack_command(command) for command in as_tuples)


class Replies:
    """The replies to some commands, as their bytes come."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._reader = hiredis.Reader(protocolError=ConnectionError, replyError=RedisRefused)
        self.found: list[Any] = []

    def feed(self, data: bytes) -> bool:
        """Takes what came; whether that was all. Raises ConnectionError where it is no reply, or nothing came."""
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._reader.feed(data)
        while len(self.found) < self._count:
            reply = self._reader.gets()
            if reply is False:  # hiredis' word for: not whole yet
                return False
            self.found.append(reply)
        return True

    def taken(self) -> list[Any]:
        """All of them. Raises RedisRefused, the first there is."""
        for reply in self.found:
            if isinstance(reply, RedisRefused):
                raise reply
        return self.found


class RedisClient:
    """Connects when it is first asked, and anew after a failure. `connects`: how often it has."""

    def __init__(self, place: RedisPlace, *, within_s: float) -> None:
        """`within_s`: of a question, with the way there and what is asked before it."""
        self._place = place
        self._within_s = within_s
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.connects = 0

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to these commands, sent together. Raises RedisRefused, OSError, TimeoutError."""
        if not commands:
            return []
        async with asyncio.timeout(self._within_s), self._turn:
            if self._streams is not None and self._streams[0].at_eof():  # Redis was ended since the last question
                self.close()
            try:
                if self._streams is None:
                    self._streams = await self._connected()
                return (await self._asked(self._streams, commands)).taken()
            except RedisRefused:
                raise
            except BaseException:  # what is still to come would be taken for the answer to another question
                self.close()
                raise

    def close(self) -> None:
        """Ends the connection; the next question makes another."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = self._place
        if place.path:
            streams = await asyncio.open_unix_connection(place.path)
        else:
            tls = ssl.create_default_context() if place.has_tls else None
            streams = await asyncio.open_connection(place.host, place.port, ssl=tls)
        try:
            if place.greeting:
                (await self._asked(streams, place.greeting)).taken()
        except BaseException as error:
            streams[1].transport.abort()
            if isinstance(error, RedisRefused):
                error.is_let_in = False  # also in the words of a Redis before 6
            raise
        self.connects += 1
        return streams

    async def _asked(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], commands: Sequence[Command]
    ) -> Replies:
        reader, writer = streams
        writer.write(packed(commands))
        replies = Replies(len(commands))
        while not replies.feed(await reader.read(READ_BYTES)):
            pass
        return replies


class BlockingRedis:
    """The same for a program without a loop."""

    def __init__(self, place: RedisPlace, *, within_s: float) -> None:
        """`within_s`: of each step of a question."""
        self._place = place
        self._within_s = within_s
        self._socket: socket.socket | None = None

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to these commands, sent together. Raises RedisRefused, OSError."""
        if not commands:
            return []
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(self._within_s)
                self._socket.connect(self._place.path)
                if self._place.greeting:
                    self._asked(self._socket, self._place.greeting)
            return self._asked(self._socket, commands)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection; the next question makes another."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        self.close()

    @staticmethod
    def _asked(sock: socket.socket, commands: Sequence[Command]) -> list[Any]:
        sock.sendall(packed(commands))
        replies = Replies(len(commands))
        while not replies.feed(sock.recv(READ_BYTES)):
            pass
        return replies.taken()
