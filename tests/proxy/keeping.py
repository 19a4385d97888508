"""A proxy whose daemon keeps responses: a real link to a real file."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from hive.control.kept_responses import KeptResponses
from hive.domain import BackendKind
from hive.link.background import FromProxyBackground
from hive.link.client import LinkClient
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.server import LinkServer
from hive.proxy.background_responses import BackgroundSource
from hive.proxy.stored_responses import StoredResponses
from hive.settings.table import Proxy as ProxySettings
from hive.store.responses_file import ResponsesFile
from tests.proxy.harness import Backend, Proxy, proxied
from tests.waiting import until

OUTPUT = [{"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}]


class Daemon:
    """The daemon's end of the link: what it keeps is in a file. `heard`: all it was told and asked."""

    def __init__(self, directory: Path) -> None:
        self.file = ResponsesFile(directory / "responses.db")
        settings = ProxySettings(responses_kept_mb=64)
        self.kept = KeptResponses(self.file, lambda agent: agent in ("a1", "bob"), lambda: settings)
        self.heard: list[LinkMessage] = []
        self.backend: Backend | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.instead: LinkMessage | None = None
        self.hear_background: Callable[[LinkMessage, LinkReply], None] | None = None
        """Takes what is asked of responses that are made in the background."""
        self._path = directory / "link.sock"
        self._server: LinkServer | None = None
        self.start()
        self.client = LinkClient(self._path, name="daemon", on_link=lambda _: None, on_message=lambda *_: None)

    def start(self) -> None:
        self._server = LinkServer(
            self._path,
            name="proxy",
            uids=frozenset(),
            on_link=lambda _: None,
            on_message=self._hear,
            on_lost=lambda _: None,
        )

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _hear(self, _: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        self.heard.append(message)
        if self.instead is not None and reply is not None:
            reply(self.instead)
        elif self.hear_background is not None and reply is not None and isinstance(message, FromProxyBackground):
            self.hear_background(message, reply)
        elif self.go.is_set():
            self.kept.hear(message, reply)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def keeping(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Proxy, Daemon]]:
    async with proxied(tmp_path, responses_kept_mb=64, **settings) as (proxy, backend):
        proxy.use(backend, BackendKind.LLAMA)
        daemon = Daemon(tmp_path)
        daemon.backend = backend
        await until(lambda: daemon.client.connected)
        proxy.path.stored = StoredResponses(lambda: daemon.client.link)
        proxy.path.background = BackgroundSource(lambda: daemon.client.link)
        try:
            yield proxy, daemon
        finally:
            daemon.client.close()
            daemon.stop()
            daemon.kept.close()
            await asyncio.sleep(0.01)


def keep(proxy: Proxy, name: str = "resp_1", *, previous: str = "", agent: str = "a1", text: str = "hello") -> bytes:
    response = json.dumps({"id": name, "object": "response", "output": OUTPUT, "metadata": {}}).encode()
    assert proxy.path.stored is not None
    asked = json.dumps([{"role": "user", "content": text}]).encode()
    assert proxy.path.stored.keep(agent, name, previous_id=previous, asked=asked, response=response)
    return response
