"""What Hive asks of an inference server, whichever kind it is."""

from __future__ import annotations

from typing import Protocol

from hive.domain import BackendCapabilities, BackendKind, Dialect, ModelInfo
from hive.host.access import NO_ACCESS, Access
from hive.inference.concurrency import Busy
from hive.inference.llamacpp import LlamaServer
from hive.inference.ollama import Ollama
from hive.inference.prefix_cache import PrefixCache
from hive.inference.remote import Remote
from hive.inference.vllm import Vllm


class Backend(Protocol):
    """One inference server at one address; control questions only, requests of agents go through the proxy.

    No question sends a prompt, loads a model or wakes a sleeping one; only `load` and `unload` change anything. Each
    question is answered within 2 s, by a server on another machine within 5 s, or fails. The server may come and go
    between two questions; nothing is remembered here.
    """

    @property
    def kind(self) -> BackendKind: ...

    @property
    def address(self) -> str:
        """As `BackendInfo` has it."""

    @property
    def access(self) -> Access:
        """What of Hive's key and authorities it is shown."""

    @property
    def dialects(self) -> frozenset[Dialect]:
        """What the server speaks by itself; constant."""

    async def health(self) -> bool:
        """Whether it would serve a request now: False while it loads, is down or does not answer. Never raises."""

    async def mark(self) -> str:
        """Another text where another server answers, or another list of models is there, as far as that can be told at
        every look; empty where it cannot. Never raises."""

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

    async def capabilities(self) -> BackendCapabilities:
        """What it says of itself; empty where it does not, or does not answer in 10 s. Never raises."""

    async def loaded(self) -> frozenset[str] | None:
        """The models in its memory, by its names; None where it does not tell or does not answer. Never raises."""

    async def look_for_files(self) -> None:
        """Has it look for models whose files came or went, where it does not do so by itself. Never raises."""

    async def load(self, model: str) -> None:
        """Returns once the model is in memory, also where it was; `LOAD_S` is the longest that may take.

        Raises NotSupported where such a server does not load on request, NotFound, BackendDown, BackendTimeout.
        """

    async def unload(self, model: str) -> None:
        """The model is out of memory, or will be once its requests have ended; also where it was not in it.

        Raises as `load`.
        """


def open_backend(kind: BackendKind, address: str, access: Access = NO_ACCESS) -> Backend:
    """The backend of `kind` at `address`. Nothing is asked yet, so it may be down. `access`: all there is; what of it
    the server is shown follows from its kind and its address."""
    shown = access.shown_to(kind, address)
    match kind:
        case BackendKind.VLLM:
            return Vllm(address, shown)
        case BackendKind.LLAMA:
            return LlamaServer(address, shown)
        case BackendKind.REMOTE:
            return Remote(address, shown)
        case BackendKind.OLLAMA | BackendKind.DEMO:
            return Ollama(address, kind, shown)
