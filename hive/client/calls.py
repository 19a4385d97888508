"""Questions of `hive up` and its demo to the daemon, over its unix socket, without holding the loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hive.client.client import ANSWER_MAX_BYTES
from hive.errors import DependencyDown, HiveError, TimedOut, by_code
from hive.host.http_call import calling, dialled
from hive.http_answer import CallFailed, encode_request

ANSWER_S = 5.0
Answer = dict[str, Any]


class AsyncClient:
    """The daemon's REST API. Every call raises DependencyDown, TimedOut, or the error the daemon answered with."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def get(self, target: str, *, within_s: float = ANSWER_S) -> Answer:
        """The answer to `GET target`, a JSON object."""
        return await self._ask("GET", target, None, within_s)

    async def post(self, target: str, body: Mapping[str, object] | None = None, *, within_s: float) -> Answer:
        return await self._ask("POST", target, body or {}, within_s)

    async def put(self, target: str, body: bytes, *, within_s: float) -> Answer:
        """`body` is JSON already."""
        return await self._ask("PUT", target, body, within_s)

    async def _ask(
        self, method: str, target: str, body: Mapping[str, object] | bytes | None, within_s: float
    ) -> Answer:
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        fields = {"Host": "hive", "Connection": "close"}
        if content is not None:
            fields["Content-Type"] = "application/json"
        request = encode_request(method, target, fields, content)
        try:
            async with asyncio.timeout(within_s), calling(dialled(str(self._socket)), request) as call:
                status, said = await call.status(), await call.body(ANSWER_MAX_BYTES)
        except TimeoutError:
            raise TimedOut(f"the daemon did not answer {method} {target} within {within_s:g} s") from None
        except (CallFailed, OSError) as error:
            why = str(error) or type(error).__name__
            raise DependencyDown(f"the daemon does not answer on {self._socket}: {why}") from None
        return _answer(target, status, said)


def _answer(target: str, status: int, said: bytes) -> Answer:
    try:
        found = msgspec.json.decode(said or b"{}", type=Answer)
    except msgspec.DecodeError:
        raise HiveError(f"the daemon answers {target} with something else than JSON") from None
    if 200 <= status < 300:
        return found
    title = str(found.get("detail") or found.get("title") or f"status {status}")
    raise by_code(str(found.get("code", "")), status)(title, hint=str(found.get("hint") or ""))
