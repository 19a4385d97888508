"""What Hive asks of an inference server, whichever kind it is."""

from __future__ import annotations

from typing import Protocol

from hive.domain import BackendKind, Dialect, ModelInfo
from hive.inference.concurrency import Busy
from hive.inference.llamacpp import LlamaServer
from hive.inference.ollama import Ollama
from hive.inference.prefix_cache import PrefixCache
from hive.inference.vllm import Vllm


class Backend(Protocol):
    """One inference server at one address; control questions only, requests of agents go through the proxy.

    No question sends a prompt, loads a model or wakes a sleeping one. Each is answered within 2 s or fails.
    The server may come and go between two questions; nothing is remembered here.
    """

    @property
    def kind(self) -> BackendKind: ...

    @property
    def address(self) -> str:
        """`host:port` or the path of a unix socket."""

    @property
    def dialects(self) -> frozenset[Dialect]:
        """What the server speaks by itself; constant."""

    async def health(self) -> bool:
        """Whether it would serve a request now: False while it loads, is down or does not answer. Never raises."""

    async def models(self) -> list[ModelInfo]:
        """What it offers, in its own order and by its own names; an empty list is an answer.

        Raises `BackendDown` or `BackendTimeout`.
        """

    async def version(self) -> str:
        """Its own version text. Raises `BackendDown` or `BackendTimeout`."""

    async def busy(self) -> Busy:
        """How much it works on at once and how much waits in its own queue, as far as it tells. Never raises."""

    async def prefix_cache(self) -> PrefixCache | None:
        """Its counters of prompt tokens since it started, None where it tells none or does not answer. Never raises."""


def open_backend(kind: BackendKind, address: str) -> Backend:
    """The backend of `kind` at `address`. Nothing is asked yet, so it may be down."""
    match kind:
        case BackendKind.VLLM:
            return Vllm(address)
        case BackendKind.LLAMA:
            return LlamaServer(address)
        case BackendKind.OLLAMA | BackendKind.DEMO:
            return Ollama(address, kind)
