"""A program with a lease on a real GPU: models leave for it, what it takes is seen, and its end gives it back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.box import GpuBox, config, gpu_box
from tests.gpu.card import MIB, TAKE_MEMORY, Card, holder, told
from tests.journeys.stack import until

pytestmark = [pytest.mark.gpu, pytest.mark.redis, pytest.mark.timeout(300)]
TORCH = "HIVE_GPU_TORCH_PYTHON"
"""Variable with a Python that has PyTorch; else a program without it takes the memory."""
RESERVE_MB = 512
WHOLE = "[lease]\nshare = 1.0\n"
TRAINS = """
import sys, torch
held = torch.zeros(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
print("held", flush=True)
more = sys.stdin.readline()
if more.strip():
    rest = torch.zeros(int(more) << 20, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
    sys.stdin.readline()
"""


def program(mib: int) -> list[str]:
    python = os.environ.get(TORCH)
    return [python, "-c", TRAINS, str(mib)] if python else [sys.executable, str(TAKE_MEMORY), str(mib)]


@contextlib.contextmanager
def running(box: GpuBox, vram: str, mib: int) -> Iterator[subprocess.Popen[str]]:
    """`hive lease run` of a program that takes `mib`, once it has it."""
    command = [sys.executable, "-m", "hive", "lease", "run", "--state-dir", str(box.hive.state), "--vram", vram]
    with subprocess.Popen(
        [*command, "--", *program(mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert "held" in line, process.stderr.read()
            yield process
        finally:
            process.kill()


def lease(box: GpuBox) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = box.hive.get("/api/leases")["leases"]
    return found[0] if found else None


def test_models_leave_for_a_program_and_its_memory_is_back_after_kill_9(card: Card, models: dict[str, Path]) -> None:
    with gpu_box(config(models, more=WHOLE), card) as box:
        asker = box.asker("alice")
        both_mb = sum(box.load(model)["grants"][0]["charged_bytes"] for model in ("alpha", "gamma")) // MIB
        with holder(f"leave {RESERVE_MB + both_mb // 4}"):
            until(lambda: box.account()["free_bytes"] // MIB <= both_mb // 4, within_s=30, what="others are seen")
            vram_mb = max(0, box.account()["free_bytes"] // MIB) + both_mb * 2 // 3
            takes_mb, began = vram_mb * 3 // 4, time.monotonic()
            with running(box, f"{vram_mb}M", takes_mb) as process:
                started_s = time.monotonic() - began
                seen = until(lambda: (lease(box) or {}).get("used_mb"), within_s=30, what="what it holds is seen")
                told(test="lease", lease_mb=vram_mb, program_mb=takes_mb, seen_mb=seen, driver_mb=card.of(process.pid),
                     started_s=round(started_s, 2), lease=lease(box),
                     states={slot["model"]: slot["state"] for slot in box.hive.get("/api/pool")["slots"]})  # fmt: skip
                assert seen == pytest.approx(card.of(process.pid), abs=2)
                assert seen >= takes_mb
                assert (lease(box) or {})["state"] == "running"
                process.kill()
                process.wait()
                killed = time.monotonic()
                until(lambda: lease(box) is None, within_s=30, what="the lease is over")
                told(test="lease end", over_s=round(time.monotonic() - killed, 2), used_mb=card.used_mb)
            answer = asker.ask("alpha")
            assert answer.is_whole, answer
        box.until_books_hold()


def test_a_program_that_takes_more_than_its_lease_is_told_of(card: Card, models: dict[str, Path]) -> None:
    with gpu_box(config({"gamma": models["gamma"]}, more=WHOLE), card) as box, running(box, "2000M", 1000) as process:
        until(lambda: (lease(box) or {}).get("used_mb"), within_s=30, what="what it holds is seen")
        assert process.stdin is not None
        process.stdin.write("2000\n" if os.environ.get(TORCH) else "take 2000\n")
        process.stdin.flush()
        until(
            lambda: box.hive.get("/api/audit", act="lease.overrun")["rows"],
            within_s=30,
            what=f"it is told of: {lease(box)}",
        )
        told(test="overrun", lease=lease(box), charged_mb=box.account()["leased_bytes"] // MIB)
        assert box.account()["leased_bytes"] // MIB >= 3000
