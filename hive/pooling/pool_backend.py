"""The services of `hive backend` in the books of the pool: charged like a model, never evicted.

A service is charged from the decision that it may start until its memory is measured back, as a model is. It is none of
the pool's models all the same: a switch starts and stops it (switching.py), and no decision does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hive.agents.transition_lock import outcome_of
from hive.backends.entries import GGUF, ModelEntry
from hive.domain import BackendKind
from hive.errors import BackendTimeout, HiveError, WrongState
from hive.link.helper import BackendIs
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.accounts import charged_in, with_measured
from hive.pool.moves import LoadSlot, RefuseWaiting
from hive.pool.state import MIB, ExclusiveOrder, Grant, MemoryAccount, Rules, SlotFacts, SlotState
from hive.pooling.footprints import Footprints
from hive.settings.pool import ModelRow
from hive.settings.table import InferenceSection, Settings

log = logging.getLogger("hive.pool")

LOOK_S = 10.0
"""Between two looks at a service's processes: systemd is asked for them."""
UNMEASURED_S = 15.0
"""A service whose memory nobody tells is charged what it was given from then on."""
RUNNING = ("active", "activating", "reloading")


def service_id(kind: str) -> str:
    """The id of a service in the books; no model's id holds a colon.

    >>> service_id(BackendKind.OLLAMA)
    'backend:ollama'
    """
    return f"backend:{kind}"


class BackendSlot:
    """One service as the books have it. `grants`: its charges; `why_not`: the reason that it was given no room;
    `serves_at`: since when it answers, None if it does not. It is ready then, but where nothing told its need
    (`need_bytes` None) only once what it takes was measured."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = service_id(kind)
        self.model = f"the {kind} of `hive backend`"
        self.state = SlotState.COLD
        self.grants: tuple[Grant, ...] = ()
        self.need_bytes: int | None = None
        self.wanted_at: float | None = None
        self.moved_at = 0.0
        self.serves_at: float | None = None
        self.pids: list[int] = []
        self.bytes: int | None = None
        self.run = ""
        self.why_not = ""

    def __repr__(self) -> str:
        return f"<BackendSlot {self.kind} {self.state}>"

    def facts(self, accounts: Sequence[MemoryAccount], models: Sequence[SlotFacts], rules: Rules) -> SlotFacts:
        """The service as the decider sees it. Where nothing tells its need, that is all of the account with the most
        room besides what is pinned: it takes what it finds."""
        need = self.need_bytes
        if need is None:
            need = max((_beside_pins(account, models, rules) for account in accounts), default=0)
        return SlotFacts(
            id=self.id,
            model=self.model,
            need_bytes=max(0, need),
            kind=self.kind,
            is_backend=True,
            state=self.state,
            grants=self.grants,
            pinned_at=self.wanted_at,
            moved_at=self.moved_at,
        )

    def measured(self, by_account: dict[str, int | None], now: float) -> None:
        """Takes a measurement. What it was given on trust, as nothing told its need, is made what it takes."""
        if self.serves_at is None:
            return
        known = {account: bytes for account, bytes in by_account.items() if bytes}
        if self.state is SlotState.LOADING and (known or now >= self.serves_at + UNMEASURED_S):
            self.state = SlotState.READY
        if self.need_bytes is None and known:
            self.need_bytes = sum(known.values())
            self.grants = tuple(Grant(account, bytes, bytes) for account, bytes in known.items())
            return
        self.grants = tuple(with_measured(grant, by_account.get(grant.account)) for grant in self.grants)
        charged = {grant.account for grant in self.grants}
        self.grants += tuple(Grant(account, bytes, bytes) for account, bytes in known.items() if account not in charged)


class PoolBackends:
    """The services by kind, and the order of a switch. Every method is called on the loop.

    `look`: the service of a kind as the helper sees it; raises HiveError. `wake`: has the pool decide; `gpu`: the kind
    of GPU. Without models (`is_on` False) nothing is charged, and no order waits for anything.
    """

    def __init__(
        self,
        *,
        is_on: bool,
        settings: Callable[[], Settings],
        footprints: Footprints,
        look: Callable[[BackendKind], Coroutine[Any, Any, BackendIs]],
        wake: Callable[[], None],
        gpu: Callable[[], str],
    ) -> None:
        self.is_on = is_on
        self.order: ExclusiveOrder | None = None
        self._settings = settings
        self._footprints = footprints
        self._look = look
        self._wake = wake
        self._gpu = gpu
        self._slots: dict[str, BackendSlot] = {}
        self._learnt: dict[str, int] = {}
        """Bytes that the service of a kind was seen to take, as long as this daemon runs."""
        self._changed = asyncio.Event()
        self._looked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<PoolBackends {', '.join(map(repr, self._slots.values()))}>"

    # for the pool -----------------------------------------------------------------------------------------------------

    @property
    def known(self) -> list[BackendSlot]:
        """Every service that was started or wanted."""
        return list(self._slots.values())

    def facts(
        self, accounts: Sequence[MemoryAccount], models: Sequence[SlotFacts], rules: Rules
    ) -> tuple[SlotFacts, ...]:
        """All services, as the decider sees them."""
        return tuple(slot.facts(accounts, models, rules) for slot in self._slots.values())

    def did(self, move: object) -> bool:
        """Takes a move of the decider if it says that a service may start, or that it may not."""
        if not isinstance(move, LoadSlot | RefuseWaiting):
            return False
        slot = next((slot for slot in self._slots.values() if slot.id == move.slot), None)
        if slot is None:
            return False
        if isinstance(move, LoadSlot):
            slot.state, slot.grants, slot.moved_at, slot.why_not = SlotState.LOADING, move.grants, time.monotonic(), ""
        else:
            slot.state, slot.why_not = SlotState.FAILED, move.why
        self._tell()
        return True

    async def processes(self) -> dict[str, SlotProcess]:
        """The services that run, by the id of the slot: to be measured with the models' servers."""
        held = [slot for slot in self._slots.values() if slot.state in (SlotState.LOADING, SlotState.READY)]
        if held and time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            for slot in held:
                found = await outcome_of(self._look(BackendKind(slot.kind)))
                if isinstance(found, BackendIs):
                    slot.pids, slot.bytes, slot.run = found.pids, found.bytes, str(found.pid)
        return {slot.id: _process(slot) for slot in held if slot.pids}

    def measured(self, by_slot: dict[str, dict[str, int | None]]) -> None:
        """Takes the measurement of all services."""
        now = time.monotonic()
        for slot in self._slots.values():
            was = slot.state
            slot.measured(by_slot.get(slot.id, {}), now)
            if slot.need_bytes and slot.serves_at is not None:
                self._learnt[slot.kind] = sum(grant.charged_bytes for grant in slot.grants)
            if slot.state is not was:
                self._tell()

    # for the switch ---------------------------------------------------------------------------------------------------

    async def took_over(self, kind: str) -> bool:
        """Books a service that runs already, as an earlier daemon left it. Whether it runs."""
        if not self.is_on:
            return False
        found = await outcome_of(self._look(BackendKind(kind)))
        if not isinstance(found, BackendIs) or found.state not in RUNNING:
            return False
        slot = self._slot(kind)
        now = time.monotonic()
        slot.state, slot.wanted_at, slot.serves_at = SlotState.READY, slot.wanted_at or now, slot.serves_at or now
        slot.need_bytes = None
        slot.pids, slot.bytes, slot.run = found.pids, found.bytes, str(found.pid)
        self._tell()
        return True

    async def want(self, kind: str) -> None:
        """Has the service loaded like a pinned model: at the daemon's start nothing has to leave for its kind."""
        if self.is_on:
            slot = self._slot(kind)
            slot.need_bytes = await self._need(kind)
            slot.wanted_at = slot.wanted_at or time.monotonic()
            if slot.state is SlotState.FAILED:
                slot.state = SlotState.COLD
            self._tell()

    def hold(self) -> None:
        """No model is loaded or leaves from now on: a switch goes on that an earlier daemon began."""
        self.order = ExclusiveOrder("", "")
        self._tell()

    async def clear_for(self, kind: str, *, others_leave: bool) -> None:
        """Begins an order to switch to this kind: from now on no model is loaded, and those of other kinds leave if
        `others_leave`. `granted` waits for it."""
        if self.is_on:
            await self.want(kind)
            self.order = ExclusiveOrder(kind if others_leave else "", self._slot(kind).id)
            self._tell()

    async def granted(self, kind: str, *, within_s: float | None) -> None:
        """Returns when the service may start. Raises WrongState if it can have no room, BackendTimeout."""
        if not self.is_on:
            return
        slot = self._slot(kind)
        try:
            async with asyncio.timeout(within_s):
                while slot.state in (SlotState.COLD, SlotState.STOPPING):
                    await self._changed.wait()
        except TimeoutError:
            raise BackendTimeout(f"models of the pool have not left for it within {within_s:.0f} s") from None
        if slot.state is SlotState.FAILED:
            raise WrongState(f"there is no room for it: {slot.why_not}", hint="hive pool; hive model unpin MODEL")

    def serves(self, kind: str) -> None:
        """The service answers: from now on it is charged what it takes."""
        if (slot := self._slots.get(kind)) is not None and slot.serves_at is None:
            slot.serves_at = time.monotonic()
            if slot.need_bytes is not None and slot.state is SlotState.LOADING:
                slot.state = SlotState.READY
            self._looked_at = float("-inf")
            self._tell()

    def stopped(self, kind: str) -> BackendSlot | None:
        """The service has ended, and its memory comes back: the slot while that is waited for, None if it held none.
        `gone` follows."""
        slot = self._slots.get(kind)
        if slot is None or not slot.grants:
            return None
        slot.state, slot.moved_at, slot.wanted_at, slot.pids = SlotState.STOPPING, time.monotonic(), None, []
        slot.serves_at = None
        self._tell()
        return slot

    def gone(self, kind: str) -> None:
        """Nothing of the service is left."""
        if self._slots.pop(kind, None) is not None:
            self._tell()

    def end_order(self) -> None:
        """The switch is over: models are loaded again as they are asked for."""
        self.order = None
        self._tell()

    def _slot(self, kind: str) -> BackendSlot:
        return self._slots.setdefault(kind, BackendSlot(kind))

    async def _need(self, kind: str) -> int | None:
        """The charge of a start as it was seen, or as its file tells it. None for vLLM, which takes what it finds; 0
        for one that loads models when they are asked for, or whose file is not there, so that it will not start."""
        if kind in self._learnt or kind == BackendKind.VLLM:
            return self._learnt.get(kind)
        entry = service_entry(kind, self._settings().inference)
        if entry is None or isinstance(await outcome_of(self._footprints.facts_of(entry)), HiveError):
            return 0
        need = self._footprints.need(entry, self._gpu())
        return 0 if need is None else need.bytes

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake()


def service_entry(kind: str, inference: InferenceSection) -> ModelEntry | None:
    """The one model that a service loads at its start as an entry; None for one that loads models later.

    >>> service_entry("llama", InferenceSection(llama_model="/srv/q.gguf")).path.name
    'q.gguf'
    >>> service_entry("llama", InferenceSection(llama_model="/srv/models/")) is None
    True
    """
    path = inference.llama_model
    if kind != BackendKind.LLAMA or not path.endswith(GGUF):
        return None
    row = ModelRow(backend=kind, file=path, context=inference.llama_context, parallel=inference.llama_parallel)
    return ModelEntry(id=service_id(kind), name=kind, kind=kind, path=Path(path), row=row, origin="[inference]")


def _process(slot: BackendSlot) -> SlotProcess:
    accounts = {grant.account: max(1, grant.charged_bytes // MIB) for grant in slot.grants}
    state = ProcessState.SERVING if slot.serves_at is not None else ProcessState.STARTING
    grant = SlotGrant(accounts=accounts) if accounts else None
    return SlotProcess(id=slot.id, run=slot.run, state=state, pids=slot.pids, bytes=slot.bytes, grant=grant)


def _beside_pins(account: MemoryAccount, models: Sequence[SlotFacts], rules: Rules) -> int:
    """Bytes of an account besides the reserve, foreign memory and what is pinned there."""
    pinned = [slot for slot in models if slot.pinned_at is not None]
    taken = account.reserve_bytes + int(account.foreign_bytes * rules.foreign_margin) + charged_in(account.id, pinned)
    return account.total_bytes - taken
