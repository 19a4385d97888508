"""One request on an upstream connection, and what comes of it."""

from __future__ import annotations

import asyncio

from hive.errors import HiveError
from hive.wire.http1 import Response
from hive.wire.upstream import Pool, UpstreamConnection


class Asker:
    """Asks once and keeps what comes of it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.done: asyncio.Future[bytes | HiveError] = asyncio.get_running_loop().create_future()
        self.body = b""
        self.reused = False

    def ask(self) -> asyncio.Future[bytes | HiveError]:
        connection = self._pool.take()
        self.reused = connection is not None
        if connection is None:
            self._pool.connect(self)
        else:
            connection.send(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", self, reused=True)
        return self.done

    def on_connected(self, connection: UpstreamConnection) -> bool:
        connection.send(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", self, reused=False)
        return True

    def on_unconnected(self, error: HiveError) -> None:
        self.done.set_result(error)

    def on_answer(self, head: Response) -> None: ...

    def on_data(self, data: bytes, *, last: bool) -> None:
        self.body += data
        if last:
            self.done.set_result(self.body)

    def on_closed(self) -> None:
        self.done.set_result(self.body)

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        self.done.set_result(error)
