"""A real GPU for the tests in this directory: what NVIDIA's driver says of it, and a process that takes its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hive.host.nvml import GpuState, Nvml

MIB = 1 << 20
TAKE_MEMORY = Path(__file__).with_name("take_memory.py")
FIGURES = "HIVE_GPU_FIGURES"
"""Variable with the file where what is measured is written, one JSON object a line."""
SERVER = "HIVE_GPU_LLAMA_SERVER"
"""Variable with a llama-server that was built with CUDA, and with flash attention as it is by default: without that a
long context takes a buffer that no estimate knows of (1 GiB for `delta`)."""
MODELS = "HIVE_GPU_MODELS"
"""Variable with a directory in memory where the models are made and kept; else they are made for each run."""


@cache
def missing() -> str:
    """Answers why the tests of a GPU cannot run here; empty if they can."""
    seen = Nvml().look()
    if not seen.gpus:
        return f"no GPU: {seen.why_not}"
    program = os.environ.get(SERVER, "")
    if not os.access(program, os.X_OK):
        return f"no llama-server with CUDA: set {SERVER}"
    return ""


def told(**figures: Any) -> None:
    """Prints what was measured, and writes it down where that is asked for."""
    line = json.dumps({"at": round(time.time(), 1), **figures})
    print(line)
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(line + "\n")


class Card:
    """The first GPU, asked past Hive's own reader but through the same library."""

    def __init__(self) -> None:
        self._nvml = Nvml()

    def now(self) -> GpuState:
        return self._nvml.look().gpus[0]

    @property
    def used_mb(self) -> int:
        return (self.now().used_bytes or 0) // MIB

    @property
    def total_mb(self) -> int:
        return (self.now().total_bytes or 0) // MIB

    def of(self, *pids: int) -> int:
        """MiB of these processes together; 0 where they are not on it."""
        return sum(one.used_bytes or 0 for one in self.now().processes or () if one.pid in pids) // MIB


class Holder:
    """A process that is none of Hive's and holds memory of the GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def order(self, words: str) -> int:
        """`take 500`, `leave 2000` or `free`; the MiB that it holds then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert not answer["error"], answer
        return int(answer["held"])


@contextmanager
def holder(*first: str) -> Iterator[Holder]:
    """One, after these orders."""
    with subprocess.Popen(
        [sys.executable, str(TAKE_MEMORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            held = Holder(process)
            for words in ("free", *first):
                held.order(words)
            yield held
        finally:
            process.kill()


class Watch:
    """Looks at the GPU every 20 ms: the most memory that was used at once, and when the last process was there."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._over = threading.Event()
        self.most_mb = 0
        self.looks = 0
        self.slowest_s = 0.0

    def _look(self) -> None:
        while not self._over.wait(0.02):
            began = time.monotonic()
            self.most_mb = max(self.most_mb, self._card.used_mb)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.looks += 1

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
