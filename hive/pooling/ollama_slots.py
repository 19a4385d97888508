"""The models of one Ollama as slots of the pool: loaded, let go and watched over its API.

Ollama is one server with several models, and unloads by itself what it likes: for want of memory as it sees it, for a
number of models (`OLLAMA_MAX_LOADED_MODELS`), with its own end. A model that is not listed any more without Hive's
doing was dropped, which is no crash. One that is listed without it (somebody asked Ollama past Hive) is found, and the
pool takes it over. What is known is kept here and renewed by looking; a question that Ollama does not answer in time,
as it does not while it loads, leaves what was known.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.backends.backend import open_backend
from hive.backends.entries import ModelEntry
from hive.backends.launch import socket_of
from hive.backends.ollama import why_far
from hive.backends.ollama_memory import OllamaModel, in_memory, keep, let_go, listed
from hive.backends.switch import Target
from hive.domain import BackendKind, ModelInfo, origin_of
from hive.errors import BackendDown, BackendTimeout, HiveError, NotFound, TimedOut, WrongState
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pooling.entry_facts import FileFacts
from hive.settings.pool import as_ollama
from hive.settings.table import InferenceSection
from hive.tasks import spawn

log = logging.getLogger("hive.pool")

LOOK_S = 1.0
"""Between two looks at what is in memory while a model of the pool is."""
IDLE_LOOK_S = 3.0
LIST_S = 5.0
"""Between two looks at the list of models."""
ASK_AGAIN_S = 0.2
"""A connection that is refused or reset is tried once more before Ollama counts as gone."""
LET_GO_AGAIN_S = 1.0
LEAVES_S = 60.0
"""Besides its grace a model has so long to leave: Ollama waits for requests of others, and for the GPU's memory."""
KEPT_AGAIN_S = 20.0
"""Between two tries to have a model kept that would expire."""
NOT_ASKED = "it has not been asked yet"


class _Held:
    """A model that is in memory, on its way there or on its way out. `row`: as Ollama listed it last, None where it
    did not. `work`: the load or the unload that is under way."""

    def __init__(self, run: str, state: ProcessState, grant: SlotGrant | None) -> None:
        self.run = run
        self.state = state
        self.grant = grant
        self.since = time.monotonic()
        self.row: OllamaModel | None = None
        self.work: asyncio.Task[None] | None = None
        self.kept_at = float("-inf")


class OllamaSlots:
    """The entries of `kind` ollama, at one address. Every method is called on the loop.

    `on_moved`: a model is loaded, or has gone. `on_list`: what is told of the entries' models has changed. `read_log`:
    the last lines that Ollama wrote, where Hive runs it.
    """

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        address: str,
        *,
        on_moved: Callable[[SlotProcess], None],
        on_list: Callable[[], None],
        read_log: Callable[[int], Awaitable[str]] | None = None,
    ) -> None:
        self.ids = {entry.id: entry for entry in entries if entry.is_ollamas}
        self.address = address
        self._control = open_backend(BackendKind.OLLAMA, address)
        self._on_moved = on_moved
        self._on_list = on_list
        self._read_log = read_log
        self._held: dict[str, _Held] = {}
        self._listed: dict[str, ModelInfo] = {}
        self._twins: dict[str, str] = {}
        """Entries whose model is another entry's: their ids, and the name of that one."""
        self._why_not = NOT_ASKED
        """The reason why nothing is known, or nothing can be loaded; empty where Ollama answers."""
        self._is_gone = False
        self._list_at = float("-inf")
        self._looking = asyncio.Lock()
        self._epoch = secrets.token_hex(4)
        self._runs = 0

    def __repr__(self) -> str:
        return f"<OllamaSlots {len(self.ids)} at {self.address}, {len(self._held)} held>"

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while self.ids:
            await self.look()
            await asyncio.sleep(LOOK_S if self._held else IDLE_LOOK_S)

    async def close(self) -> None:
        """Ends what is under way; a load that has not ended is given up by Ollama, what is loaded stays."""
        tasks = [held.work for held in self._held.values() if held.work is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # what there is ----------------------------------------------------------------------------------------------------

    async def facts_of(self, entry: ModelEntry) -> FileFacts:
        """Facts about the entry's model as Ollama listed it last."""
        if self._why_not == NOT_ASKED:
            await self.look()
        listed, twin = self._listed.get(entry.id), self._twins.get(entry.id)
        facts = FileFacts() if listed is None else facts_in(listed)
        if self._why_not:
            return msgspec.structs.replace(facts, can_load=False, why_not=self._why_not)
        if listed is None:
            why = f"the Ollama at {self.address} has no model {entry.at_server}"
        elif far := why_far(listed):
            why = f"it is no model of this box: {far}"
        elif twin is not None:
            why = f"at Ollama it is the same model as {twin}, which is loaded once: describe one of them"
        else:
            return facts
        return msgspec.structs.replace(facts, can_load=False, why_not=why)

    async def slots(self) -> dict[str, SlotProcess]:
        """Every model that is held here, as it was seen last."""
        if self._why_not == NOT_ASKED and self.ids:
            await self.look()
        return {id: self._process(id, held) for id, held in self._held.items()}

    def _process(self, id: str, held: _Held) -> SlotProcess:
        row = held.row
        return SlotProcess(
            id=id,
            run=held.run,
            state=held.state,
            age_s=time.monotonic() - held.since,
            grant=held.grant,
            bytes=None if row is None else max(0, row.size - row.size_vram),
            gpu_bytes=0 if row is None else row.size_vram,
        )

    async def slot_log(self, id: str, lines: int) -> str:
        """The last lines that Ollama wrote, about all its models."""
        if self._read_log is None:
            return f"what {self.ids[id].at_server} writes is in the log of the Ollama at {self.address}\n"
        return await self._read_log(lines)

    # loading and letting go -------------------------------------------------------------------------------------------

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        """Begins to load a model. Raises NotFound, WrongState while it is being let go."""
        if id not in self.ids:
            raise NotFound(f"no model of Ollama has the slot {id}")
        held = self._held.get(id)
        if held is not None and held.state is ProcessState.STOPPING:
            raise WrongState(f"{self.ids[id].name} is being unloaded", hint="try again once it is gone")
        if held is None:
            held = self._held[id] = _Held(self._next_run(), ProcessState.STARTING, grant)
            held.work = spawn(self._load(self.ids[id], held), name=f"ollama loads {self.ids[id].name}")
        held.grant = held.grant or grant
        return self._process(id, held)

    def _next_run(self) -> str:
        self._runs += 1
        return f"{self._epoch}-{self._runs}"

    async def _load(self, entry: ModelEntry, held: _Held) -> None:
        error = await outcome_of(self._ask_to_keep(entry))
        is_there = await self.look()
        if isinstance(error, HiveError):
            self._end(entry.id, held, error.message, was_dropped=bool(self._why_not))
        elif is_there and held.row is None:
            self._end(entry.id, held, "Ollama has loaded it, and does not list it as loaded", was_dropped=False)
        else:
            held.state, held.work = ProcessState.SERVING, None
            self._on_moved(self._process(entry.id, held))

    async def _ask_to_keep(self, entry: ModelEntry) -> None:
        await self._control.converse(partial(keep, model=entry.at_server))

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        """Has a model unloaded; returns once Ollama does not list it. Raises TimedOut."""
        held = self._held.get(id)
        if held is None:
            return
        if held.state is not ProcessState.STOPPING:
            if held.work is not None:
                held.work.cancel()
            held.state = ProcessState.STOPPING
            held.work = spawn(self._let_go(self.ids[id], held), name=f"ollama unloads {self.ids[id].name}")
        assert held.work is not None
        done, _ = await asyncio.wait({held.work}, timeout=grace_s + LEAVES_S)  # it goes on also without who asked
        if not done:
            raise TimedOut(f"Ollama still lists {self.ids[id].at_server} {grace_s + LEAVES_S:.0f} s after its unload")

    async def _let_go(self, entry: ModelEntry, held: _Held) -> None:
        wait_s, asked_at = 0.02, float("-inf")
        while True:
            if time.monotonic() - asked_at >= LET_GO_AGAIN_S:  # somebody's request may have kept it (ollama #17408)
                asked_at = time.monotonic()
                asking = self._control.converse(partial(let_go, model=entry.at_server))
                if isinstance(error := await outcome_of(asking), HiveError):
                    log.warning("ollama_not_asked_to_unload model=%s error=%s", entry.name, error.message)
            if (await self.look() and held.row is None) or self._is_gone:
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
        self._held.pop(entry.id, None)

    # looking ----------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """Asks what is in memory, and now and then which models there are. Whether Ollama answered."""
        async with self._looking:
            rows = await self._in_memory()
            if isinstance(rows, BackendTimeout):
                if self._why_not == NOT_ASKED:
                    self._say(rows.message)
                return False
            if isinstance(rows, HiveError):
                self._say_gone()
                return False
            if time.monotonic() - self._list_at >= LIST_S or self._why_not:
                models = await outcome_of(self._control.converse(listed))
                if not isinstance(models, HiveError):
                    self._list_at = time.monotonic()
                    self._learn(models)
            self._see(rows)
            return True

    async def _in_memory(self) -> list[OllamaModel] | HiveError:
        rows = await outcome_of(self._control.converse(in_memory))
        if isinstance(rows, BackendDown):
            await asyncio.sleep(ASK_AGAIN_S)
            rows = await outcome_of(self._control.converse(in_memory))
        return rows

    def _say(self, why_not: str) -> None:
        """Takes why nothing can be loaded, empty if it can be."""
        if why_not != self._why_not:
            log.info("ollama_is address=%s why_not='%s'", self.address, why_not)
            self._why_not = why_not
            self._on_list()

    def _say_gone(self) -> None:
        self._is_gone = True
        self._say(f"no Ollama answers at {self.address}")
        for id, held in list(self._held.items()):
            held.row = None
            if held.state is ProcessState.SERVING:
                self._end(id, held, self._why_not, was_dropped=True)

    def _learn(self, models: list[ModelInfo]) -> None:
        """Takes the list of models."""
        by_name = {as_ollama(model.name): model for model in models}
        found = {id: by_name[name] for id, entry in self.ids.items() if (name := as_ollama(entry.at_server)) in by_name}
        first: dict[str, str] = {}
        twins = {}
        for id, model in found.items():
            if model.digest and first.setdefault(model.digest, id) != id:
                twins[id] = self.ids[first[model.digest]].name
        if (found, twins) != (self._listed, self._twins):
            self._listed, self._twins = found, twins
            self._on_list()
        self._is_gone = False
        self._say("")

    def _see(self, rows: list[OllamaModel]) -> None:
        """Takes what is in memory."""
        by_name = {as_ollama(row.name): row for row in rows}
        by_digest = {row.digest: row for row in rows if row.digest}
        for id, entry in self.ids.items():
            model, held = self._listed.get(id), self._held.get(id)
            row = by_name.get(as_ollama(entry.at_server))
            if row is None and model is not None:
                row = by_digest.get(model.digest)  # a copy has one server with what it is a copy of
            if id in self._twins:
                row = None
            if held is not None:
                held.row = row
            if held is None and row is not None:
                held = self._held[id] = _Held(self._next_run(), ProcessState.SERVING, None)
                held.row = row
                log.warning("ollama_model_found model=%s", entry.name)
            elif held is not None and row is None and held.state is ProcessState.SERVING:
                self._end(id, held, "Ollama unloaded it by itself", was_dropped=True)
            if held is not None and row is not None and held.state is ProcessState.SERVING:
                self._keep(entry, held, row)
                if held.grant is None:  # each time: the pool may have been busy with the end of an earlier one
                    self._on_moved(self._process(id, held))

    def _keep(self, entry: ModelEntry, held: _Held, row: OllamaModel) -> None:
        """Has a model kept that Ollama would unload after a while: it was loaded past Hive."""
        now = time.monotonic()
        if row.is_kept(time.time()) or now - held.kept_at < KEPT_AGAIN_S or held.work is not None:
            return
        held.kept_at = now
        held.work = spawn(self._go_on_keeping(entry, held), name=f"ollama keeps {entry.name}")

    async def _go_on_keeping(self, entry: ModelEntry, held: _Held) -> None:
        if isinstance(error := await outcome_of(self._ask_to_keep(entry)), HiveError):
            log.warning("ollama_model_not_kept model=%s error=%s", entry.name, error.message)
        if held.state is ProcessState.SERVING:
            held.work = None

    def _end(self, id: str, held: _Held, why: str, *, was_dropped: bool) -> None:
        """A model is in memory no more, or never was."""
        if self._held.get(id) is not held:
            return
        del self._held[id]
        log.info("ollama_model_ended model=%s why='%s'", self.ids[id].name, why)
        self._on_moved(
            SlotProcess(
                id=id,
                run=held.run,
                state=ProcessState.ENDED,
                grant=held.grant,
                why=why,
                last=[] if was_dropped else [why],
                was_dropped=was_dropped,
            )
        )


def facts_in(model: ModelInfo) -> FileFacts:
    """The row of Ollama's list as facts about files."""
    return FileFacts(
        digest=model.digest,
        size_bytes=model.size_bytes,
        context_trained=model.context_length,
        quantization=model.quantization,
        changed_at=float(model.created),
    )


def ollama_address(inference: InferenceSection, *, has_units: bool, in_use: Iterable[Target | None]) -> str:
    """The address of the box's Ollama. `in_use`: the servers chosen, an Ollama of which is it if it is on this box;
    `has_units`: else it is a service of an installed Hive.

    >>> far, here = Target("ollama", "10.0.0.9:11434"), Target("ollama", "127.0.0.1:9")
    >>> ollama_address(InferenceSection(), has_units=True, in_use=[None, far])
    '/run/hive-inference/ollama.sock'
    >>> ollama_address(InferenceSection(), has_units=False, in_use=[far, here])
    '127.0.0.1:9'
    >>> ollama_address(InferenceSection(), has_units=False, in_use=[Target("vllm", "127.0.0.1:8000")])
    '127.0.0.1:11434'
    """
    for target in in_use:
        if target is not None and target.kind == BackendKind.OLLAMA and origin_of(target.address).is_here:
            return target.address
    return str(socket_of(BackendKind.OLLAMA)) if has_units else f"{inference.host}:{inference.port}"
