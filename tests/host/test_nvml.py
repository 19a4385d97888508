"""GPUs through NVIDIA's library: the real wrapper over a library in memory, and the real one where a driver is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.host.gpu_memory import NO_ANSWER, NO_DRIVER, GpuMemoryReader
from hive.host.nvml import PROCESSES_MAX, GpuState, Nvml, ProcessOnGpu, SeenGpus
from tests.fakes import fake_nvml
from tests.fakes.fake_nvml import GIB, NOT_AVAILABLE, Gpu, Library, in_place_of, with_mig


def look(*gpus: Gpu, version: int = 3) -> tuple[GpuState, ...]:
    with in_place_of(Library(*gpus, version=version)) as api:
        found = Nvml(lambda: api).look()
    assert found.why_not == ""
    return found.gpus


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """/proc/driver/nvidia of a host with one GPU."""
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    return tmp_path


# --- what there is -----------------------------------------------------------------------------------------------


def test_a_driver_without_gpus_has_none_and_nobody_can_say_that_memory_is_free() -> None:
    assert look() == ()
    assert SeenGpus().is_free() is None


def test_each_gpu_tells_its_memory_how_busy_it_is_and_who_holds_what() -> None:
    used = Gpu(used=99 * GIB, busy=87, processes=[(41, 90 * GIB), (42, NOT_AVAILABLE)])
    first, second, *others = look(used, *(Gpu() for _ in range(7)))
    assert (first.number, first.name, first.fault) == (0, "NVIDIA H200", "")
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (140 * GIB, 99 * GIB, 41 * GIB)
    assert (first.busy_percent, first.instances) == (87, ())
    assert first.processes == (ProcessOnGpu(41, 90 * GIB), ProcessOnGpu(42, None))
    assert (second.number, second.processes, len(others)) == (1, (), 6)


def test_a_driver_that_is_older_than_the_wrapper_is_asked_as_it_knows_it() -> None:
    (found,) = look(Gpu(processes=[(41, 5)]), version=2)
    assert (found.processes, found.fault) == ((ProcessOnGpu(41, 5),), "")


def test_more_processes_than_anybody_reads_are_not_told() -> None:
    (found,) = look(Gpu(processes=[(pid, 1) for pid in range(1, 2 * PROCESSES_MAX)]))
    assert found.processes is not None
    assert len(found.processes) == PROCESSES_MAX


# --- MIG ---------------------------------------------------------------------------------------------------------


def parts() -> dict[str, Gpu]:
    small = Gpu(name=b"NVIDIA H200 MIG 1g.18gb", total=16 * GIB, used=GIB)
    large = Gpu(name=b"NVIDIA H200 MIG 3g.71gb", total=70 * GIB, used=60 * GIB, processes=[(41, 59 * GIB)])
    return {"_0": small, "_4": large}


def test_the_parts_of_a_gpu_with_mig_are_found_where_their_numbers_have_gaps() -> None:
    (found,) = look(with_mig(privileged=True, **parts()))
    assert [(part.number, part.name) for part in found.instances] == [
        (0, "NVIDIA H200 MIG 1g.18gb"),
        (4, "NVIDIA H200 MIG 3g.71gb"),
    ]
    assert found.instances[1].processes == found.processes == (ProcessOnGpu(41, 59 * GIB),)
    assert (found.total_bytes, found.busy_percent, found.fault) == (140 * GIB, None, "")


def test_who_may_not_see_a_whole_gpu_sees_the_sum_of_its_parts_and_why() -> None:
    (found,) = look(with_mig(privileged=False, **parts()))
    assert (found.total_bytes, found.used_bytes, found.free_bytes) == (86 * GIB, 61 * GIB, 25 * GIB)
    assert found.processes == (ProcessOnGpu(41, 59 * GIB),)
    assert found.fault == "Insufficient Permissions"


def test_mig_without_parts_that_may_not_be_seen_is_unknown() -> None:
    (found,) = look(with_mig(privileged=False))
    assert (found.total_bytes, found.processes, found.instances) == (None, None, ())


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_unknown_and_the_others_are_not() -> None:
    lost, well = look(Gpu(is_lost=True), Gpu(used=GIB))
    assert lost == GpuState(0, fault="GPU is lost")
    assert (well.number, well.used_bytes, well.fault) == (1, GIB, "")
    assert SeenGpus((lost, well)).is_free() is None


@pytest.mark.parametrize(
    ("verb", "unknown"),
    [
        ("GetMemoryInfo", "used_bytes"),
        ("GetUtilizationRates", "busy_percent"),
        ("GetComputeRunningProcesses", "processes"),
    ],
)
@pytest.mark.parametrize("code", [fake_nvml.NOT_SUPPORTED, fake_nvml.NO_PERMISSION, fake_nvml.LOST, 999, 12345])
def test_what_the_driver_refuses_is_unknown_and_only_that(verb: str, unknown: str, code: int) -> None:
    (found,) = look(Gpu(used=GIB, busy=5, refuses={verb: code}))
    told = {name: getattr(found, name) for name in ("used_bytes", "busy_percent", "processes")}
    assert [name for name, value in told.items() if value is None] == [unknown]
    assert bool(found.fault) is (code != fake_nvml.NOT_SUPPORTED)


def test_a_name_that_is_no_text_is_left_out() -> None:
    (found,) = look(Gpu(name=b"\xff\xfe", used=GIB))
    assert (found.name, found.used_bytes) == ("", GIB)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Library(fails_init=9), "Driver Not Loaded"),
        (Library(fails_init=18), "RM has detected an NVML/RM version mismatch."),
        (object(), "Function Not Found"),
    ],
)
def test_a_library_that_does_not_begin_says_why(library: object, said: str) -> None:
    with in_place_of(library) as api:
        assert Nvml(lambda: api).look() == SeenGpus(why_not=said)


def test_a_wrapper_that_is_not_installed_is_no_error() -> None:
    def load() -> object:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert Nvml(load).look().why_not == "No module named 'pynvml'"


def test_after_the_driver_was_exchanged_a_new_session_is_begun() -> None:
    library = Library(Gpu())
    with in_place_of(library) as api:
        nvml = Nvml(lambda: api)
        assert len(nvml.look().gpus) == 1
        library.fails_init = 18
        assert nvml.look().why_not.startswith("RM has detected")
        assert library.sessions == 0
        library.fails_init = 0
        assert len(nvml.look().gpus) == 1
        assert library.sessions == 1


# --- in a thread -------------------------------------------------------------------------------------------------


async def test_without_a_driver_nothing_is_asked(tmp_path: Path) -> None:
    def never() -> SeenGpus:
        raise AssertionError("it was asked")

    gpus = GpuMemoryReader(tmp_path / "nvidia", look=never)
    assert (gpus.has_gpu, await gpus.is_free(), (await gpus.seen()).why_not) == (False, None, NO_DRIVER)


def test_without_a_driver_the_wrapper_is_not_imported(tmp_path: Path) -> None:
    """Importing it takes 60 ms and 4 MB."""
    program = (
        "import asyncio, pathlib, sys\n"
        "from hive.host.gpu_memory import GpuMemoryReader\n"
        f"print(asyncio.run(GpuMemoryReader(pathlib.Path({str(tmp_path)!r})).seen()).why_not)\n"
        "print('pynvml' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [NO_DRIVER, "False"]


async def test_memory_is_free_when_the_last_process_has_gone_and_not_before(proc: Path) -> None:
    gpu = Gpu(used=GIB, processes=[(41, GIB)])
    with in_place_of(Library(gpu)) as api:
        gpus = GpuMemoryReader(proc, look=Nvml(lambda: api).look, answer_s=60)
        assert (gpus.has_gpu, await gpus.is_free()) == (True, False)
        gpu.processes = []
        assert await gpus.is_free() is True


async def test_those_who_ask_at_once_share_one_look_and_its_answer_stays_fresh(proc: Path) -> None:
    looks: list[int] = []
    go = threading.Event()

    def slow() -> SeenGpus:
        looks.append(1)
        go.wait()
        return SeenGpus((GpuState(0, processes=()),))

    gpus = GpuMemoryReader(proc, look=slow, answer_s=60, fresh_s=3600)
    asked = [asyncio.ensure_future(gpus.seen()) for _ in range(5)]
    await asyncio.sleep(0)
    go.set()
    assert {len((await one).gpus) for one in asked} == {1}
    assert len((await gpus.seen()).gpus) == 1
    assert len(looks) == 1
    assert await gpus.is_free() is True
    assert len(looks) == 2


async def test_a_driver_that_hangs_keeps_nobody_waiting_and_one_thread(proc: Path) -> None:
    looks: list[int] = []
    go = threading.Event()

    def hangs() -> SeenGpus:
        looks.append(1)
        go.wait()
        return SeenGpus((GpuState(0, processes=()),))

    gpus = GpuMemoryReader(proc, look=hangs, answer_s=0.01)
    assert [(await gpus.seen()).why_not for _ in range(3)] == [NO_ANSWER] * 3
    assert (len(looks), await gpus.is_free()) == (1, None)
    go.set()
    while not (await gpus.seen()).gpus:  # noqa: ASYNC110 - its own thread tells it
        await asyncio.sleep(0.01)


async def test_a_look_that_fails_is_told_and_not_raised(proc: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> SeenGpus:
        raise ZeroDivisionError("no such thing")

    assert (await GpuMemoryReader(proc, look=fails, answer_s=60).seen()).why_not == "no such thing"
    assert "gpu_look_failed" in caplog.text


def test_a_loop_that_ended_meanwhile_is_not_told(proc: Path) -> None:
    go = threading.Event()
    raised: list[object] = []

    def hangs() -> SeenGpus:
        go.wait()
        return SeenGpus()

    before: Callable[..., object] = threading.excepthook
    threading.excepthook = raised.append
    try:
        asyncio.run(GpuMemoryReader(proc, look=hangs, answer_s=0.01).seen())
        go.set()
        for thread in threading.enumerate():
            if thread.name == "hive-nvml":
                thread.join()
    finally:
        threading.excepthook = before
    assert raised == []


async def test_the_real_driver_tells_what_its_gpus_have() -> None:
    gpus = GpuMemoryReader()
    if not gpus.has_gpu:
        pytest.skip("no NVIDIA driver is loaded")
    seen = await gpus.seen()
    assert seen.gpus
    for gpu in seen.gpus:
        assert gpu.name
        assert gpu.total_bytes is not None
        assert gpu.used_bytes is not None
        assert gpu.total_bytes >= gpu.used_bytes > 0
