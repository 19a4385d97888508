"""The memory of the pool's models, and how long they load and unload: estimated at first, then as they were measured.

A footprint belongs to a model's digest, its context, its requests at once and the kind of GPU, not to its name. What
was learnt is in memory first and in SQLite soon after; a write that fails costs the learning of one load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from hive.backends.entries import ModelEntry
from hive.domain import BackendKind
from hive.errors import HiveError
from hive.pool.estimate import ENGINES, EstimateSource, MemoryEstimate, ModelFacts, estimate
from hive.pool.footprints import Footprint, FootprintKey, SleepFootprint
from hive.pool.state import CPU, MIB
from hive.pooling.entry_facts import NOT_READ, EntryFacts, FileFacts, entry_facts, read_facts, signature
from hive.pooling.workflow_facts import read_workflow_facts
from hive.settings.table import Settings
from hive.store import pool
from hive.store.database import Database

log = logging.getLogger("hive.pool")

LOAD_BEGIN_S, LOAD_BYTES_PER_S = 4.0, 1.5e9
"""A load that was never measured (facts of the benchmark's box: SSD, warm driver)."""
LOAD_UNKNOWN_S = 30.0
UNLOAD_S = 1.5
"""An unload, until one was measured."""
CONTEXT_PART = 32
"""The context that is added to an estimate is at most such a part of the GPU's memory."""
GREW = 1.01
"""A peak that grew by less is not written down."""


class Footprints:
    """One for the daemon. `gpu` is the kind of GPU, as its driver names it, or `cpu`."""

    def __init__(
        self,
        database: Database,
        settings: Callable[[], Settings],
        rows: dict[str, str],
        of_others: Callable[[ModelEntry], Awaitable[FileFacts]] | None = None,
    ) -> None:
        """`rows`: as store/pool.py gives them; one that cannot be read is passed over, with a line in the log.
        `of_others`: tells the same of a model without a server here as files do of others."""
        self._database = database
        self._settings = settings
        self._of_others = of_others
        self._known: dict[FootprintKey, Footprint] = {}
        self._kept_peaks: dict[FootprintKey, int] = {}
        self._files: dict[Path, tuple[tuple[object, ...], FileFacts]] = {}
        self._reading = asyncio.Lock()
        self.gpu_bytes: int | None = None
        """Memory of the smallest GPU, as it was seen last; None where there is none."""
        for name, data in rows.items():
            footprint = _decoded(name, data)
            if footprint is not None:
                self._known[footprint.key] = footprint
                self._kept_peaks[footprint.key] = footprint.peak_bytes

    def __repr__(self) -> str:
        return f"<Footprints {len(self._known)} learnt, {len(self._files)} models read>"

    # what is known --------------------------------------------------------------------------------------------------

    async def facts_of(self, entry: ModelEntry) -> EntryFacts:
        """Its facts as its files are now. They are read in a thread, again only after a change."""
        if not entry.has_server_here:
            nothing = FileFacts(can_load=False, why_not="its server is not asked")
            self._files[_place(entry)] = (), nothing if self._of_others is None else await self._of_others(entry)
            return self.known(entry)
        async with self._reading:
            for path in (entry.path, entry.draft):
                if path is not None:
                    read = read_workflow_facts if entry.kind == BackendKind.COMFYUI else read_facts
                    self._files[path] = await asyncio.to_thread(_read, path, self._files.get(path), read)
        return self.known(entry)

    def known(self, entry: ModelEntry) -> EntryFacts:
        """Its facts as its files were when `facts_of` read them last; no look at the disk."""
        _, files = self._files.get(_place(entry), ((), NOT_READ))
        return entry_facts(entry, files, self._settings().inference)

    def draft(self, entry: ModelEntry) -> FileFacts | None:
        """The facts of the model it drafts with, as its files were when they were read last; None where it has
        none."""
        return None if entry.draft is None else self._files.get(entry.draft, ((), NOT_READ))[1]

    def draft_bytes(self, entry: ModelEntry) -> int:
        """Bytes that its draft model takes beside it: weights, and the keys and values of as long a context."""
        if (draft := self.draft(entry)) is None:
            return 0
        facts = ModelFacts(
            name=entry.row.draft,
            file_bytes=draft.size_bytes,
            is_gguf=draft.is_gguf,
            shape=draft.shape,
            context=self.known(entry).context,
        )
        found = estimate(facts, self._settings().pool.estimate_margin_percent)
        return 0 if found is None else found.bytes

    def keep(self, entries: list[ModelEntry]) -> None:
        """Forgets the files of all other models. What was learnt of them stays."""
        paths = {_place(entry) for entry in entries} | {entry.draft for entry in entries if entry.draft is not None}
        self._files = {path: files for path, files in self._files.items() if path in paths}

    def need(self, entry: ModelEntry, gpu: str) -> MemoryEstimate | None:
        """The charge of a load; None where nothing is known: it needs a `vram_mb`."""
        if entry.is_remote:
            return MemoryEstimate(0, EstimateSource.ENTRY)
        facts, footprint = self.known(entry), self._footprint(entry, gpu)
        known = ModelFacts(
            name=entry.name,
            learnt_bytes=None if footprint is None else footprint.peak_bytes or None,
            vram_mb=entry.row.vram_mb or None,
            file_bytes=None
            if facts.size_bytes is None
            else facts.size_bytes + (0 if entry.adapter is None else entry.adapter.bytes),
            is_gguf=facts.is_gguf,
            shape=facts.shape,
            context=facts.context,
            engine=ENGINES.get((entry.kind, gpu == CPU or entry.row.gpus.strip() == CPU)),
        )
        found = estimate(known, self._settings().pool.estimate_margin_percent)
        if found is None or found.source in (EstimateSource.LEARNT, EstimateSource.ENTRY):
            return found  # its draft is in it
        return MemoryEstimate(found.bytes + self.draft_bytes(entry) + self._context_bytes(entry, gpu), found.source)

    def _context_bytes(self, entry: ModelEntry, gpu: str) -> int:
        """Bytes that the driver takes for its server: a CUDA context with the code of its kernels, and cuBLAS's
        workspace. A small GPU has fewer multiprocessors, and smaller contexts."""
        if gpu == CPU or entry.kind != BackendKind.LLAMA or entry.row.gpus.strip() == CPU:
            return 0
        told = self._settings().pool.gpu_context_mb * MIB
        return told if self.gpu_bytes is None else min(told, self.gpu_bytes // CONTEXT_PART)

    def load_s(self, entry: ModelEntry, gpu: str) -> float:
        """The p95 of its loads; 4 s and 1.5 GB/s where none was measured."""
        footprint = self._footprint(entry, gpu)
        return (footprint.load_p95_s if footprint else None) or self._load_guessed_s(entry, gpu)

    def unload_s(self, entry: ModelEntry, gpu: str) -> float:
        """The p95 of its unloads; 1.5 s where none was measured."""
        footprint = self._footprint(entry, gpu)
        return (footprint.unload_p95_s if footprint else None) or UNLOAD_S

    def has_loaded(self, entry: ModelEntry, gpu: str) -> bool:
        """Whether a load of it was ever measured."""
        footprint = self._footprint(entry, gpu)
        return footprint is not None and bool(footprint.load_s)

    def sleep(self, entry: ModelEntry, gpu: str, level: str) -> SleepFootprint:
        """The measurements of a level of sleep; none where its files are not known."""
        footprint = self._footprint(entry, gpu)
        return SleepFootprint(level) if footprint is None else footprint.sleep(level)

    def steady_bytes(self, entry: ModelEntry, gpu: str) -> int | None:
        """The memory it had after its last load, in all accounts together; None if none was measured."""
        footprint = self._footprint(entry, gpu)
        return (footprint.steady_bytes if footprint else 0) or None

    def load_p50_s(self, entry: ModelEntry, gpu: str) -> float:
        """The median of its loads; the same guess where none was measured."""
        footprint = self._footprint(entry, gpu)
        return (footprint.load_p50_s if footprint else None) or self._load_guessed_s(entry, gpu)

    def _load_guessed_s(self, entry: ModelEntry, gpu: str) -> float:
        size = self.known(entry).size_bytes
        if size is None:
            need = self.need(entry, gpu)
            size = None if need is None else need.bytes
        return LOAD_UNKNOWN_S if size is None else LOAD_BEGIN_S + size / LOAD_BYTES_PER_S

    def _key(self, entry: ModelEntry, gpu: str) -> FootprintKey | None:
        """None where the files are not known: nothing is learnt of such a model."""
        facts = self.known(entry)
        if not facts.digest:
            return None
        draft = self.draft(entry)
        return FootprintKey(
            facts.digest,
            entry.kind,
            facts.context,
            facts.parallel,
            draft="" if draft is None else draft.digest,
            adapters=adapters_in(entry),
            gpu=gpu,
        )

    def _footprint(self, entry: ModelEntry, gpu: str) -> Footprint | None:
        key = self._key(entry, gpu)
        return None if key is None else self._known.get(key)

    # what is learnt -------------------------------------------------------------------------------------------------

    async def after_load(self, entry: ModelEntry, gpu: str, steady: int, peak: int, load_s: float) -> None:
        """One load was measured: bytes in all its accounts together, once it had answered and at most; seconds."""
        key = self._key(entry, gpu)
        if key is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_load(steady, peak, load_s))

    async def after_unload(self, entry: ModelEntry, gpu: str, unload_s: float) -> None:
        """Its server was stopped, and its memory was back so many seconds after the order."""
        key = self._key(entry, gpu)
        if key is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_unload(unload_s))

    async def after_oom(self, entry: ModelEntry, gpu: str, charged: int) -> None:
        """A load died for memory with `charged` bytes: the next one is charged a quarter more."""
        key = self._key(entry, gpu)
        if key is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_oom(charged))

    async def after_peak(self, entry: ModelEntry, gpu: str, peak: int) -> None:
        """It was seen to take so much while it served. Written down where that is 1 % more than was written."""
        key = self._key(entry, gpu)
        if key is None:
            return
        footprint = self._known.get(key, Footprint(key))
        if peak <= footprint.peak_bytes:
            return
        footprint = self._known[key] = footprint.after_peak(peak)
        if peak > self._kept_peaks.get(key, 0) * GREW:
            await self._learn(footprint)

    async def after_sleep(self, entry: ModelEntry, gpu: str, level: str, kept: int) -> None:
        """It fell asleep, and `kept` bytes stayed in all its accounts together."""
        if (key := self._key(entry, gpu)) is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_sleep(level, kept))

    async def after_wake(self, entry: ModelEntry, gpu: str, level: str, wake_s: float) -> None:
        """It woke in so many seconds."""
        if (key := self._key(entry, gpu)) is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_wake(level, wake_s))

    async def after_ban(self, entry: ModelEntry, gpu: str, level: str, why: str, version: str) -> None:
        """This level does not work with this version of its server: it is not used again."""
        if (key := self._key(entry, gpu)) is not None:
            await self._learn(self._known.get(key, Footprint(key)).after_ban(level, why, version))

    async def _learn(self, footprint: Footprint) -> None:
        key = footprint.key
        self._known[key] = footprint
        name, data = _name(key), msgspec.json.encode(footprint).decode()
        try:
            await self._database.write(lambda conn: pool.put_footprint(conn, name, data, time.time()))
        except HiveError as error:  # the disk is full: a load that went well did go well
            log.warning("footprint_not_kept key=%s why=%s", name, error.message)
            return
        self._kept_peaks[key] = max(self._kept_peaks.get(key, 0), footprint.peak_bytes)


def adapters_in(entry: ModelEntry) -> tuple[str, ...]:
    """The adapters that a footprint depends on: the weights of the one it starts with, or the room for several."""
    if entry.adapter is not None:
        return (entry.adapter.digest,)
    return (f"{entry.row.adapters} slots",) if entry.row.adapters else ()


def _place(entry: ModelEntry) -> Path:
    """The key of what is known of its files; a name at a remote server may be another one's at Ollama."""
    return Path(entry.id) if entry.is_remote else entry.path


def _read(
    path: Path, seen: tuple[tuple[object, ...], FileFacts] | None, read: Callable[[Path], FileFacts]
) -> tuple[tuple[object, ...], FileFacts]:
    """The signature is taken first: files that change while they are read have another one at the next look."""
    now = signature(path)
    return seen if seen is not None and seen[0] == now else (now, read(path))


def _name(key: FootprintKey) -> str:
    """The key of its row."""
    return msgspec.json.encode(key).decode()


def _decoded(name: str, data: str) -> Footprint | None:
    try:
        footprint = msgspec.json.decode(data, type=Footprint)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.warning("footprint_unreadable key=%.200s why=%s", name, error)
        return None
    wakes = (time for sleep in footprint.sleeps for time in sleep.wake_s)
    times = (*footprint.load_s, *footprint.unload_s, *wakes)
    if (
        _name(footprint.key) != name
        or footprint.peak_bytes < 0
        or footprint.steady_bytes < 0
        or min(times, default=0) < 0
        or any((sleep.kept_bytes or 0) < 0 for sleep in footprint.sleeps)
    ):
        log.warning("footprint_unreadable key=%.200s why='it is another key's, or has figures below 0'", name)
        return None
    return footprint
