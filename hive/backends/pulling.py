"""Ollama's own way of fetching a model, `POST /api/pull`, and of removing one (api/types.go and server/routes.go of
2026-08). It goes on where an earlier pull was broken off, and ends when the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from hive.errors import BackendDown, BackendTimeout, HiveError, NotFound
from hive.host.http_call import HttpCall, calling, dialled
from hive.http_answer import CallFailed, encode_request

CONNECT_S = 5.0
SILENCE_S = 600.0
"""It says nothing while it reads what it has to find out whether it is whole; 100 GB take minutes."""
DELETED_WITHIN_S = 60.0
LINE_MAX_BYTES = 65536
ALONE = "this Ollama must reach its registry; the one that Hive runs has no network (systemctl edit hive-inference)"


class PullProgress(msgspec.Struct, frozen=True):
    """Progress of a pull. `says`: in Ollama's words. `completed` and `total`: bytes over all layers named so far, both
    0 before the first."""

    says: str
    completed: int = 0
    total: int = 0


class _Line(msgspec.Struct):
    status: str = ""
    digest: str = ""
    total: int = 0
    completed: int = 0
    error: str = ""


class Layers:
    """Adds up what Ollama tells of each layer apart. Pure.

    >>> layers = Layers()
    >>> layers.take(b'{"status":"pulling a1","digest":"sha256:a1","total":10,"completed":4}')
    PullProgress(says='pulling a1', completed=4, total=10)
    >>> layers.take(b'{"status":"pulling b2","digest":"sha256:b2","total":5}')
    PullProgress(says='pulling b2', completed=4, total=15)
    >>> layers.take(b'{"status":"success"}').says, layers.succeeded
    ('success', True)
    """

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}
        self.succeeded = False

    def take(self, line: bytes) -> PullProgress:
        """One line of the stream. Raises BackendDown for an error it tells, or what is no line of a pull."""
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise BackendDown("Ollama's answer to a pull is none") from None
        if found.error:
            raise _told(found.error)
        if found.digest:
            completed, total = self._layers.get(found.digest, (0, 0))
            self._layers[found.digest] = (max(completed, found.completed), max(total, found.total))
        self.succeeded = self.succeeded or found.status == "success"
        both = list(self._layers.values())
        return PullProgress(found.status, sum(one for one, _ in both), sum(one for _, one in both))


async def pull(address: str, model: str, on_step: Callable[[PullProgress], None]) -> None:
    """Has the Ollama at `address` fetch `model`; returns once it is there.

    Cancelling it ends the pull, and what came is kept for the next one. Raises NotFound, BackendDown with what Ollama
    said, BackendTimeout where it says nothing for `SILENCE_S`.
    """
    layers = Layers()
    now = asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout(SILENCE_S) as silence,
            _asked(address, "POST", "/api/pull", {"model": model, "stream": True}) as call,
        ):
            if (status := await call.status()) != 200:
                raise _refused(status, await call.body(LINE_MAX_BYTES), model)
            pending = b""
            async for piece in call.pieces():
                silence.reschedule(now() + SILENCE_S)
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if line.strip():
                        on_step(layers.take(line))
                if len(pending) > LINE_MAX_BYTES:
                    raise BackendDown("Ollama's answer to a pull is none")
            if pending.strip():
                on_step(layers.take(pending))
    except TimeoutError:
        raise BackendTimeout(f"Ollama said nothing of the pull for {SILENCE_S:g} s") from None
    except (CallFailed, OSError) as error:
        raise BackendDown(f"the pull broke off: {str(error) or type(error).__name__}", hint=ALONE) from None
    if not layers.succeeded:
        raise BackendDown("the pull broke off before it was done", hint="pull it again: what came is kept")


async def delete(address: str, model: str) -> None:
    """Has the Ollama at `address` forget `model`. Raises NotFound, BackendDown, BackendTimeout."""
    try:
        async with (
            asyncio.timeout(DELETED_WITHIN_S),
            _asked(address, "DELETE", "/api/delete", {"model": model}) as call,
        ):
            status, body = await call.status(), await call.body(LINE_MAX_BYTES)
    except TimeoutError:
        raise BackendTimeout(f"Ollama did not remove it within {DELETED_WITHIN_S:g} s") from None
    except (CallFailed, OSError) as error:
        raise BackendDown(f"Ollama does not answer: {str(error) or type(error).__name__}") from None
    if status != 200:
        raise _refused(status, body, model)


def _asked(address: str, method: str, path: str, body: object) -> AbstractAsyncContextManager[HttpCall]:
    host = "localhost" if address.startswith("/") else address
    fields = {"Host": host, "Connection": "close", "Content-Type": "application/json"}
    request = encode_request(method, path, fields, msgspec.json.encode(body))
    return calling(dialled(address, within_s=CONNECT_S), request)


def _refused(status: int, body: bytes, model: str) -> HiveError:
    try:
        said = msgspec.json.decode(body, type=_Line).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        said = ""
    if status == 404:
        return NotFound(said or f"Ollama has no model {model[:80]!r}")
    return _told(said or f"it answered {status}")


def _told(error: str) -> HiveError:
    """Error told in the middle of a stream, which has no status: a manifest nobody has is a name nobody has."""
    if "file does not exist" in error or "not found" in error:
        return NotFound(
            f"Ollama: {error[:300]}", hint="its registry has no such model; look its name up in Ollama's library"
        )
    return BackendDown(f"Ollama: {error[:300]}", hint=ALONE if "dial tcp" in error or "lookup" in error else "")
