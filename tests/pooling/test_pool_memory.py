"""The accounts of the pool's memory, over the real wrapper of NVIDIA's library and a library that stands in for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.host.gpu_memory import NO_ANSWER, GpuMemoryReader
from hive.host.memory_box import BoxMemory, group_limit, read_box
from hive.host.nvml import PROCESSES_MAX, Nvml, SeenGpus
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.state import CPU, MIB, MemoryAccount
from hive.pooling.pool_memory import FOREIGN_S, GONE_S, HOST_MEMORY, LINGER_S, MemoryReading, PoolMemory
from hive.settings.pool import ModelRow, PoolSection
from hive.settings.table import Settings
from tests.fakes.fake_nvml import GIB, LOST, NOT_AVAILABLE, NOT_SUPPORTED, Gpu, Library, in_place_of, with_mig

BOX = BoxMemory(total_bytes=64 * GIB, available_bytes=60 * GIB)
RESERVE = 512 * MIB


class MeasuredBox:
    """A host with these GPUs, a clock that stands, and a look that sees all anew."""

    def __init__(self, proc: Path, *gpus: Gpu, shares_pids: bool = True, memory: BoxMemory = BOX) -> None:
        self.library = Library(*gpus)
        self.now = 1000.0
        self.settings = Settings()
        self.memory = memory
        (proc / "gpus").mkdir(parents=True)
        for number in range(len(gpus)):
            (proc / "gpus" / str(number)).mkdir()
        self.hang: threading.Event | None = None
        self._nvml = Nvml()
        self.reader = GpuMemoryReader(proc, look=self._look, fresh_s=0, answer_s=60)
        self.pool = PoolMemory(
            self.reader, lambda: self.settings, box=lambda: self.memory, clock=lambda: self.now, shares_pids=shares_pids
        )

    def _look(self) -> SeenGpus:
        if self.hang is not None:
            self.hang.wait(60)
        return self._nvml.look()

    def set_pool(self, **keys: Any) -> None:
        self.settings = msgspec.structs.replace(self.settings, pool=PoolSection(**keys))

    async def look(self, *processes: SlotProcess) -> MemoryReading:
        return await self.pool.look({process.id: process for process in processes})


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path / "nvidia"


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """The wrapper's library is set by `here`; what was there before is put back."""
    with in_place_of(None):
        yield


def here(box: MeasuredBox) -> MeasuredBox:
    import pynvml

    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = box.library
    return box


def server(
    id: str, *pids: int, on: str = "GPU-0", state: ProcessState = ProcessState.SERVING, bytes: int | None = None
) -> SlotProcess:
    grant = SlotGrant(accounts={on: 1000})
    return SlotProcess(
        id=id, run=f"{id}-1", state=state, pid=next(iter(pids), 0), pids=list(pids), grant=grant, bytes=bytes
    )


async def test_each_gpu_is_an_account_by_its_uuid_and_a_slot_has_what_its_processes_have(proc: Path) -> None:
    first = Gpu(used=30 * GIB, processes=[(11, 10 * GIB), (12, 5 * GIB), (99, 3 * GIB)])
    box = here(MeasuredBox(proc, first, Gpu(b"NVIDIA L4", total=24 * GIB)))
    reading = await box.look(server("a", 11, 12), server("b", 77, on="GPU-1"))
    assert reading.accounts == (
        MemoryAccount("GPU-0", 140 * GIB, RESERVE, 30 * GIB, foreign_bytes=15 * GIB, strangers_bytes=3 * GIB),
        MemoryAccount("GPU-1", 24 * GIB, RESERVE, 0, foreign_bytes=0),
    )
    assert reading.names == {"GPU-0": "NVIDIA H200", "GPU-1": "NVIDIA L4"}
    assert reading.by_slot == {"a": {"GPU-0": 15 * GIB}, "b": {"GPU-1": None}}, "not named there: not known, never 0"
    assert reading.why_not == ""


def ollamas(id: str, *, vram: int, host: int = 0, run: str = "1") -> SlotProcess:
    """A model as its Ollama tells of it: it has no process that the driver could name."""
    grant = SlotGrant(accounts={"GPU-0": 1000})
    return SlotProcess(id=id, run=run, state=ProcessState.SERVING, grant=grant, bytes=host, gpu_bytes=vram)


async def test_what_an_ollama_says_of_its_models_is_ours_and_what_the_driver_takes_besides_is_foreign(
    proc: Path,
) -> None:
    box = here(MeasuredBox(proc, Gpu(used=23 * GIB, processes=[(7, 11 * GIB), (8, 12 * GIB)])))
    reading = await box.look(ollamas("a", vram=10 * GIB), ollamas("b", vram=11 * GIB, host=GIB))
    assert reading.by_slot == {"a": {"GPU-0": 10 * GIB}, "b": {"GPU-0": 11 * GIB}}
    assert reading.accounts[0].foreign_bytes == 2 * GIB


async def test_hives_own_ollama_is_booked_for_what_its_processes_take_beside_its_models(proc: Path) -> None:
    box = here(MeasuredBox(proc, Gpu(used=23 * GIB, processes=[(7, 11 * GIB), (8, 12 * GIB)])))
    service = server("backend:ollama", 7, 8)
    reading = await box.look(service, ollamas("a", vram=10 * GIB), ollamas("b", vram=11 * GIB))
    assert reading.by_slot["backend:ollama"] == {"GPU-0": 2 * GIB}
    assert reading.accounts[0].foreign_bytes == 0


async def test_on_a_host_without_a_gpu_a_model_of_ollama_is_charged_all_of_it_there(proc: Path) -> None:
    box = here(MeasuredBox(proc))
    model = SlotProcess(
        id="a", run="1", state=ProcessState.SERVING, grant=SlotGrant(accounts={CPU: 9}), bytes=3 * GIB, gpu_bytes=0
    )
    reading = await box.look(model)
    assert reading.by_slot == {"a": {CPU: 3 * GIB}}


async def test_pids_of_another_namespace_and_bytes_that_are_not_told_are_unknown(proc: Path) -> None:
    gpu = Gpu(used=30 * GIB, processes=[(11, 10 * GIB), (12, NOT_AVAILABLE)])
    box = here(MeasuredBox(proc, gpu, shares_pids=False))
    reading = await box.look(server("a", 11))
    assert (reading.by_slot, reading.accounts[0].foreign_bytes) == ({"a": {"GPU-0": None}}, 0)
    box.pool._shares_pids = True
    reading = await box.look(server("a", 11, 12))
    assert reading.by_slot == {"a": {"GPU-0": None}}


async def test_a_list_of_processes_that_may_be_cut_tells_nothing(proc: Path) -> None:
    gpu = Gpu(used=30 * GIB, processes=[(pid, MIB) for pid in range(1, PROCESSES_MAX + 1)])
    box = here(MeasuredBox(proc, gpu))
    assert (await box.look(server("a", 1, 2, 3))).by_slot == {"a": {"GPU-0": None}}
    gpu.processes.pop()
    assert (await box.look(server("a", 1, 2, 3))).by_slot == {"a": {"GPU-0": 3 * MIB}}


async def test_a_driver_that_hangs_takes_no_account_and_what_is_used_is_unknown_then(proc: Path) -> None:
    box = here(MeasuredBox(proc, Gpu(used=30 * GIB, processes=[(11, 10 * GIB)])))
    before = await box.look(server("a", 11))
    box.hang, box.reader._answer_s = threading.Event(), 0.2
    try:
        box.now += 10 * GONE_S
        reading = await asyncio.wait_for(box.look(server("a", 11)), 30)
        assert reading.why_not == NO_ANSWER
        assert reading.accounts == (msgspec.structs.replace(before.accounts[0], used_bytes=None),)
        assert reading.by_slot == {"a": {"GPU-0": None}}
    finally:
        box.hang.set()
        box.reader._answer_s = 60
        # The thread that hung ends here: it would shut the library of the next test.
        again = await box.look(server("a", 11))
    assert again == before


async def test_a_gpu_that_refuses_stays_and_one_that_is_gone_for_a_minute_goes(proc: Path) -> None:
    lost, other = Gpu(used=1 * GIB), Gpu(used=2 * GIB)
    box = here(MeasuredBox(proc, other, lost))
    assert len((await box.look()).accounts) == 2
    lost.is_lost = True
    box.now += 10 * GONE_S
    accounts = (await box.look()).accounts
    assert [(one.id, one.total_bytes, one.used_bytes) for one in accounts] == [
        ("GPU-0", 140 * GIB, 2 * GIB),
        ("GPU-1", 140 * GIB, None),
    ]
    lost.is_lost = False
    lost.refuses = {"GetMemoryInfo": LOST}
    accounts = (await box.look()).accounts
    assert [(one.total_bytes, one.used_bytes) for one in accounts] == [(140 * GIB, 2 * GIB), (140 * GIB, None)]
    lost.refuses = {}
    box.library.gpus.remove(lost)
    box.now += GONE_S / 2
    assert len((await box.look()).accounts) == 1, "a whole answer without it, long after it was seen"
    lost.refuses = {"GetMemoryInfo": LOST}
    box.library.gpus.append(lost)
    assert len((await box.look()).accounts) == 1, "nobody knows how much it has"


async def test_without_any_answer_yet_there_is_no_account_and_the_host_is_none_in_its_place(proc: Path) -> None:
    box = here(MeasuredBox(proc, Gpu()))
    box.library.fails_init = LOST
    reading = await box.look()
    assert reading.accounts == ()
    assert reading.why_not


async def test_a_mig_device_is_a_gpu_and_the_gpu_it_is_of_is_none(proc: Path) -> None:
    part = Gpu(b"NVIDIA H200 MIG 1g.18gb", total=16 * GIB, used=3 * GIB, processes=[(11, 2 * GIB)], uuid=b"MIG-1")
    box = here(MeasuredBox(proc, with_mig(privileged=False, _2=part)))
    reading = await box.look(server("a", 11, on="MIG-1"))
    assert reading.accounts == (MemoryAccount("MIG-1", 16 * GIB, RESERVE, 3 * GIB, foreign_bytes=1 * GIB),)
    assert reading.names == {"MIG-1": "NVIDIA H200 MIG 1g.18gb"}
    assert reading.by_slot == {"a": {"MIG-1": 2 * GIB}}


async def test_a_gpu_without_memory_of_its_own_has_the_box_s(proc: Path) -> None:
    gb10 = Gpu(b"NVIDIA GB10", refuses={"GetMemoryInfo": NOT_SUPPORTED})
    box = here(MeasuredBox(proc, gb10))
    assert (await box.look()).accounts == (MemoryAccount("GPU-0", 64 * GIB, RESERVE, 4 * GIB, foreign_bytes=4 * GIB),)
    gb10.refuses, gb10.total, gb10.used = {}, 120 * GIB, 70 * GIB
    reading = await box.look()
    assert (reading.accounts[0].total_bytes, reading.accounts[0].used_bytes) == (64 * GIB, 14 * GIB), "50 GiB are free"


# --- the host ----------------------------------------------------------------------------------------------------


async def test_without_a_gpu_the_host_is_the_account(tmp_path: Path) -> None:
    box = MeasuredBox(tmp_path)
    reading = await box.look(server("a", 11, on=CPU, bytes=3 * GIB), server("b", 12, on=CPU))
    assert reading.accounts == (MemoryAccount(CPU, 64 * GIB, RESERVE, 4 * GIB, foreign_bytes=0),)
    assert reading.names == {CPU: HOST_MEMORY}
    assert reading.by_slot == {"a": {CPU: 3 * GIB}, "b": {CPU: None}}
    reading = await box.look(server("a", 11, on=CPU, bytes=3 * GIB), server("b", 12, on=CPU, bytes=0))
    assert reading.accounts[0].foreign_bytes == 1 * GIB


async def test_with_cpu_mb_the_books_alone_decide(tmp_path: Path) -> None:
    box = MeasuredBox(tmp_path)
    box.set_pool(cpu_mb=2048)
    reading = await box.look(server("a", 11, on=CPU, bytes=3 * GIB))
    assert reading.accounts == (MemoryAccount(CPU, 2 * GIB, reserve_bytes=0, used_bytes=None, foreign_bytes=0),)
    assert reading.by_slot == {"a": {CPU: 3 * GIB}}


async def test_beside_a_gpu_the_host_is_an_account_only_where_an_entry_names_it(proc: Path) -> None:
    box = here(MeasuredBox(proc, Gpu()))
    assert [one.id for one in (await box.look()).accounts] == ["GPU-0"]
    rows = {"m": ModelRow(gpus="GPU-1, cpu")}
    box.settings = msgspec.structs.replace(box.settings, models=rows)
    reading = await box.look()
    assert [one.id for one in reading.accounts] == ["GPU-0", CPU]
    assert reading.names[CPU] == HOST_MEMORY


async def test_a_host_that_does_not_tell_for_once_keeps_its_account(tmp_path: Path) -> None:
    box = MeasuredBox(tmp_path)
    await box.look()
    box.memory = BoxMemory(None, None)
    account = (await box.look()).accounts[0]
    assert (account.total_bytes, account.used_bytes, account.foreign_bytes) == (64 * GIB, None, 4 * GIB)


# --- what is foreign ---------------------------------------------------------------------------------------------


async def test_foreign_memory_is_the_peak_of_ten_minutes(proc: Path) -> None:
    gpu = Gpu(used=5 * GIB)
    box = here(MeasuredBox(proc, gpu))
    peaks = []
    for used in (5, 3, 4, 1):
        gpu.used = used * GIB
        peaks.append((await box.look()).accounts[0].foreign_bytes // GIB)
        box.now += FOREIGN_S / 2
    assert peaks == [5, 5, 5, 4]


async def test_the_part_of_a_stranger_in_the_peak_ends_with_it(proc: Path) -> None:
    gpu = Gpu(used=9 * GIB, processes=[(98, 6 * GIB), (99, 2 * GIB)])
    box = here(MeasuredBox(proc, gpu))
    peaks = [(await box.look()).accounts[0].foreign_bytes // GIB]
    for used, processes in (
        (4, [(98, GIB), (99, 2 * GIB)]),  # it may take as much again
        (9, [(99, 2 * GIB)]),  # it has ended, and its memory is not back yet
        (3, [(99, 2 * GIB)]),
        (9, [(99, 2 * GIB), (97, 6 * GIB)]),
    ):
        box.now += 1
        gpu.used, gpu.processes = used * GIB, processes
        peaks.append((await box.look()).accounts[0].foreign_bytes // GIB)
    assert peaks == [9, 9, 9, 3, 9]


async def test_a_fresh_look_sees_what_happened_before_it(proc: Path) -> None:
    gpu = Gpu(used=5 * GIB)
    box = here(MeasuredBox(proc, gpu))
    reader = GpuMemoryReader(proc, look=box._look, fresh_s=60)
    first = (await reader.seen()).gpus[0].used_bytes
    gpu.used = 3 * GIB
    assert [first, (await reader.seen()).gpus[0].used_bytes] == [5 * GIB, 5 * GIB]
    box.hang = threading.Event()
    under_way = asyncio.create_task(reader.seen_now())
    await asyncio.sleep(0.05)
    box.hang.set()
    gpu.used = 2 * GIB
    assert (await reader.seen_now()).gpus[0].used_bytes == 2 * GIB, "not by the look that had begun before"
    await under_way
    assert (await reader.seen()).gpus[0].used_bytes == 2 * GIB


async def test_memory_of_a_server_that_begins_or_has_just_ended_is_not_foreign(proc: Path) -> None:
    gpu = Gpu(used=1 * GIB)
    box = here(MeasuredBox(proc, gpu))

    async def foreign(*processes: SlotProcess) -> int:
        return (await box.look(*processes)).accounts[0].foreign_bytes // GIB

    assert await foreign() == 1
    gpu.used, gpu.processes = 21 * GIB, [(11, 12 * GIB)]  # it allocates between the two answers
    assert await foreign(server("a", 11, state=ProcessState.STARTING)) == 1
    gpu.processes = [(11, 20 * GIB)]
    assert await foreign(server("a", 11)) == 1
    gpu.processes = []  # its process is gone, its memory not yet
    assert await foreign(server("a", 11, state=ProcessState.STOPPING)) == 1
    assert await foreign(server("a", state=ProcessState.ENDED)) == 1
    assert (await box.look(server("a", state=ProcessState.ENDED))).by_slot == {}
    box.now += PoolSection().free_s
    assert await foreign() == 1
    box.now += LINGER_S + 0.1
    assert await foreign() == 21, "after free_s it is what a server left behind"


# --- the box -----------------------------------------------------------------------------------------------------


def test_a_limit_above_makes_the_box_smaller(tmp_path: Path) -> None:
    group = tmp_path / "cg" / "x.slice"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "self/mounts").write_text(f"cgroup2 {tmp_path}/cg cgroup2 rw 0 0\n")
    (tmp_path / "self/cgroup").write_text("0::/x.slice/hive-daemon.service\n")
    assert read_box(tmp_path) == BoxMemory(1000 << 10, 900 << 10)
    (group / "memory.max").write_text(f"{400 << 10}\n")
    (group / "memory.current").write_text(f"{300 << 10}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {50 << 10}\nactive_file {10 << 10}\n")
    assert read_box(tmp_path) == BoxMemory(400 << 10, 160 << 10)
    own = group / "hive-daemon.service"
    own.mkdir()
    (own / "memory.max").write_text("1\n")
    assert read_box(tmp_path).total_bytes == 400 << 10, "a limit of the daemon's unit is not one of the servers"


def test_the_box_this_runs_in_has_memory() -> None:
    box = read_box()
    assert box.total_bytes is not None
    assert box.available_bytes is not None
    assert 0 < box.available_bytes <= box.total_bytes


@pytest.mark.parametrize("limit", ["x", "-1", "max"])
def test_a_limit_that_is_no_number_is_none(limit: str) -> None:
    assert group_limit(limit) is None
