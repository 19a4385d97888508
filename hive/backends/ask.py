"""One control question to a backend: bounded, with its own clock, answered or a `HiveError`.

Control questions are seconds apart and vLLM closes idle connections after 5 s (facts of vLLM 0.32), so each has a
connection of its own. The only prompt that is ever sent is that of `one_token.py`.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import SplitResult, urlsplit

import msgspec

from hive.backends.conversation import ControlAnswer
from hive.domain import origin_of
from hive.errors import BackendDown, BackendTimeout, ConfigError, UsageError
from hive.host.access import NO_ACCESS, RemoteAccess, context, why_untrusted
from hive.host.http_call import calling, dialled
from hive.http_answer import CallFailed, encode_request

ANSWER_S = 2.0
ANSWER_MAX_BYTES = 4 * 1024 * 1024
FAR_ANSWER_S = 5.0
"""Of a server on another machine: a name is looked up, and TLS takes three ways there and back."""
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
"""The path before `/v1`; a proxy sends it as it is."""
_ACCEPT = {"Accept": "application/json"}
_JSON = _ACCEPT | {"Content-Type": "application/json"}


def parse_address(text: str) -> str:
    """`http://host:port`, `host:port`, `host`, `unix:///path` or `/path` as an address: `host:port` or a socket path;
    `https://host/path/v1` and `http://host/path/v1` as a URL without the `/v1`.

    Raises `UsageError` for anything else.

    >>> parse_address("http://127.0.0.1:11434/"), parse_address("unix:///run/x.sock"), parse_address("localhost:8000")
    ('127.0.0.1:11434', '/run/x.sock', 'localhost:8000')
    >>> parse_address("https://api.example.com/v1"), parse_address("http://10.0.0.9:8000/llm/v1/")
    ('https://api.example.com', 'http://10.0.0.9:8000/llm')
    """
    if text.startswith("/"):
        return text
    if text.startswith("unix:///"):
        return text.removeprefix("unix://")
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = _host_in(url), url.port
    except ValueError as error:
        raise UsageError(f"`{without_secrets(text)}` is no backend address: {error}") from None
    if "@" in url.netloc or url.query:  # not repeated: it may be a key
        raise UsageError(
            "a backend's address carries no user, no password and no query",
            hint="the key goes into a file: backend_api_key_file of [inference]",
        )
    path = url.path.rstrip("/").removesuffix("/v1")
    if url.scheme not in ("http", "https") or not host or not _PATH.fullmatch(path) or url.fragment:
        raise UsageError(
            f"`{without_secrets(text)}` is no backend address",
            hint="write http://host:port, https://host/v1, host:port, or unix:///path/to.sock",
        )
    if url.scheme == "http" and not path:
        return f"{host}:{80 if port is None else port}"
    is_usual = port in (None, 443 if url.scheme == "https" else 80)
    return f"{url.scheme}://{host}{'' if is_usual else f':{port}'}{path}"


def _host_in(url: SplitResult) -> str:
    """The name as it is looked up, in brackets where it is an IPv6 address; empty where there is none. ValueError."""
    name = (url.hostname or "").encode("idna").decode()
    if ":" in name:
        return f"[{name}]"
    if name and not _HOST.fullmatch(name):
        raise ValueError("that is no name of a host")
    return name


def without_secrets(text: str) -> str:
    """Text given as an address, without its secrets: it may not be an address.

    >>> without_secrets("https://me:secret@host/v1?key=secret"), without_secrets("vllm")
    ('https://…@host/v1?…', 'vllm')
    """
    return re.sub(r"\?.*", "?…", re.sub(r"[^/]*@", "…@", text))


async def get(
    address: str,
    path: str,
    *,
    within_s: float = ANSWER_S,
    access: RemoteAccess = NO_ACCESS,
) -> ControlAnswer:
    """The answer to `GET path` at `address` (as `BackendInfo` has it), whatever its status; `access` as it is shown to
    this server.

    Raises `BackendDown` where nothing listens, nobody vouches for it, the answer is no HTTP or larger than
    `ANSWER_MAX_BYTES`; `BackendTimeout` where it is not complete within `within_s` seconds.
    """
    return await _ask(address, "GET", path, None, within_s, access)


async def post(
    address: str,
    path: str,
    body: object,
    *,
    within_s: float,
    access: RemoteAccess = NO_ACCESS,
) -> ControlAnswer:
    """The answer to `POST path` with `body` as JSON. Raises as `get`."""
    return await _ask(address, "POST", path, msgspec.json.encode(body), within_s, access)


async def _ask(
    address: str, method: str, path: str, body: bytes | None, within_s: float, access: RemoteAccess
) -> ControlAnswer:
    origin = origin_of(address)
    try:
        tls = context(access) if origin.tls else None
    except ConfigError as error:
        raise BackendDown(error.message, hint=error.hint) from None
    # Ollama on loopback refuses unknown Host names, so a socket is asked as localhost.
    host = origin.host if "://" in address or address.startswith("/") else address
    fields = {"Host": host, "Connection": "close"} | (_ACCEPT if body is None else _JSON)
    if access.key:
        fields["Authorization"] = f"Bearer {access.key}"
    request = encode_request(method, origin.prefix + path, fields, body)
    try:
        async with asyncio.timeout(within_s), calling(dialled(origin.dialled, tls), request) as call:
            return ControlAnswer(await call.status(), call.fields, await call.body(ANSWER_MAX_BYTES))
    except TimeoutError:
        raise BackendTimeout(f"{address} did not answer {method} {path} within {within_s:g} s") from None
    except (CallFailed, OSError, ValueError) as error:  # ValueError: no name of a host (IDNA)
        why = why_untrusted(error) or str(error) or type(error).__name__
        raise BackendDown(f"{address} does not answer {method} {path}: {why}") from None


async def text(
    address: str, path: str, *, within_s: float = ANSWER_S, access: RemoteAccess = NO_ACCESS
) -> bytes | None:
    """The 200 answer to `GET path` as it came; None where there is none in time."""
    try:
        answer = await get(address, path, within_s=within_s, access=access)
    except (BackendDown, BackendTimeout):
        return None
    return answer.body if answer.status == 200 else None


async def is_ok(address: str, path: str, *, within_s: float = ANSWER_S, access: RemoteAccess = NO_ACCESS) -> bool:
    """Whether `GET path` is answered 200 in time."""
    return await text(address, path, within_s=within_s, access=access) is not None
