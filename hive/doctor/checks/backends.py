"""The inference server: the GPU under it, whether it answers, and whether agents could get at it without Hive."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hive.backends.ask import parse_address
from hive.backends.kinds import spec_of
from hive.backends.recognise import CANDIDATES, find, recognise
from hive.doctor.checks.check import STOPPED, Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject, TargetKind
from hive.domain import BackendInfo, origin_of
from hive.errors import HiveError
from hive.files.layout import RUNTIMES
from hive.host import gpu_memory
from hive.host.access import NO_ACCESS, access_of
from hive.host.gpu import GpuHardware, read_gpus
from hive.host.nvml import SeenGpus
from hive.host.process import ProcessTable, words_of

_, INFERENCE, MODELS, _ = RUNTIMES
CONNECT_S = 0.3
GPU_S = 1.0
GIB = 1024**3


# --- the GPU -----------------------------------------------------------------------------------------------------


async def look_at_gpu(subject: Subject) -> CheckVerdict:  # noqa: ARG001 - the same for all
    return judge_gpu(read_gpus(), await gpu_memory.GpuMemoryReader(answer_s=GPU_S).seen())


def judge_gpu(gpus: GpuHardware, seen: SeenGpus) -> CheckVerdict:
    """By the kernel's files, and by what NVIDIA's library says where they are well.

    >>> judge_gpu(GpuHardware(0, "", (), (), (), False), SeenGpus()).reason
    'no NVIDIA driver, and no NVIDIA GPU on the bus'
    """
    if not gpus.driver:
        if gpus.on_bus:
            return wrong("gpu_without_driver", count=gpus.on_bus)
        return skipped("no NVIDIA driver, and no NVIDIA GPU on the bus")
    cards = [name for name in gpus.nodes if name.removeprefix("nvidia").isdigit()]
    if "nvidiactl" not in gpus.nodes or not cards:
        return wrong("gpu_without_files", driver=gpus.driver)
    if gpus.refused:
        return wrong("gpu_closed", driver=gpus.driver, file=gpus.refused[0])
    if "nvidia-uvm" not in gpus.nodes:
        return wrong("gpu_without_uvm", driver=gpus.driver)
    if not gpus.has_nvml:
        return wrong("gpu_without_nvml", driver=gpus.driver)
    if seen.why_not:
        return wrong("gpu_silent", driver=gpus.driver, why=seen.why_not)
    if faults := [f"GPU {gpu.number} does not tell all: {gpu.fault}" for gpu in seen.gpus if gpu.fault]:
        return wrong("gpu_fault", driver=gpus.driver, faults=faults)
    total, used = (sum(getattr(gpu, of) or 0 for gpu in seen.gpus) / GIB for of in ("total_bytes", "used_bytes"))
    return passed(f"driver {gpus.driver}: {', '.join(gpus.models)}; {used:.0f} of {total:.0f} GiB in use")


# --- does it answer ----------------------------------------------------------------------------------------------


async def look_at_backend(subject: Subject) -> CheckVerdict:
    if subject.settings.inference.enabled == "false":
        return skipped("[inference] enabled = false: this Hive has none")
    addresses = await asyncio.to_thread(addresses_of, subject)
    listening = await asyncio.gather(*(_accepts(address) for address in addresses))
    # Asking what a server is takes five HTTP clients: 10 ms of CPU each, for nothing where nobody listens.
    found = await _found([address for address, does in zip(addresses, listening, strict=True) if does], subject)
    if found is None and subject.kind is TargetKind.NONE:
        return skipped("none answers, and no Hive asks for one; `hive up` brings a demo")
    if found is None and subject.is_stopped and not subject.settings.inference.backend_url:
        return skipped(STOPPED)  # its own server runs with it
    is_needed = subject.settings.inference.enabled == "true"
    return judge_backend(found, addresses, is_needed=is_needed)


async def _found(addresses: Sequence[str], subject: Subject) -> BackendInfo | None:
    """The first that is a backend; any server of OpenAI's dialect where the daemon or hive.conf names a URL."""
    named = [address for address in addresses if "://" in address]
    try:
        access = access_of(subject.settings.inference, os.environ)
    except HiveError:
        access = NO_ACCESS  # the doctor may not read the daemon's secrets; then the server says that it asks for a key
    for address in named:
        if (info := await recognise(address, access)) is not None:
            return info
    return await find([address for address in addresses if address not in named])


async def _accepts(address: str) -> bool:
    """Whether somebody takes connections there."""
    address = origin_of(address).dialled
    try:
        async with asyncio.timeout(CONNECT_S):
            if address.startswith("/"):
                _, writer = await asyncio.open_unix_connection(address)
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError):
        return False
    writer.transport.abort()
    return True


def addresses_of(subject: Subject) -> tuple[str, ...]:
    """Addresses to ask: the daemon's own backend, else the usual ones."""
    if named := ((subject.health or {}).get("backend") or {}).get("address"):
        return (str(named),)
    inference = subject.settings.inference
    url = [parse_address(inference.backend_url)] if inference.backend_url else []
    sockets = _sockets(subject.layout.at(INFERENCE)) if subject.is_appliance else []
    return tuple(dict.fromkeys([*url, *map(str, sockets), f"{inference.host}:{inference.port}", *CANDIDATES]))


def _sockets(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_socket())
    except OSError:
        return []


def _of_models(subject: Subject) -> list[Path]:
    """Sockets of the pool's servers, each in a directory of its own."""
    try:
        return [path for one in sorted(subject.layout.at(MODELS).iterdir()) for path in _sockets(one)]
    except OSError:
        return []


def judge_backend(found: BackendInfo | None, addresses: Sequence[str], *, is_needed: bool) -> CheckVerdict:
    if found is None:
        if len(addresses) == 1:
            return wrong("backend_down", at=addresses[0])
        return wrong("backend_required" if is_needed else "backend_missing", count=len(addresses))
    if spec_of(found.kind).is_canned:
        return wrong("backend_demo_only")
    return passed(f"{found.label}, version {found.version}")


# --- can agents reach it -----------------------------------------------------------------------------------------


class BackendPath(NamedTuple):
    """The way to a backend. `mode`, `parent_mode`: of its socket and of that one's directory, None for TCP."""

    address: str
    mode: int | None = None
    parent_mode: int | None = None


def look_at_ways(subject: Subject) -> CheckVerdict:
    named = ((subject.health or {}).get("backend") or {}).get("address")
    sockets = [*_sockets(subject.layout.at(INFERENCE)), *_of_models(subject)] if subject.is_appliance else []
    ways = [_way(address) for address in dict.fromkeys([*map(str, sockets), *([str(named)] if named else [])])]
    isolation = str((subject.health or {}).get("isolation", ""))
    return judge_ways(ways, isolation=isolation)


def _way(address: str) -> BackendPath:
    if not address.startswith("/"):
        return BackendPath(address)
    path = Path(address)
    try:
        return BackendPath(address, stat.S_IMODE(os.stat(path).st_mode), stat.S_IMODE(os.stat(path.parent).st_mode))
    except OSError:
        return BackendPath(address, 0, 0)  # whoever may not even look at it may not dial it


def judge_ways(ways: Sequence[BackendPath], *, isolation: str) -> CheckVerdict:
    """
    >>> judge_ways([BackendPath("/run/b.sock", 0o660, 0o750)], isolation="full").reason
    '/run/b.sock is closed to agents'
    """
    if not ways:
        return skipped("no backend is known that they could reach")
    for way in ways:
        if way.mode is None:
            return wrong("backend_on_tcp", at=way.address)
        if way.mode & stat.S_IWOTH and (way.parent_mode or 0) & stat.S_IXOTH:
            return wrong("backend_open", path=way.address)
    if isolation == "none":
        return wrong("backend_shared_user")
    return passed(f"{', '.join(way.address for way in ways)} is closed to agents")


# --- who holds its memory ----------------------------------------------------------------------------------------


class RunningProgram(NamedTuple):
    """A running process: whose child it is, the words it was started with, how much memory it holds."""

    pid: int
    parent: int
    words: tuple[str, ...]
    rss_bytes: int = 0


def look_at_runners(subject: Subject) -> CheckVerdict:  # noqa: ARG001 - the same for all
    found = ProcessTable().processes.values()
    return judge_runners(
        [RunningProgram(one.pid, one.parent, words_of(one.pid), one.rss_bytes) for one in found if one.alive]
    )


def judge_runners(programs: Sequence[RunningProgram]) -> CheckVerdict:
    """Ollama starts a process for each model, which outlives an Ollama that is killed and keeps the model in memory.

    >>> serve = RunningProgram(7, 1, ("ollama", "serve"))
    >>> runner = RunningProgram(8, 7, ("ollama", "runner", "--port", "1"), 2 * GIB)
    >>> judge_runners([serve, runner]).reason
    'no Ollama that ended left a runner behind'
    >>> judge_runners([runner])[1:3]
    ('1 runner of an Ollama that ended holds 2.0 GiB: process 8', 'kill 8')
    """
    servers = {one.pid for one in programs if _is_called(one, "ollama") and not _is_runner(one)}
    runners = [one for one in programs if _is_runner(one)]
    if not servers and not runners:
        return skipped("no Ollama runs on this host")
    left = [one for one in runners if one.parent not in servers]
    if not left:
        return passed("no Ollama that ended left a runner behind")
    held_bytes = sum(one.rss_bytes for one in left)
    return wrong("backend_runners_left", count=len(left), held_bytes=held_bytes, pids=[one.pid for one in left])


def _is_runner(program: RunningProgram) -> bool:
    """`ollama runner …` (0.17), or since 0.32 a llama-server with a model of Ollama's store."""
    if _is_called(program, "ollama"):
        return "runner" in program.words[1:]
    return _is_called(program, "llama-server") and any("/blobs/sha256-" in word for word in program.words)


def _is_called(program: RunningProgram, name: str) -> bool:
    return bool(program.words) and program.words[0].rpartition("/")[2] == name


CHECKS = (
    Check("gpu.driver", "NVIDIA's driver, device files and NVML.", look_at_gpu),
    Check("backend.answers", "An inference server answers.", look_at_backend),
    Check("backend.runners", "No process of an Ollama that ended holds memory.", look_at_runners),
    Check("backend.apart", "Agents reach the inference server through Hive only.", look_at_ways),
)
