"""One control question to a backend: bounded, with its own clock, answered or a `HiveError`.

Control questions are seconds apart and vLLM closes idle connections after 5 s (facts of vLLM 0.32), so each has a
connection of its own. The only prompt that is ever sent is that of `one_token.py`.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from hive.errors import BackendDown, BackendTimeout, UsageError
from hive.http_client import httpx

ANSWER_S = 2.0
ANSWER_MAX_BYTES = 4 * 1024 * 1024
_ACCEPT = {"accept": "application/json"}
_JSON = _ACCEPT | {"content-type": "application/json"}
Shape = TypeVar("Shape")


class Answer(msgspec.Struct, frozen=True):
    """What came back: status, header names in lower case, the whole body."""

    status: int
    headers: dict[str, str]
    body: bytes


def parse_address(text: str) -> str:
    """`http://host:port`, `host:port`, `host`, `unix:///path` or `/path` as an address: `host:port` or a socket path.

    Raises `UsageError` for anything else: backends speak plain HTTP at the root of their server.

    >>> parse_address("http://127.0.0.1:11434/"), parse_address("unix:///run/x.sock"), parse_address("localhost:8000")
    ('127.0.0.1:11434', '/run/x.sock', 'localhost:8000')
    """
    if text.startswith("/"):
        return text
    if text.startswith("unix:///"):
        return text.removeprefix("unix://")
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as error:
        raise UsageError(f"`{text}` is no backend address: {error}") from None
    if url.scheme != "http" or not url.host or url.path not in ("", "/") or url.query or url.userinfo:
        raise UsageError(
            f"`{text}` is no backend address", hint="write http://host:port, host:port, or unix:///path/to.sock"
        )
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{host}:{url.port or 80}"


async def get(address: str, path: str, *, within_s: float = ANSWER_S) -> Answer:
    """The answer to `GET path` at `address` (`host:port` or a socket path), whatever its status.

    Raises `BackendDown` where nothing listens, the answer is no HTTP or larger than `ANSWER_MAX_BYTES`;
    `BackendTimeout` where it is not complete within `within_s` seconds.
    """
    return await _ask(address, "GET", path, None, within_s)


async def post(address: str, path: str, body: object, *, within_s: float) -> Answer:
    """The answer to `POST path` with `body` as JSON. Raises as `get`."""
    return await _ask(address, "POST", path, msgspec.json.encode(body), within_s)


async def _ask(address: str, method: str, path: str, body: bytes | None, within_s: float) -> Answer:
    socket = address if address.startswith("/") else None
    # Ollama on loopback refuses unknown Host names, so a socket is asked as localhost.
    base = "http://localhost" if socket else f"http://{address}"
    transport = httpx.AsyncHTTPTransport(uds=socket, verify=False, trust_env=False)
    try:
        async with (
            asyncio.timeout(within_s),
            httpx.AsyncClient(transport=transport, base_url=base, timeout=within_s, trust_env=False) as client,
            client.stream(method, path, content=body, headers=_JSON if body else _ACCEPT) as response,
        ):
            return Answer(
                status=response.status_code,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await _whole(response),
            )
    except (TimeoutError, httpx.TimeoutException):
        raise BackendTimeout(f"{address} did not answer {method} {path} within {within_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise BackendDown(f"{address} does not answer {method} {path}: {error or type(error).__name__}") from None


async def _whole(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > ANSWER_MAX_BYTES:
            raise ValueError(f"the answer is larger than {ANSWER_MAX_BYTES} bytes")
    return bytes(body)


async def get_shape(address: str, path: str, shape: type[Shape]) -> Shape:
    """The 200 answer to `GET path`, decoded as `shape`; besides `get`'s errors `BackendDown` where it is not that."""
    answer = await get(address, path)
    if answer.status != 200:
        raise BackendDown(f"{address} answers GET {path} with status {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendDown(f"{address} answers GET {path} with something else: {error}") from None


async def text(address: str, path: str) -> bytes | None:
    """The 200 answer to `GET path` as it came; None where there is none in time."""
    try:
        answer = await get(address, path)
    except (BackendDown, BackendTimeout):
        return None
    return answer.body if answer.status == 200 else None


async def is_ok(address: str, path: str) -> bool:
    """Whether `GET path` is answered 200 in time."""
    try:
        return (await get(address, path)).status == 200
    except (BackendDown, BackendTimeout):
        return False
