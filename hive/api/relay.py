"""Requests that came to the runner's listener of the proxy, answered by the same rows as all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from hive.api.params import BODY_MAX_BYTES, JSON
from hive.errors import HiveError, TooLarge
from hive.link.runner import RunnerCall, RunnerSaid


class Relayed(NamedTuple):
    """The way of a relayed request. `authorization`: the values of that field; `peer`: its client, for the log."""

    authorization: Sequence[bytes]
    peer: str


async def answered(app: ASGIApp, call: RunnerCall) -> RunnerSaid:
    """The application's answer to a request that the proxy relays. Raises HiveError."""
    if len(call.body) > BODY_MAX_BYTES:
        raise TooLarge(f"the body is larger than {BODY_MAX_BYTES} bytes")
    path, _, query = call.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"content-type", (call.content_type or JSON).encode("latin-1"))],
        "client": None,
        "server": None,
        "state": {"relayed": Relayed([call.authorization] if call.authorization else [], call.peer)},
    }
    said: list[Message] = []
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    await app(scope, receive, send)
    if not said:
        raise HiveError("nothing was answered")
    fields = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in said[0]["headers"]
        if name not in (b"content-length", b"connection")
    }
    return RunnerSaid(
        status=said[0]["status"], fields=fields, body=b"".join(part.get("body", b"") for part in said[1:])
    )
