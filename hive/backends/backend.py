"""One inference server, asked: carries on the conversations of its kind (`BackendSpec.asking`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from hive.backends import ask, openapi
from hive.backends.conversation import LOAD_S, AskedServer, ControlAnswer, Conversation, Pause, Question
from hive.backends.counters import Drafts, Heard, PrefixCache, ReportedLimits
from hive.backends.kinds import spec_of
from hive.backends.spec import BackendSpec, KeptPrompt, Sleeping
from hive.domain import Dialect, FoundCapabilities, ModelInfo, origin_of
from hive.errors import BackendTimeout, HiveError, NotSupported
from hive.host.access import NO_ACCESS, RemoteAccess

DESCRIBED_S = 10.0
"""vLLM 0.32 makes its 270 kB when it is first asked for them, and answers nobody meanwhile: 4.3 s on a busy machine of
two cores, 0.06 s from then on. So it is asked when it came up."""
Result = TypeVar("Result")


@asynccontextmanager
async def within(limit_s: float, what: str) -> AsyncIterator[None]:
    """Raises BackendTimeout where it takes longer."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BackendTimeout(f"{what} within {limit_s:g} s") from None


class BackendControl:
    """One inference server at one address; control questions only, requests of agents go through the proxy.

    No question sends a prompt, loads a model or wakes a sleeping one; only `load`, `unload`, `erase`, `fall_asleep`
    and `wake` change anything. Each question is answered within 2 s, by a server on another machine within 5 s, or
    fails. The server may come and go between two questions; nothing is remembered here.
    """

    def __init__(self, spec: BackendSpec, address: str, access: RemoteAccess = NO_ACCESS) -> None:
        self._spec = spec
        self._asking = spec.asking
        self._server = AskedServer(address, bool(access.key))
        self.address = address
        """As `BackendInfo` has it."""
        self.access = access
        """The part of Hive's key and authorities that is shown to it."""
        self._within_s = ask.ANSWER_S if origin_of(address).is_here else ask.FAR_ANSWER_S

    def __repr__(self) -> str:
        return f"<BackendControl {self.kind} at {self.address}>"

    @property
    def kind(self) -> str:
        return self._spec.kind

    @property
    def dialects(self) -> frozenset[Dialect]:
        """Dialects the server speaks by itself; constant."""
        return self._spec.dialects

    async def health(self) -> bool:
        """Whether it would serve a request now: False while it loads, is down or does not answer. Never raises."""
        return await ask.is_ok(self.address, self._asking.health_path, within_s=self._within_s, access=self.access)

    async def mark(self) -> str:
        """Another text where another server answers, or another list of models is there, as far as that can be told at
        every look; empty where it cannot. Never raises."""
        return await self._carry_on(self._asking.mark(self._server))

    async def models(self) -> list[ModelInfo]:
        """Models it offers, in its own order and by its own names; an empty list is an answer.

        Raises `BackendDown` or `BackendTimeout`.
        """
        return await self._carry_on(self._asking.models(self._server))

    async def version(self) -> str:
        """Its own version text. Raises `BackendDown` or `BackendTimeout`."""
        return await self._carry_on(self._asking.version(self._server))

    async def busy(self) -> ReportedLimits:
        """Requests it works on at once and requests in its own queue, as far as it tells. Never raises."""
        return await self._carry_on(self._asking.busy())

    async def prefix_cache(self) -> PrefixCache | None:
        """Its counters of prompt tokens since it started, None where it tells none or does not answer. Never raises."""
        return await self._carry_on(self._asking.prefix_cache())

    async def kv_usage(self) -> float | None:
        """The share of its cache of keys and values that is in use, from 0 to 1; None where it does not tell. Never
        raises."""
        return await self._carry_on(self._asking.kv_usage())

    async def drafts(self) -> Drafts | None:
        """Its counters of drafted tokens since it started, None where it tells none or does not answer. Never
        raises."""
        return await self._carry_on(self._asking.drafts())

    async def heard(self) -> Heard | None:
        """Its counters of sound since it started, None where it tells none or does not answer. Never raises."""
        return await self._carry_on(self._asking.heard())

    async def capabilities(self) -> FoundCapabilities:
        """Description of itself; without one in 10 s what is taken for granted of its kind. Never raises."""
        path, described = self._asking.described_at, None
        if path:
            described = await ask.text(self.address, path, within_s=DESCRIBED_S, access=self.access)
        told = None if described is None else await asyncio.to_thread(openapi.capabilities, described)
        return told or self._asking.assumed

    async def loaded(self) -> frozenset[str] | None:
        """The models in its memory, by its names; None where it does not tell or does not answer. Never raises."""
        return await self._carry_on(self._asking.loaded(self._server))

    async def look_for_files(self) -> None:
        """Has it look for models whose files came or went, where it does not do so by itself. Never raises."""
        if path := self._asking.look_for_files_at:
            await ask.text(self.address, path, within_s=self._within_s, access=self.access)

    async def load(self, model: str) -> None:
        """Returns once the model is in memory, also where it was; `LOAD_S` is the longest that may take.

        Raises NotSupported where such a server does not load on request, NotFound, BackendDown, BackendTimeout.
        """
        if self._asking.load is None:
            raise NotSupported(f"{model} is not loaded on request: {self._asking.why_not_load}")
        async with within(LOAD_S, f"{self.address} has not loaded {model}"):
            await self._carry_on(self._asking.load(self._server, model))

    async def unload(self, model: str) -> None:
        """The model is out of memory, or will be once its requests have ended; also where it was not in it.

        Raises as `load`.
        """
        if self._asking.unload is None:
            raise NotSupported(f"{model} is not unloaded on request: {self._asking.why_not_load}")
        await self._carry_on(self._asking.unload(self._server, model))

    async def kept(self, model: str) -> list[KeptPrompt]:
        """Prompts that it keeps, slot by slot. Raises NotSupported, BackendDown, BackendTimeout."""
        if self._asking.kept is None:
            raise NotSupported(f"{self._spec.label} has no slots")
        return await self._carry_on(self._asking.kept(self._server, model))

    async def erase(self, model: str, slot: int) -> int:
        """The tokens that were in an idle slot and are in it no more. Raises as `kept`; BackendTimeout where it is busy
        by now."""
        if self._asking.erase is None:
            raise NotSupported(f"{self._spec.label} has no slots")
        return await self._carry_on(self._asking.erase(self._server, model, slot))

    async def converse(self, make: Callable[[AskedServer], Conversation[Result]]) -> Result:
        """The result of a conversation that only servers of its kind have; raises what that raises."""
        return await self._carry_on(make(self._server))

    async def asleep(self) -> str | None:
        """The level of its sleep, empty while it is awake; None where it cannot sleep. Raises `BackendDown`,
        `BackendTimeout`."""
        return None if self._spec.sleeping is None else await self._carry_on(self._spec.sleeping.asleep(self._server))

    async def fall_asleep(self, level: str, *, within_s: float) -> None:
        """Returns once it says that it sleeps; what it holds has to be measured. Raises NotSupported, BackendDown,
        BackendTimeout."""
        async with within(within_s, f"{self.address} has not fallen asleep"):
            await self._carry_on(self._sleeping().fall_asleep(self._server, level))

    async def wake(self, level: str, *, within_s: float) -> None:
        """Returns once it says that it is awake. Raises NotSupported, BackendDown, BackendTimeout."""
        async with within(within_s, f"{self.address} has not woken"):
            await self._carry_on(self._sleeping().wake(self._server, level))

    def _sleeping(self) -> Sleeping:
        if self._spec.sleeping is None:
            raise NotSupported(f"{self._spec.label} has no sleep")
        return self._spec.sleeping

    async def _carry_on(self, conversation: Conversation[Result]) -> Result:
        """Asks what the conversation yields; returns its result, or raises what it raises."""
        answers: list[ControlAnswer | HiveError] = []
        try:
            wanted = next(conversation)
            while True:
                if isinstance(wanted, Pause):
                    await asyncio.sleep(wanted.seconds)
                    answers = []
                else:
                    answers = list(await asyncio.gather(*(self._ask(question) for question in wanted)))
                wanted = conversation.send(answers)
        except StopIteration as end:
            result: Result = end.value
            return result

    async def _ask(self, question: Question) -> ControlAnswer | HiveError:
        within_s, access = question.within_s or self._within_s, self.access
        try:
            if question.body is None:
                return await ask.get(self.address, question.path, within_s=within_s, access=access)
            return await ask.post(self.address, question.path, question.body, within_s=within_s, access=access)
        except HiveError as error:
            return error


def open_backend(kind: str, address: str, access: RemoteAccess = NO_ACCESS) -> BackendControl:
    """The backend of `kind` at `address`. Nothing is asked yet, so it may be down. `access`: all there is; what of it
    the server is shown follows from its kind and its address."""
    spec = spec_of(kind)
    return BackendControl(spec, address, access.shown_to(address, may_ask=spec.is_remote))
