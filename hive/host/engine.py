"""The Docker Engine API over its unix socket: one short connection per call, a limit on each, errors as Hive's own."""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from hive.errors import (
    BadRequest,
    DependencyDown,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    TimedOut,
    WrongState,
)
from hive.host.http_call import READ_BYTES, HttpCall, calling, connected_unix, streams_of
from hive.http_answer import AnswerTooLarge, CallFailed, HttpAnswer, HungUp, encode_request

WANTED = (1, 41)
"""The API this is written for: Docker 20.10 and all later ones that still speak it, Podman 4."""
ANSWER_S = 5.0
"""For what an engine does at once."""
ANSWER_MAX_BYTES = 16 * 1024 * 1024
FRAME_MAX_BYTES = 1024 * 1024
"""json-file cuts a line at 16 KiB; more than this is no frame."""

Version = tuple[int, int]
_ERRORS: dict[int, type[HiveError]] = {
    400: BadRequest,
    403: NotPermitted,
    404: NotFound,
    409: WrongState,
    501: NotSupported,
    503: DependencyDown,
}


def error_of(status: int, body: bytes) -> HiveError:
    """The error for an answer of 400 or more; the engine's own sentence is its message.

    >>> error_of(409, b'{"message":"Container x is already paused"}')
    WrongState('Container x is already paused')
    >>> error_of(500, b"oops")
    HiveError('the engine answered 500: oops')
    """
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the engine answered {status}: {body[:200].decode(errors='replace').strip()}"
    return _ERRORS.get(status, HiveError)(message)


def choose_version(oldest: str, newest: str) -> Version:
    """The one to speak with an engine that knows all from `oldest` to `newest`. Raises NotSupported.

    >>> choose_version("1.12", "1.41"), choose_version("1.24", "1.47"), choose_version("1.44", "1.52")
    ((1, 41), (1, 41), (1, 44))
    >>> choose_version("1.12", "1.40")
    Traceback (most recent call last):
    hive.errors.NotSupported: the engine speaks API 1.40, Hive needs 1.41 or later (Docker 20.10)
    """
    least, most = _version(oldest), _version(newest)
    if most < WANTED:
        raise NotSupported(f"the engine speaks API {newest}, Hive needs {_text(WANTED)} or later (Docker 20.10)")
    return max(least, WANTED)


def _version(text: str) -> Version:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise NotSupported(f"the engine names its API version {text[:40]!r}")
    return int(major), int(minor)


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def filters(*labels: str, **others: str) -> dict[str, str]:
    """The query that lists what has all of `labels` (`name=value`) and `others`.

    >>> filters("hive.agent=a1", status="paused")
    {'filters': '{"label": ["hive.agent=a1"], "status": ["paused"]}'}
    """
    return {"filters": json.dumps({"label": list(labels), **{name: [value] for name, value in others.items()}})}


class Engine:
    """One engine. Holds no connection: it may come and go, and be another version when it comes back.

    Every call raises DependencyDown (it does not listen, or breaks off), NotPermitted (its socket is another's),
    TimedOut, or what it answered with: BadRequest, NotFound, WrongState, HiveError for its own failures.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._speaks: Version | None = None

    def __repr__(self) -> str:
        return f"<Engine {self.path} {_text(self._speaks) if self._speaks else 'not asked yet'}>"

    async def ask(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """The decoded answer; None where it has none (204, 304: it is so already)."""
        async with self._limited(method, target, timeout_s):
            return await self._ask(method, f"{await self._prefix()}{target}", body, query)

    async def _ask(self, method: str, target: str, body: object, query: Mapping[str, str] | None) -> Any:
        async with self._called(_request(method, target, body, query)) as call:
            status = await call.status()
            try:
                content = await call.body(ANSWER_MAX_BYTES)
            except AnswerTooLarge as error:
                raise HiveError(
                    f"the engine's answer to {method} {target} is larger than {ANSWER_MAX_BYTES} bytes"
                ) from error
        if status >= 400:
            raise error_of(status, content)
        return _decode(content)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, target: str, body: object = None, *, query: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of an answer as it comes, for as long as it comes; only its head has a limit (`ANSWER_S`)."""
        async with contextlib.AsyncExitStack() as stack:
            async with self._limited(method, target, ANSWER_S):
                request = _request(method, f"{await self._prefix()}{target}", body, query)
                call = await stack.enter_async_context(self._called(request))
                if (status := await call.status()) >= 400:
                    raise error_of(status, await call.body(ANSWER_MAX_BYTES))
            yield _pieces(call)

    async def taken_over(self, target: str, body: object) -> socket.socket:
        """Takes over the connection of a POST as a stream of bytes both ways; the caller's, not blocking."""
        async with self._limited("POST", target, ANSWER_S):
            prefix, loop = await self._prefix(), asyncio.get_running_loop()
            sock = await self._connected()
            try:
                await loop.sock_sendall(sock, _request("POST", f"{prefix}{target}", body, None, upgrade=True))
                answer = HttpAnswer()
                while not answer.headed:
                    answer.feed(await loop.sock_recv(sock, 1))  # one by one: the bytes behind the head are the caller's
                if answer.status >= 400:
                    raise error_of(answer.status, await loop.sock_recv(sock, READ_BYTES))
            except BaseException:
                sock.close()
                raise
        return sock

    async def _prefix(self) -> str:
        if self._speaks is None:
            said = await self._ask("GET", "/version", None, None)
            if not isinstance(said, dict):
                raise HiveError(f"what listens at {self.path} is no Docker engine")
            self._speaks = choose_version(said.get("MinAPIVersion") or "1.12", said.get("ApiVersion") or "")
        return f"/v{_text(self._speaks)}"

    async def _connected(self) -> socket.socket:
        try:
            return await connected_unix(self.path)
        except PermissionError:
            raise NotPermitted(
                f"{self.path} may not be used", hint="the engine's socket belongs to root and the group docker"
            ) from None
        except OSError as error:
            self._speaks = None
            why = error.strerror or str(error)
            raise DependencyDown(f"no Docker engine listens at {self.path}: {why}", hint=_hint(self.path)) from None

    @contextlib.asynccontextmanager
    async def _called(self, request: bytes) -> AsyncIterator[HttpCall]:
        async with calling(streams_of(await self._connected()), request) as call:
            yield call

    @contextlib.asynccontextmanager
    async def _limited(self, method: str, target: str, limit_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise TimedOut(f"the Docker engine did not answer {method} {target} within {limit_s:g} s") from None
        except HungUp as error:
            raise DependencyDown("the Docker engine hung up", hint=_hint(self.path)) from error
        except (OSError, CallFailed) as error:
            self._speaks = None
            raise DependencyDown(f"the Docker engine broke off: {error}", hint=_hint(self.path)) from error


def _hint(path: Path) -> str:
    return f"start it (systemctl start docker); [sandbox] docker_socket is {path}"


def _request(
    method: str, target: str, body: object, query: Mapping[str, str] | None, *, upgrade: bool = False
) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    whole = f"{quote(target)}?{urlencode(query)}" if query else quote(target)
    goes_on = {"Connection": "Upgrade", "Upgrade": "tcp"} if upgrade else {"Connection": "close"}
    kind = {"Content-Type": "application/json"} if content else {}
    return encode_request(method, whole, {"Host": "docker", **goes_on, **kind}, content)


async def _pieces(call: HttpCall) -> AsyncIterator[bytes]:
    """Ends with the body, and where the engine breaks off: the caller asks again for the rest."""
    with contextlib.suppress(OSError, CallFailed):
        async for piece in call.pieces():
            yield piece


def _decode(content: bytes) -> Any:
    """A JSON document; None where there is none."""
    if not content.strip():
        return None
    try:
        return json.loads(content)
    except ValueError:
        raise HiveError(f"the engine's answer is no JSON: {content[:80]!r}") from None


# --- what a container printed ------------------------------------------------------------------------------------


class Frames:
    """Takes apart what the engine sends of stdout and stderr, each piece behind a head of 8 bytes.

    >>> frames = Frames()
    >>> frames.feed(b"\\x01\\0\\0\\0\\0\\0\\0\\x02hi\\x02\\0\\0\\0"), frames.feed(b"\\0\\0\\0\\x03bye")
    ([b'hi'], [b'bye'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole now. Raises HiveError where this is no such stream."""
        return [payload for _, payload in self.feed_both(data)]

    def feed_both(self, data: bytes) -> list[tuple[int, bytes]]:
        """The same, each with where it was written: 1 is stdout, 2 is stderr."""
        content, at, found = self._rest + data, 0, list[tuple[int, bytes]]()
        while len(content) - at >= 8:
            length = int.from_bytes(content[at + 4 : at + 8], "big")
            if content[at] > 3 or length > FRAME_MAX_BYTES:
                raise HiveError("the engine sends something that is no container's output")
            if len(content) - at - 8 < length:
                break
            found.append((content[at], content[at + 8 : at + 8 + length]))
            at += 8 + length
        self._rest = content[at:]
        return found


class EngineLogEntry(NamedTuple):
    """One piece of a log. `at`: the engine's time of it, UTC with nine decimals, so that texts compare as times."""

    at: str
    text: bytes


_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9})Z ")


def parse_entry(payload: bytes) -> EngineLogEntry:
    """`at` is empty where the engine did not write a time before it.

    >>> parse_entry(b"2026-11-20T14:25:03.511175850Z hi\\n")
    EngineLogEntry(at='2026-11-20T14:25:03.511175850', text=b'hi\\n')
    """
    found = _STAMP.match(payload)
    return EngineLogEntry("", payload) if found is None else EngineLogEntry(found[1].decode(), payload[found.end() :])


def as_since(at: str) -> str:
    """The parameter `since`, which takes in what was printed at that very moment.

    >>> as_since("1970-01-02T00:00:00.000000001")
    '86400.000000001'
    """
    return f"{calendar.timegm(time.strptime(at[:19], '%Y-%m-%dT%H:%M:%S'))}.{at[20:]}"
