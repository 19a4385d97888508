"""Ollama's control answers (server/routes.go of 2026-08), and the demo backend's, which speaks the same dialect."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime

import msgspec

from hive.domain import BackendKind, ModelInfo
from hive.errors import BackendDown, BackendTimeout, NotSupported
from hive.host.access import NO_ACCESS, Access
from hive.inference.server import LOAD_S, Server, check_done
from hive.models.whereabouts import UNKNOWN, Whereabouts, would_leave

TAGS = "/api/tags"


class _Version(msgspec.Struct):
    version: str


class _Details(msgspec.Struct):
    quantization_level: str = ""


class _Tag(msgspec.Struct):
    name: str
    size: int | None = None
    modified_at: str = ""
    details: _Details | None = None
    digest: str = ""
    remote_host: str = ""
    remote_model: str = ""


class _Tags(msgspec.Struct):
    models: list[_Tag] | None = None


def unix_seconds(text: str) -> int:
    """Go's RFC 3339 time as Unix seconds; 0 where it is none or from before 1970 (Go's zero time).

    >>> unix_seconds("2026-05-04T14:56:49.277302595+02:00"), unix_seconds("0001-01-01T00:00:00Z"), unix_seconds("")
    (1777899409, 0, 0)
    """
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp()))
    except (ValueError, OverflowError):
        return 0


def owner_of(name: str) -> str:
    """Whose model it is: the namespace in its name, as Ollama's own `/v1/models` has it.

    >>> owner_of("tiny:latest"), owner_of("ann/tiny"), owner_of("hf.co/meta/tiny:q4_0")
    ('library', 'ann', 'meta')
    """
    *_, namespace, _ = ("library", *name.split("/"))
    return namespace


class Ollama(Server):
    """Keeps the contract of `Backend`. It has one health: whoever answers `/api/version` also serves."""

    health_path = "/api/version"
    why_not_load = "the demo backend has no model, only canned text"

    def __init__(self, address: str, kind: BackendKind = BackendKind.OLLAMA, access: Access = NO_ACCESS) -> None:
        super().__init__(address, access)
        self.kind = kind

    def __repr__(self) -> str:
        return f"<Ollama {self.kind} at {self.address}>"

    async def models(self) -> list[ModelInfo]:
        tags = await self._shape(TAGS, _Tags)
        return [
            ModelInfo(
                name=tag.name,
                size_bytes=tag.size,
                owned_by=owner_of(tag.name) if self.kind is BackendKind.OLLAMA else "hive",
                created=unix_seconds(tag.modified_at),
                quantization=tag.details.quantization_level if tag.details else "",
                remote_host=tag.remote_host,
                remote_model=tag.remote_model,
                digest=tag.digest,
            )
            for tag in tags.models or []  # Go writes an empty list as null
        ]

    async def mark(self) -> str:
        """Its version and its list: a name in it may become a stub of the cloud from one moment to the next."""
        if self.kind is BackendKind.DEMO:
            return ""
        version, tags = await asyncio.gather(self._text(self.health_path), self._text(TAGS))
        return "" if version is None or tags is None else hashlib.sha256(version + tags).hexdigest()

    async def loaded(self) -> frozenset[str] | None:
        if self.kind is BackendKind.DEMO:
            return None
        try:
            running = await self._shape("/api/ps", _Tags)
        except (BackendDown, BackendTimeout):
            return None
        return frozenset(tag.name for tag in running.models or [])

    async def version(self) -> str:
        return (await self._shape("/api/version", _Version)).version

    async def load(self, model: str) -> None:
        """An empty prompt loads (docs/api.md of 2026-08); `keep_alive` is the server's own default."""
        if self.kind is BackendKind.DEMO:
            await super().load(model)
        await self._ask({"model": model, "stream": False})

    async def unload(self, model: str) -> None:
        if self.kind is BackendKind.DEMO:
            await super().unload(model)
        await self._ask({"model": model, "stream": False, "keep_alive": 0})

    async def _ask(self, body: dict[str, object]) -> None:
        """Raises NotSupported where that would be sent on to another host: there is nothing to load here."""
        model = str(body["model"])
        why = Whereabouts(self.kind, await self.models()).why_far(model)
        if why and why != UNKNOWN:
            raise NotSupported(would_leave(model, why))
        check_done(await self._post("/api/generate", body, within_s=LOAD_S), self.address)
