"""libnvidia-ml.so.1 as far as Hive asks it, under the real wrapper (nvidia-ml-py), which finds it instead of NVIDIA's.

What each call refuses when is from NVIDIA's header nvml.h of driver 570, at the function named: utilisation is
`NVML_ERROR_NOT_SUPPORTED` with MIG on; memory and processes of a whole GPU with MIG are for who is privileged
(`NVML_ERROR_NO_PERMISSION`); an index without a MIG device is `NVML_ERROR_NOT_FOUND`; `GetMigMode` of a GPU that
knows no MIG is `NVML_ERROR_NOT_SUPPORTED`; a GPU off the bus is `NVML_ERROR_GPU_IS_LOST` in every call that takes its
handle, `GetHandleByIndex` among them; a process's memory is `NVML_VALUE_NOT_AVAILABLE` where the driver keeps no count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK: int = pynvml.NVML_SUCCESS
NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION: int = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND: int = pynvml.NVML_ERROR_NOT_FOUND
LOST: int = pynvml.NVML_ERROR_GPU_IS_LOST
UNINITIALIZED: int = pynvml.NVML_ERROR_UNINITIALIZED
INSUFFICIENT_SIZE: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
NOT_AVAILABLE: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
GIB = 1024**3


@dataclass
class Gpu:
    """A GPU or a MIG device. `refuses`: function without `nvmlDevice` → the error it answers with."""

    name: bytes = b"NVIDIA H200"
    total: int = 140 * GIB
    used: int = 0
    busy: int = 0
    processes: list[tuple[int, int]] = field(default_factory=list)
    parts: dict[int, Gpu] | None = None
    mig_slots: int = 7
    is_lost: bool = False
    refuses: dict[str, int] = field(default_factory=dict)
    uuid: bytes = b""
    """By its number if empty."""


def with_mig(*, privileged: bool, **parts: Gpu) -> Gpu:
    """A GPU with MIG on and devices at the slots named, like `_2=Gpu(...)`."""
    refuses = {"GetUtilizationRates": NOT_SUPPORTED}
    if not privileged:
        refuses |= {"GetMemoryInfo": NO_PERMISSION, "GetComputeRunningProcesses": NO_PERMISSION}
    for part in parts.values():
        part.refuses = {"GetUtilizationRates": NOT_SUPPORTED, **part.refuses}
    return Gpu(parts={int(slot[1:]): part for slot, part in parts.items()}, refuses=refuses)


class Library:
    """`fails_init`: what `nvmlInit` answers. `version`: the last of the call for processes, 3 since driver 510."""

    def __init__(self, *gpus: Gpu, fails_init: int = OK, version: int = 3) -> None:
        self.gpus = list(gpus)
        self.fails_init = fails_init
        self.sessions = 0
        self._handles: list[Gpu] = []
        self.nvmlErrorString = lambda code: b"Unknown Error"
        self.nvmlDeviceGetMemoryInfo = self._of_gpu("GetMemoryInfo", self._memory)
        self.nvmlDeviceGetUtilizationRates = self._of_gpu("GetUtilizationRates", self._rates)
        self.nvmlDeviceGetName = self._of_gpu("GetName", self._name)
        self.nvmlDeviceGetUUID = self._of_gpu("GetUUID", self._uuid)
        self.nvmlDeviceGetMigMode = self._of_gpu("GetMigMode", self._mig_mode)
        self.nvmlDeviceGetMaxMigDeviceCount = self._of_gpu("GetMaxMigDeviceCount", self._mig_count)
        self.nvmlDeviceGetMigDeviceHandleByIndex = self._of_gpu("GetMigDeviceHandleByIndex", self._mig_handle)
        processes = self._of_gpu("GetComputeRunningProcesses", self._processes)
        for known in range(2, version + 1):
            setattr(self, f"nvmlDeviceGetComputeRunningProcesses_v{known}", processes)

    def nvmlInitWithFlags(self, flags: int) -> int:
        if self.fails_init == OK:
            self.sessions += 1
        return self.fails_init

    def nvmlShutdown(self) -> int:
        self.sessions -= 1
        return OK

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        if not self.sessions:
            return UNINITIALIZED
        if self.fails_init != OK:
            return self.fails_init
        count._obj.value = len(self.gpus)
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        gpu = self.gpus[index.value]
        return LOST if gpu.is_lost else self._hand_out(gpu, handle)

    def _hand_out(self, gpu: Gpu, handle: Any) -> int:
        self._handles.append(gpu)
        ctypes.memmove(handle, ctypes.byref(ctypes.c_void_p(len(self._handles))), ctypes.sizeof(ctypes.c_void_p))
        return OK

    def _of_gpu(self, verb: str, answer: Callable[..., int]) -> Callable[..., int]:
        def ask(handle: Any, *arguments: Any) -> int:
            number = ctypes.cast(handle, ctypes.c_void_p).value
            assert number is not None
            gpu = self._handles[number - 1]
            if gpu.is_lost:
                return LOST
            return gpu.refuses.get(verb, OK) or answer(gpu, *arguments)

        return ask

    def _memory(self, gpu: Gpu, memory: Any) -> int:
        memory._obj.total, memory._obj.used, memory._obj.free = gpu.total, gpu.used, gpu.total - gpu.used
        return OK

    def _rates(self, gpu: Gpu, rates: Any) -> int:
        rates._obj.gpu = gpu.busy
        return OK

    def _name(self, gpu: Gpu, buffer: Any, size: Any) -> int:
        buffer.value = gpu.name
        return OK

    def _uuid(self, gpu: Gpu, buffer: Any, size: Any) -> int:
        places = [place for place, known in enumerate(self.gpus) if known is gpu]
        buffer.value = gpu.uuid or b"GPU-%d" % next(iter(places), 0)
        return OK

    def _mig_mode(self, gpu: Gpu, current: Any, pending: Any) -> int:
        if gpu.parts is None:
            return NOT_SUPPORTED
        current._obj.value = pending._obj.value = pynvml.NVML_DEVICE_MIG_ENABLE
        return OK

    def _mig_count(self, gpu: Gpu, count: Any) -> int:
        count._obj.value = gpu.mig_slots
        return OK

    def _mig_handle(self, gpu: Gpu, index: Any, handle: Any) -> int:
        part = (gpu.parts or {}).get(index.value)
        return NOT_FOUND if part is None else self._hand_out(part, handle)

    def _processes(self, gpu: Gpu, count: Any, array: Any) -> int:
        if len(gpu.processes) > count._obj.value:
            count._obj.value = len(gpu.processes)
            return INSUFFICIENT_SIZE
        count._obj.value = len(gpu.processes)
        for place, (pid, used) in enumerate(gpu.processes):
            array[place].pid, array[place].usedGpuMemory = pid, used
        return OK


@contextmanager
def in_place_of(library: Any) -> Iterator[Any]:
    """The real wrapper, over `library`."""
    before = pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = library
    try:
        yield pynvml
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
