"""What is the same for every kind of inference server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar, TypeVar

from hive.domain import DIALECTS, BackendCapabilities, BackendKind, Dialect, origin_of
from hive.errors import BackendDown, BackendTimeout, NotFound, NotSupported
from hive.host.access import NO_ACCESS, Access
from hive.inference import ask, openapi
from hive.inference.concurrency import Busy
from hive.inference.prefix_cache import PrefixCache

Shape = TypeVar("Shape")


DESCRIBED_S = 10.0
"""vLLM 0.32 makes its 270 kB when it is first asked for them, and answers nobody meanwhile: 4.3 s on a busy machine of
two cores, 0.06 s from then on. So it is asked when it came up."""
LOAD_S = 600.0
"""Longest wait for a model to be loaded: 100 GB from a disk that gives 200 MB/s."""


def check_done(answer: ask.Answer, address: str) -> None:
    """Raises NotFound, BackendDown where a model was not loaded or unloaded, in the server's own words."""
    if answer.status == 200:
        return
    said = " ".join(answer.body[:200].decode(errors="replace").split())
    error = NotFound if answer.status == 404 else BackendDown
    raise error(f"{address} answers {answer.status}: {said}")


@asynccontextmanager
async def within(limit_s: float, what: str) -> AsyncIterator[None]:
    """Raises BackendTimeout where it takes longer."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BackendTimeout(f"{what} within {limit_s:g} s") from None


class Server:
    """One server at one address: the part of `Backend` that does not depend on what it answers."""

    kind: BackendKind
    health_path: ClassVar[str]
    """Answers 200 exactly while a request would be served."""
    why_not_load: ClassVar[str]
    """Why no model is loaded or unloaded on request, a sentence; empty where one can be."""

    def __init__(self, address: str, access: Access = NO_ACCESS) -> None:
        self.address = address
        self.access = access
        """What of the key and the authorities this server is shown."""
        self._within_s = ask.ANSWER_S if origin_of(address).is_here else ask.FAR_ANSWER_S

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address}>"

    @property
    def dialects(self) -> frozenset[Dialect]:
        return DIALECTS[self.kind]

    async def health(self) -> bool:
        return await ask.is_ok(self.address, self.health_path, within_s=self._within_s, access=self.access)

    async def mark(self) -> str:
        return ""

    async def busy(self) -> Busy:
        return Busy()

    async def prefix_cache(self) -> PrefixCache | None:
        return None

    async def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities()

    async def loaded(self) -> frozenset[str] | None:
        return None

    async def look_for_files(self) -> None:
        """Nothing: most do so whenever they are asked."""

    async def load(self, model: str) -> None:
        raise NotSupported(f"{model} is not loaded on request: {self.why_not_load}")

    async def unload(self, model: str) -> None:
        raise NotSupported(f"{model} is not unloaded on request: {self.why_not_load}")

    async def _shape(self, path: str, shape: type[Shape]) -> Shape:
        return await ask.get_shape(self.address, path, shape, within_s=self._within_s, access=self.access)

    async def _post(self, path: str, body: object, *, within_s: float) -> ask.Answer:
        return await ask.post(self.address, path, body, within_s=within_s, access=self.access)

    async def _text(self, path: str) -> bytes | None:
        return await ask.text(self.address, path, within_s=self._within_s, access=self.access)

    async def _described(self) -> BackendCapabilities | None:
        """By its `/openapi.json`, None without one."""
        described = await ask.text(self.address, "/openapi.json", within_s=DESCRIBED_S, access=self.access)
        return None if described is None else await asyncio.to_thread(openapi.capabilities, described)
