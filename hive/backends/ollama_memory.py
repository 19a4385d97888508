"""The models in an Ollama's memory: what it lists of them, and how one is kept there and let go. Pure.

What Ollama does (server/routes.go, server/sched.go of 2026-08): a model keeps the `keep_alive` it was loaded with until
a request that says another one, so requests without one, as all of `/v1`, change nothing; a load that a request causes
takes Ollama's default (5 min) where it says none. An empty prompt loads, with a `keep_alive` of 0 it unloads, which is
done once its requests have ended. A model that only embeds is loaded by `/api/embed` without input, `/api/generate`
refuses it; it unloads any. While a model loads, `/api/ps` may wait for the end of that.
"""

from __future__ import annotations

import msgspec

from hive.backends.conversation import LOAD_S, AskedServer, Conversation, check_done, decoded, get, post, shape
from hive.backends.ollama import TAGS, Tags, models, models_in, unix_seconds, why_far
from hive.domain import ModelInfo
from hive.errors import NotSupported
from hive.models.whereabouts import Whereabouts, would_leave

FOR_EVER = -1
"""`keep_alive` of what the pool has loaded: only the pool ends it."""
ONLY_EMBEDS = b"does not support generate"
"""The refusal to load a model that makes no text."""
FOR_EVER_S = 365 * 86400.0
"""An expiry that is further away is Ollama's way to say for ever: 292 years."""


class OllamaModel(msgspec.Struct, frozen=True):
    """A row of `/api/ps`. `size`: bytes in all, `size_vram`: of these on GPUs. Both are what its runner says of its
    buffers; what the driver takes for each process besides is not among them."""

    name: str
    size: int = 0
    size_vram: int = 0
    digest: str = ""
    expires_at: str = ""

    def is_kept(self, now: float) -> bool:
        """Whether it stays until somebody unloads it. `now`: Unix seconds.

        >>> rows = [OllamaModel("m", expires_at=at) for at in ("2318-12-03T10:11:12Z", "2026-11-24T10:05:00Z", "")]
        >>> [row.is_kept(1795514400.0) for row in rows]
        [True, False, False]
        """
        return unix_seconds(self.expires_at) > now + FOR_EVER_S


class _Running(msgspec.Struct):
    models: list[OllamaModel] | None = None


class _Details(msgspec.Struct):
    context_length: int | None = None


class _LongTag(msgspec.Struct):
    details: _Details | None = None


class _LongTags(msgspec.Struct):
    models: list[_LongTag] | None = None


def listed(server: AskedServer) -> Conversation[list[ModelInfo]]:
    """Every model that there is, with the context it was trained for where Ollama tells it (since 0.32). Raises
    BackendDown, BackendTimeout."""
    answer = yield from get(TAGS)
    found = models_in(decoded(server, TAGS, answer, Tags))
    told = [row.details or _Details() for row in decoded(server, TAGS, answer, _LongTags).models or []]
    return [
        msgspec.structs.replace(model, context_length=details.context_length)
        for model, details in zip(found, told, strict=True)
    ]


def in_memory(server: AskedServer) -> Conversation[list[OllamaModel]]:
    """Every model that is loaded. Raises BackendDown, BackendTimeout."""
    return (yield from shape(server, "/api/ps", _Running)).models or []


def keep(server: AskedServer, model: str) -> Conversation[None]:
    """Loads a model, or finds it loaded; it stays from now on.

    Raises NotSupported where Ollama would send it on to another host, NotFound, BackendDown, BackendTimeout.
    """
    yield from _check_near(server, model)
    body: dict[str, object] = {"model": model, "keep_alive": FOR_EVER}
    answer = yield from post("/api/generate", body | {"stream": False}, within_s=LOAD_S)
    if answer.status == 400 and ONLY_EMBEDS in answer.body:
        answer = yield from post("/api/embed", body | {"input": []}, within_s=LOAD_S)
    check_done(answer, server)


def let_go(server: AskedServer, model: str) -> Conversation[None]:
    """Has a model unloaded once its requests have ended; `in_memory` tells when. Raises as `keep`."""
    yield from _check_near(server, model)
    body: dict[str, object] = {"model": model, "stream": False, "keep_alive": 0}
    check_done((yield from post("/api/generate", body, within_s=0)), server)


def _check_near(server: AskedServer, model: str) -> Conversation[list[ModelInfo]]:
    listed = yield from models(server)
    why = Whereabouts(why_far, listed).why_known_far(model)
    if why:
        raise NotSupported(would_leave(model, why))
    return listed
