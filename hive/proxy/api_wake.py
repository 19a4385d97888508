"""Wakes through the daemon's REST API, if HIVE_API_URL is set, while the link to the daemon is down."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from hive.domain import AgentStatus
from hive.errors import ConfigError, DependencyDown, NotFound, TimedOut, by_code
from hive.host.credentials import credential
from hive.host.http_call import calling
from hive.http_answer import CallFailed, encode_request

log = logging.getLogger("hive.proxy")

URL, TOKEN = "HIVE_API_URL", "HIVE_INTERNAL_TOKEN"
ANSWER_MAX_BYTES = 1024 * 1024
AT_ONCE = 16
GONE = "removed"


class ToldAgent(NamedTuple):
    """The daemon's answer about an agent. `generation` is 0 if there is no such agent."""

    status: str
    generation: int


class _Agent(msgspec.Struct, frozen=True):
    """The fields that are read from the API's view of an agent; others are ignored."""

    id: str
    status: AgentStatus
    generation: int


class _Problem(msgspec.Struct, frozen=True):
    code: str
    detail: str


class ApiWake:
    """Wakes through the REST API at `url`, with `token`. At most AT_ONCE calls run at once, the others wait for their
    turn."""

    def __init__(self, url: str, token: str) -> None:
        """Raises ValueError for a URL that is none."""
        address = urlsplit(url.rstrip("/"))
        is_https = address.scheme.lower() == "https"
        if not is_https and address.scheme.lower() != "http":
            raise ValueError(f"it begins with {address.scheme or 'no scheme'}, not with http:// or https://")
        self._host = address.hostname or ""
        self._port = address.port or (443 if is_https else 80)
        self._path = quote(address.path, safe="/%")
        # It trusts the certificates that the host trusts (SSL_CERT_FILE too); no variable for HTTP proxies is read.
        self._tls = ssl.create_default_context() if is_https else None
        self._fields = {
            "Host": address.netloc.rpartition("@")[2],
            "Authorization": f"Bearer {token}",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        self._turns = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<ApiWake {self._host}>"

    async def wake(self, agent: str, *, within_s: float) -> ToldAgent:
        """Resumes the agent and returns its state. If it cannot be woken, the state tells why.

        Raises TimedOut, DependencyDown, and the error the daemon answered with.
        """
        try:
            async with asyncio.timeout(within_s), self._turns:
                status, body = await self._ask("POST", f"/api/agents/{agent}/resume")
                if status == 409:  # not as it is: then how?
                    status, body = await self._ask("GET", f"/api/agents/{agent}")
        except TimeoutError:
            raise TimedOut(f"{self!r} did not answer within {within_s:g} s") from None
        except (CallFailed, OSError, ValueError) as error:  # ValueError: no name of a host (IDNA)
            raise DependencyDown(f"{self!r} cannot be asked: {error or type(error).__name__}") from None
        return _told(agent, status, body)

    async def _ask(self, method: str, target: str) -> tuple[int, bytes]:
        request = encode_request(method, self._path + target, self._fields, b"" if method == "POST" else None)
        async with calling(asyncio.open_connection(self._host, self._port, ssl=self._tls), request) as call:
            return await call.status(), await call.body(ANSWER_MAX_BYTES)


def _told(agent: str, status: int, body: bytes) -> ToldAgent:
    """Raises the error that is in it; DependencyDown where it is no answer of Hive's.

    >>> _told("a1", 200, b'{"id":"a1","status":"running","generation":4,"name":"alice"}')
    ToldAgent(status='running', generation=4)
    """
    try:
        if status == 200:
            found = msgspec.json.decode(body, type=_Agent)
            if found.id != agent:
                raise DependencyDown("another agent was told of than the one that was asked for")
            return ToldAgent(str(found.status), found.generation)
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise DependencyDown(f"what answers with {status} there is no Hive") from None
    if status == NotFound.status and problem.code == NotFound.code:
        return ToldAgent(GONE, 0)
    raise by_code(problem.code)(f"the API answers {status}: {problem.detail}")


def api_wake(env: Mapping[str, str]) -> ApiWake | None:
    """The wakes through the REST API; None if HIVE_API_URL is not set, or if there is no token for it. Raises
    ConfigError."""
    url = env.get(URL, "")
    if not url:
        return None
    given = credential("internal-token", env) or env.get(TOKEN, "").encode()
    token = given.decode("ascii", "replace").strip()
    if not token:
        log.warning("api_url_unused name=%s why='there is no %s, and no credential internal-token'", URL, TOKEN)
        return None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{TOKEN} is no token: printable ASCII characters without spaces", hint="set another")
    hint = f"{URL}=http://127.0.0.1:3000"
    try:
        if not urlsplit(url).hostname:
            raise ConfigError(f"{URL} names no host", hint=hint)
        return ApiWake(url, token)
    except ValueError as error:
        raise ConfigError(f"{URL} is no address: {error}", hint=hint) from None
