"""The accounts of the pool's memory as they are now: what each GPU and the host have, and what each slot takes there.

What cannot be measured is None, never 0: then the books alone decide (pool/accounts.py). An account is not lost with
one answer of the driver that fails; only whole answers without it, for a while, end it.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hive.domain import BackendKind
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.memory_box import BoxMemory, read_box
from hive.host.nvml import PROCESSES_MAX, ProcessOnGpu, SeenGpus
from hive.link.slots import ProcessState, SlotProcess
from hive.pool.accounts import foreign_peak
from hive.pool.state import CPU, MIB, Grant, MemoryAccount
from hive.pooling.pool_backend import service_id
from hive.settings.table import Settings

GONE_S = 60.0
"""After whole answers without a GPU for so long there is no such GPU."""
FOREIGN_S = 600.0
"""The peak of foreign memory is that of the last ten minutes: what was there once makes no GPU smaller for ever."""
LINGER_S = 2.0
"""Besides `[pool] free_s`: two looks and the age of an answer."""
OLLAMA_SERVICE = service_id(BackendKind.OLLAMA)
HOST_MEMORY = "host memory"
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own (PROC_PID_INIT_INO). NVIDIA's driver tells the pids of that one, wherever it is asked."""
UNIFIED = re.compile(r"\b(GB10|Tegra|Orin|Thor|Xavier)\b", re.IGNORECASE)
"""GPUs without memory of their own."""


class MemoryReading(NamedTuple):
    """One look. `names`: of the accounts, for people and for footprints; `by_slot`: slot id → account → bytes of its
    processes there, None where unknown: the accounts of its grant, and others where they were seen. `why_not`: why
    there is no account, or why no GPU was measured now; empty where all was. `idle_gpus`: on which nothing ran in the
    last second, as far as the driver tells."""

    accounts: tuple[MemoryAccount, ...]
    names: dict[str, str]
    by_slot: dict[str, dict[str, int | None]]
    why_not: str = ""
    idle_gpus: frozenset[str] = frozenset()


class GpuDevice(NamedTuple):
    """One GPU that programs can be told to use, or a part of one. None is unknown."""

    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    processes: tuple[ProcessOnGpu, ...] | None
    busy_percent: int | None = None


class _Lately(NamedTuple):
    """A server when it was seen last."""

    accounts: frozenset[str]
    at: float
    pids: frozenset[int]


class _KnownGpu(NamedTuple):
    name: str
    total_bytes: int
    seen_at: float


class PoolMemory:
    """One for the daemon; one look at a time."""

    def __init__(
        self,
        gpus: GpuMemoryReader,
        settings: Callable[[], Settings],
        *,
        box: Callable[[], BoxMemory] = read_box,
        clock: Callable[[], float] = time.monotonic,
        shares_pids: bool | None = None,
    ) -> None:
        """`shares_pids`: whether the driver's pids are those of this process; None: as the kernel says."""
        self._gpus = gpus
        self._settings = settings
        self._box = box
        self._clock = clock
        self._shares_pids = shares_pids if shares_pids is not None else in_first_pid_namespace()
        self._known: dict[str, _KnownGpu] = {}
        self._host_bytes: int | None = None
        self._foreign: dict[str, _ForeignMemory] = {}
        self._strangers = _Strangers()
        self._lately: dict[tuple[str, str], _Lately] = {}

    def __repr__(self) -> str:
        return f"<PoolMemory {len(self._known)} GPUs>"

    async def look(
        self,
        processes: Mapping[str, SlotProcess],
        *,
        programs: Collection[str] = (),
        unseen: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        overdue: Collection[str] = (),
        is_fresh: bool = False,
    ) -> MemoryReading:
        """The memory now. `processes`: every server there is, by the id of its slot. It waits for the driver no longer
        than the reader does, and raises nothing.

        `programs`: of these ids, those that may well have nothing on a GPU. `unseen`: bytes by account that are charged
        to what has no process here: what is used there beyond all others and foreign memory is taken for its own.
        `overdue`: each of these loses its memory once that is seen to be free, so that of foreign memory only that
        which was there before it, and is there now, is none of its own. `is_fresh`: what happened before the call is in
        the answer; else it may be a second old.
        """
        seen = await (self._gpus.seen_now() if is_fresh else self._gpus.seen())
        has_gpu, now, settings = self._gpus.has_gpu, self._clock(), self._settings()
        box = self._box()
        found = {device.uuid: device for device in devices(seen, box)}
        self._note(found, now, is_whole=not has_gpu or not (seen.why_not or any(gpu.fault for gpu in seen.gpus)))
        totals = {uuid: known.total_bytes for uuid, known in self._known.items()}
        used = {uuid: found[uuid].used_bytes if uuid in found else None for uuid in totals}
        names = {uuid: known.name for uuid, known in self._known.items()}
        if not (has_gpu or totals) or any(CPU in _named(row.gpus) for row in settings.models.values()):
            self._add_host(box, settings.pool.cpu_mb * MIB, totals, used)
            names |= {CPU: HOST_MEMORY} if CPU in totals else {}
        alive = [process for process in processes.values() if process.state is not ProcessState.ENDED]
        by_slot = {process.id: self._measured(process, totals, found, programs) for process in alive}
        by_slot |= less_inner(by_slot, [one.id for one in alive if one.gpu_bytes is not None and not one.pids])
        self._strangers.see(unseen, {} if not self._shares_pids else found)
        for id, bytes in self._of_unseen(unseen, by_slot, used, overdue).items():
            by_slot[id] = bytes
        unsure = self._unsure(alive, by_slot, now, settings.pool.free_s + LINGER_S)
        accounts = []
        for id, total in totals.items():
            own = [Grant(id, 0, measured[id]) for measured in by_slot.values() if id in measured]
            own += [Grant(id, 0)] if id in unsure else []
            strangers = self._strangers_on(found.get(id))
            foreign = self._foreign.setdefault(id, _ForeignMemory()).after(used[id], own, strangers, now)
            reserve = 0 if id == CPU and settings.pool.cpu_mb else settings.pool.reserve_mb * MIB
            accounts.append(MemoryAccount(id, total, reserve, used[id], foreign, sum((strangers or {}).values())))
        for gone in self._foreign.keys() - totals.keys():
            del self._foreign[gone]
        idle = frozenset(device.uuid for device in found.values() if device.busy_percent == 0)
        return MemoryReading(tuple(accounts), names, by_slot, self._why_not(seen, has_gpu, totals, found), idle)

    def _note(self, found: Mapping[str, GpuDevice], now: float, *, is_whole: bool) -> None:
        """Takes in what the driver told of GPUs, and forgets those that are gone."""
        for uuid, device in found.items():
            if device.total_bytes:
                self._known[uuid] = _KnownGpu(device.name, device.total_bytes, now)
        if is_whole:
            self._known = {uuid: known for uuid, known in self._known.items() if now - known.seen_at < GONE_S}

    def _add_host(self, box: BoxMemory, told_bytes: int, totals: dict[str, int], used: dict[str, int | None]) -> None:
        """With `[pool] cpu_mb` the books decide alone: the rest of the host's memory says nothing about that part."""
        self._host_bytes = box.total_bytes or self._host_bytes
        if told_bytes:
            totals[CPU], used[CPU] = told_bytes, None
        elif self._host_bytes:
            totals[CPU] = self._host_bytes
            known = box.total_bytes is not None and box.available_bytes is not None
            used[CPU] = max(0, (box.total_bytes or 0) - (box.available_bytes or 0)) if known else None

    def _of_unseen(
        self,
        unseen: Mapping[str, Mapping[str, int]],
        by_slot: Mapping[str, Mapping[str, int | None]],
        used: Mapping[str, int | None],
        overdue: Collection[str],
    ) -> dict[str, dict[str, int | None]]:
        """The part of what is used that holders without a process here have, one after the other. Of the host's memory
        nobody can tell."""
        found: dict[str, dict[str, int | None]] = {}
        taken: dict[str, int] = {}
        for id, charged in unseen.items():
            found[id] = {}
            for account, most in charged.items():
                beyond = self._beyond_known(account, by_slot, used)
                if beyond is None:
                    found[id][account] = None
                    continue
                if id in overdue:
                    foreign = self._strangers.bytes(id, account)
                else:
                    foreign = self._foreign[account].peak if account in self._foreign else 0
                own = min(most, max(0, beyond - foreign - taken.get(account, 0)))
                found[id][account] = own
                taken[account] = taken.get(account, 0) + own
        return found

    @staticmethod
    def _beyond_known(
        account: str, by_slot: Mapping[str, Mapping[str, int | None]], used: Mapping[str, int | None]
    ) -> int | None:
        """Memory used there beyond all that is known to be ours."""
        own = [measured[account] for measured in by_slot.values() if account in measured]
        known = [bytes for bytes in own if bytes is not None]
        total = used.get(account)
        if account == CPU or total is None or len(known) < len(own):
            return None
        return max(0, total - sum(known))

    def _measured(
        self,
        process: SlotProcess,
        totals: Mapping[str, int],
        found: Mapping[str, GpuDevice],
        programs: Collection[str],
    ) -> dict[str, int | None]:
        granted = set(totals) if process.grant is None else process.grant.accounts.keys() & totals.keys()
        measured: dict[str, int | None] = {}
        for id in totals:
            if id == CPU:
                bytes = process.bytes if CPU in granted else None
            elif process.gpu_bytes is not None:
                bytes = told_in(id, process, [account for account in totals if account in granted and account != CPU])
            else:
                told = found[id].processes if id in found and self._shares_pids else None
                bytes = bytes_of(process.pids, told)
                if bytes is None and process.id in programs and told is not None and len(told) < PROCESSES_MAX:
                    bytes = 0 if not {one.pid for one in told} & set(process.pids) else None
            if id in granted or bytes is not None:
                measured[id] = bytes
        return measured

    def _unsure(
        self, alive: Iterable[SlotProcess], by_slot: Mapping[str, Mapping[str, object]], now: float, linger_s: float
    ) -> set[str]:
        """The accounts in which what is used and what is ours are not of one moment: a server begins or ends there, or
        ended so lately that its memory may not be back. Their foreign memory is left as it was."""
        unsure: set[str] = set()
        here = set()
        for process in alive:
            accounts = frozenset(by_slot[process.id])
            here.add((process.id, process.run))
            self._lately[process.id, process.run] = _Lately(accounts, now, frozenset(process.pids))
            if process.state is not ProcessState.SERVING:
                unsure |= accounts
        self._lately = {run: seen for run, seen in self._lately.items() if now - seen.at <= linger_s}
        for run, seen in self._lately.items():
            if run not in here:
                unsure |= seen.accounts
        return unsure

    def _strangers_on(self, device: GpuDevice | None) -> dict[int, int] | None:
        """Bytes by pid of all that are none of the pool's, nor were lately; None where the driver does not name them
        all."""
        if device is None or device.processes is None or not self._shares_pids:
            return None
        if len(device.processes) >= PROCESSES_MAX or any(one.used_bytes is None for one in device.processes):
            return None
        ours = {pid for seen in self._lately.values() for pid in seen.pids}
        return {one.pid: one.used_bytes or 0 for one in device.processes if one.pid not in ours}

    @staticmethod
    def _why_not(seen: SeenGpus, has_gpu: bool, totals: Mapping[str, int], found: Mapping[str, GpuDevice]) -> str:
        if has_gpu and seen.why_not:
            return seen.why_not
        if has_gpu and not found:
            return next((gpu.fault for gpu in seen.gpus if gpu.fault), "the driver tells of no GPU that has a UUID")
        return "" if totals else "the memory of this host is not known"


class _Strangers:
    """Processes that were on a GPU before a holder without a process here was granted its memory: surely not its own.

    Of one that was granted before the first look nothing is known to be a stranger's.
    """

    def __init__(self) -> None:
        self._now: dict[str, dict[int, int]] = {}
        self._before: dict[str, frozenset[int]] = {}

    def see(self, unseen: Collection[str], found: Mapping[str, GpuDevice]) -> None:
        """Takes a look at all processes that the driver names."""
        were = frozenset(pid for named in self._now.values() for pid in named)
        self._before = {id: self._before.get(id, were) for id in unseen}
        self._now = {
            uuid: {one.pid: one.used_bytes or 0 for one in device.processes or ()} for uuid, device in found.items()
        }

    def bytes(self, id: str, account: str) -> int:
        """Memory that those who were there before this one have on this GPU now."""
        return sum(bytes for pid, bytes in self._now.get(account, {}).items() if pid in self._before.get(id, ()))


class _ForeignMemory:
    """The memory of others in one account: its peak in the last ten minutes in which it could be told.

    A process that has ended takes none again: where the driver names all of them, its part of the peak ends with it.
    """

    def __init__(self) -> None:
        self._all = _RecentPeak()
        self._of: dict[int, _RecentPeak] = {}
        """By the pid of each that is there."""
        self._rest = _RecentPeak()
        """Of what no process is named for, such as the driver's own."""
        self.peak = 0

    def after(self, used_bytes: int | None, own: list[Grant], strangers: Mapping[int, int] | None, now: float) -> int:
        """The peak after one more look, which counts only if all that is ours was known."""
        if used_bytes is None or any(grant.measured_bytes is None for grant in own):
            return self.peak
        foreign = foreign_peak(0, used_bytes, own)
        self.peak = self._all.after(foreign, now)
        if strangers is None:
            self._of, self._rest = {}, _RecentPeak()
            return self.peak
        if self._of.keys() <= strangers.keys():
            self._rest.after(max(0, foreign - sum(strangers.values())), now)
        # else the memory of one that has just ended may be used still, and is nobody's
        self._of = {pid: self._of.get(pid, _RecentPeak()) for pid in strangers}
        named = sum(self._of[pid].after(bytes, now) for pid, bytes in strangers.items())
        self.peak = max(foreign, min(self.peak, named + self._rest.peak))
        return self.peak


class _RecentPeak:
    """The largest figure of the last ten minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        """Each one lower and newer than the one before: the first is the peak."""

    def after(self, bytes: int, now: float) -> int:
        """The peak after one more figure."""
        while self._seen and self._seen[-1][1] <= bytes:
            self._seen.pop()
        self._seen.append((now, bytes))
        while self._seen[0][0] < now - FOREIGN_S:
            self._seen.popleft()
        return self.peak

    @property
    def peak(self) -> int:
        return self._seen[0][1] if self._seen else 0


def devices(seen: SeenGpus, box: BoxMemory) -> list[GpuDevice]:
    """The GPUs that have a UUID; a MIG device is one, and the GPU it is a part of is none.

    A GPU without memory of its own has the box's: the driver tells none of it, or more than is there.

    >>> from hive.host.nvml import GpuState
    >>> box = BoxMemory(total_bytes=100, available_bytes=70)
    >>> gb10 = GpuState(0, "NVIDIA GB10", "GPU-1"), GpuState(1, "NVIDIA GB10", "GPU-2", 120, 10, 110)
    >>> [(gpu.total_bytes, gpu.used_bytes) for gpu in devices(SeenGpus(gb10), box)]
    [(100, 30), (100, 30)]
    >>> [gpu.used_bytes for gpu in devices(SeenGpus((GpuState(0, "NVIDIA H200", "GPU-3", 120, 10, 110),)), box)]
    [10]
    """
    found = []
    for gpu in seen.gpus:
        if gpu.instances:
            parts = (part for part in gpu.instances if part.uuid)
            found += [GpuDevice(one.uuid, one.name, one.total_bytes, one.used_bytes, one.processes) for one in parts]
            continue
        if not gpu.uuid:
            continue
        total, used = gpu.total_bytes, gpu.used_bytes
        is_unified = UNIFIED.search(gpu.name) is not None or (total is None and not gpu.fault)
        if is_unified and box.total_bytes is not None:
            free = [bytes for bytes in (gpu.free_bytes, box.available_bytes) if bytes is not None]
            total = box.total_bytes if total is None else min(total, box.total_bytes)
            used = max(0, total - min(free)) if free else None
        found.append(GpuDevice(gpu.uuid, gpu.name, total, used, gpu.processes, gpu.busy_percent))
    return found


def bytes_of(pids: Iterable[int], told: tuple[ProcessOnGpu, ...] | None) -> int | None:
    """Bytes of these processes on a GPU; None where one's are not told, or none of them is named there.

    >>> told = (ProcessOnGpu(1, 10), ProcessOnGpu(2, 20), ProcessOnGpu(3, None))
    >>> bytes_of([1, 2, 9], told), bytes_of([1, 3], told), bytes_of([9], told), bytes_of([1], None)
    (30, None, None, None)
    """
    if told is None or len(told) >= PROCESSES_MAX:
        return None
    wanted = set(pids)
    own = [process.used_bytes for process in told if process.pid in wanted]
    known = [bytes for bytes in own if bytes is not None]
    return sum(known) if own and len(known) == len(own) else None


def told_in(account: str, process: SlotProcess, gpus: list[str]) -> int | None:
    """Bytes in one GPU of a server that tells how much it has on GPUs, and not on which: shared out as its memory was
    granted to it, else all on the first of them. None where nothing was granted there, or nothing is told yet.

    >>> from hive.link.slots import SlotGrant
    >>> grant = SlotGrant(accounts={"g": 20, "h": 10})
    >>> told = SlotProcess(id="m", run="1", state=ProcessState.SERVING, grant=grant, bytes=5, gpu_bytes=90)
    >>> [told_in(account, told, ["g", "h"]) for account in ("g", "h", "i")]
    [60, 30, None]
    """
    if process.gpu_bytes is None or process.bytes is None or account not in gpus:
        return None
    if process.grant is None:
        return process.gpu_bytes if account == gpus[0] else None
    granted = sum(process.grant.accounts[gpu] for gpu in gpus)
    return process.gpu_bytes * process.grant.accounts[account] // max(1, granted)


def less_inner(
    by_slot: Mapping[str, Mapping[str, int | None]], models: Iterable[str]
) -> dict[str, dict[str, int | None]]:
    """The memory of the service that holds these models of Ollama, which have their own part of it in the books: what
    is left is what its processes take besides. Nothing where there is no such service.

    >>> less_inner({"backend:ollama": {"g": 100, "cpu": None}, "a": {"g": 60}, "b": {"g": 30}}, ["a", "b"])
    {'backend:ollama': {'g': 10, 'cpu': None}}
    """
    outer, models = by_slot.get(OLLAMA_SERVICE), list(models)
    if outer is None:
        return {}
    inner = {account: sum(by_slot[id].get(account) or 0 for id in models) for account in outer}
    return {
        OLLAMA_SERVICE: {
            account: None if bytes is None else max(0, bytes - inner[account]) for account, bytes in outer.items()
        }
    }


def in_first_pid_namespace() -> bool:
    """Whether the pids of this process are those that NVIDIA's driver tells."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _named(gpus: str) -> set[str]:
    return {word.strip() for word in gpus.split(",")}
