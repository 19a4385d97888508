"""Whether the GPU's memory that an ended server held has been given back."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hive.host.gpu import PROC


class GpuMemory(Protocol):
    """One look at a time; nothing is remembered."""

    @property
    def has_gpu(self) -> bool:
        """Whether there is memory to wait for."""

    def is_free(self) -> bool | None:
        """Whether no process holds any of it; None where nobody can tell."""


class Unread:
    """What the kernel shows without NVIDIA's library: whether its driver drives a GPU, and nothing of its memory.

    Linux frees the memory of a process with its last reference to the device, a moment after systemd has seen it end.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._gpus = proc / "gpus"

    def __repr__(self) -> str:
        return f"<Unread {'a GPU' if self.has_gpu else 'no GPU'}>"

    @property
    def has_gpu(self) -> bool:
        try:
            return any(self._gpus.iterdir())
        except OSError:
            return False

    def is_free(self) -> bool | None:
        return None
