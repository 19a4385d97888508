"""The figures of each GPU in NVIDIA's library: its memory, its load, and the memory of each process on it.

Every function blocks, and with a GPU that is falling off the bus for long: call them in a thread (host/gpu_memory.py).
A figure the library refuses is None, and `fault` says why; an answer is never an exception. Which call refuses
what is from nvml.h of driver 570 and the wrapper nvidia-ml-py 13.615.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

MIB = 1024 * 1024
PROCESSES_MAX = 64
"""Most processes reported of one GPU; an inference server's GPU does not have more."""
NO_SUCH_GPU = "GPU {index} cannot be reached"


class ProcessOnGpu(NamedTuple):
    """`used_bytes` None: the driver does not say."""

    pid: int
    used_bytes: int | None


class MigDevice(NamedTuple):
    """One MIG device: a part of a GPU that programs see as a GPU, by its own `uuid`. Its utilisation is not told."""

    number: int
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: tuple[ProcessOnGpu, ...] | None
    uuid: str = ""


class GpuState(NamedTuple):
    """One GPU. None is unknown. `busy_percent`: share of the last sample (up to a second) in which a kernel ran.

    `free_bytes` and `used_bytes` are `nvmlMemory_t` of version 1, where what the driver reserves counts as used: a GPU
    that nobody uses holds some hundred MiB. `processes`: with a compute context. `instances`: empty without MIG.
    `fault`: what the first call that failed said, empty where all were answered or do not apply to such a GPU.
    """

    number: int
    name: str = ""
    uuid: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    busy_percent: int | None = None
    processes: tuple[ProcessOnGpu, ...] | None = None
    instances: tuple[MigDevice, ...] = ()
    fault: str = ""


class SeenGpus(NamedTuple):
    """All GPUs by their numbers from 0, or `why_not`."""

    gpus: tuple[GpuState, ...] = ()
    why_not: str = ""

    def is_free(self) -> bool | None:
        """True if no process has a compute context on any GPU; None where one does not say.

        >>> gpu = GpuState(0, processes=())
        >>> SeenGpus((gpu,)).is_free(), SeenGpus((gpu, gpu._replace(processes=(ProcessOnGpu(7, None),)))).is_free()
        (True, False)
        >>> SeenGpus((gpu, GpuState(1))).is_free(), SeenGpus(why_not="no driver").is_free()
        (None, None)
        """
        told = [gpu.processes for gpu in self.gpus]
        if any(told):
            return False
        return None if not told or None in told else True


class Nvml:
    """One session with the library, begun by the first `look` and begun anew after the driver was exchanged."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        """`load` gives the wrapper: importing it takes 60 ms and 4 MB, so only hosts with a driver pay for it."""
        self._load = load
        self._api: Any = None

    def __repr__(self) -> str:
        return f"<Nvml {'open' if self._api is not None else 'closed'}>"

    def look(self) -> SeenGpus:
        """Every GPU, now: some milliseconds."""
        try:
            if self._api is None:
                api = self._load()
                api.nvmlInit()
                self._api = api
            count = self._api.nvmlDeviceGetCount()
        except Exception as error:  # a wrapper that is missing, a library that is not NVIDIA's, the driver's refusals
            self.close()
            return SeenGpus(why_not=_said(error))
        return SeenGpus(tuple(_Reader(self._api, index).gpu() for index in range(count)))

    def close(self) -> None:
        """Ends the session; the next `look` begins one."""
        api, self._api = self._api, None
        if api is not None:
            with contextlib.suppress(Exception):  # a session that is over already
                api.nvmlShutdown()


class _Reader:
    """Asks about one GPU and remembers what was refused first."""

    def __init__(self, api: Any, index: int) -> None:
        self._api = api
        self._index = index
        self._fault = ""

    def gpu(self) -> GpuState:
        handle = self._ask("nvmlDeviceGetHandleByIndex", self._index)
        if handle is None:
            return GpuState(self._index, fault=self._fault or NO_SUCH_GPU.format(index=self._index))
        instances = self._instances(handle)
        total, used, free = self._memory(handle, instances)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        processes = self._processes(handle, instances)
        name, uuid = self._ask("nvmlDeviceGetName", handle), self._ask("nvmlDeviceGetUUID", handle)
        return GpuState(
            number=self._index,
            name=name or "",
            uuid=uuid or "",
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            busy_percent=None if rates is None else int(rates.gpu),
            processes=processes,
            instances=instances,
            fault=self._fault,
        )

    def _memory(self, handle: Any, instances: tuple[MigDevice, ...]) -> tuple[int | None, int | None, int | None]:
        """Total, used, free. A user that may not see all of a GPU with MIG gets the sum of the instances it may see."""
        found = self._ask("nvmlDeviceGetMemoryInfo", handle)
        if found is not None:
            return int(found.total), int(found.used), int(found.free)
        seen = [instance for instance in instances if instance.total_bytes is not None]
        if not seen:
            return None, None, None
        return (
            sum(instance.total_bytes or 0 for instance in seen),
            sum(instance.used_bytes or 0 for instance in seen),
            sum(instance.free_bytes or 0 for instance in seen),
        )

    def _processes(self, handle: Any, instances: tuple[MigDevice, ...]) -> tuple[ProcessOnGpu, ...] | None:
        if not instances:
            return self._running(handle)
        told = [instance.processes for instance in instances]
        return None if None in told else tuple(process for found in told for process in found or ())

    def _instances(self, handle: Any) -> tuple[MigDevice, ...]:
        """MIG devices that are there: their numbers need not follow each other."""
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode is None or mode[0] != self._api.NVML_DEVICE_MIG_ENABLE:
            return ()
        found = []
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if part is not None:
                found.append(self._instance(number, part))
        return tuple(found)

    def _instance(self, number: int, handle: Any) -> MigDevice:
        memory, name = self._ask("nvmlDeviceGetMemoryInfo", handle), self._ask("nvmlDeviceGetName", handle)
        uuid = self._ask("nvmlDeviceGetUUID", handle)
        return MigDevice(
            number=number,
            name=name or "",
            total_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            free_bytes=None if memory is None else int(memory.free),
            processes=self._running(handle),
            uuid=uuid or "",
        )

    def _running(self, handle: Any) -> tuple[ProcessOnGpu, ...] | None:
        """Drivers before 510 have version 2 of this call alone."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", handle, is_first_try=True)
        if found is None:
            found = self._ask("nvmlDeviceGetComputeRunningProcesses_v2", handle)
        if found is None:
            return None
        return tuple(
            ProcessOnGpu(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory))
            for one in found[:PROCESSES_MAX]
        )

    def _ask(self, verb: str, *arguments: Any, is_first_try: bool = False) -> Any:
        """The result of the call; None where it is refused, which is no fault yet on a first try."""
        try:
            return getattr(self._api, verb)(*arguments)
        except Exception as error:  # also what the wrapper raises itself: a name that is no UTF-8, a missing version
            if not is_first_try and getattr(error, "value", None) not in self._not_here():
                self._fault = self._fault or _said(error)
            return None

    def _not_here(self) -> tuple[int, ...]:
        """Refusals that are no fault of this GPU: it has no such thing."""
        api = self._api
        return (api.NVML_ERROR_NOT_SUPPORTED, api.NVML_ERROR_NOT_FOUND)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
