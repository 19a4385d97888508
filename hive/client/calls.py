"""Questions of `hive up` and its demo to the daemon, over its unix socket, without holding the loop up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from hive.errors import DependencyDown, HiveError, TimedOut, by_code
from hive.http_client import httpx

ANSWER_S = 5.0
Answer = dict[str, Any]


class AsyncClient:
    """The daemon's REST API. Every call raises DependencyDown, TimedOut, or the error the daemon answered with."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), verify=False, trust_env=False),
            base_url="http://hive",
            trust_env=False,
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

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
        headers = {"content-type": "application/json"} if content is not None else {}
        try:
            response = await self._client.request(method, target, content=content, headers=headers, timeout=within_s)
        except httpx.TimeoutException:
            raise TimedOut(f"the daemon did not answer {method} {target} within {within_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise DependencyDown(f"the daemon does not answer on {self._socket}: {error}") from None
        return _answer(response)


def _answer(response: httpx.Response) -> Answer:
    try:
        found = msgspec.json.decode(response.content or b"{}", type=Answer)
    except msgspec.DecodeError:
        raise HiveError(f"the daemon answers {response.request.url.path} with something else than JSON") from None
    if response.is_success:
        return found
    title = str(found.get("detail") or found.get("title") or f"status {response.status_code}")
    raise by_code(str(found.get("code", "")), response.status_code)(title, hint=str(found.get("hint") or ""))
