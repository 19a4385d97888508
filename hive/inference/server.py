"""What is the same for every kind of inference server."""

from __future__ import annotations

from typing import ClassVar

from hive.domain import DIALECTS, BackendKind, Dialect
from hive.inference import ask
from hive.inference.concurrency import Busy
from hive.inference.prefix_cache import PrefixCache


class Server:
    """One server at one address: the part of `Backend` that does not depend on what it answers."""

    kind: BackendKind
    health_path: ClassVar[str]
    """Answers 200 exactly while a request would be served."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address}>"

    @property
    def dialects(self) -> frozenset[Dialect]:
        return DIALECTS[self.kind]

    async def health(self) -> bool:
        return await ask.is_ok(self.address, self.health_path)

    async def busy(self) -> Busy:
        return Busy()

    async def prefix_cache(self) -> PrefixCache | None:
        return None
