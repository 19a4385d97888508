"""An adapter of rank 64 beside a model of seven billion weights on a real GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.box import MAKE, config, gpu_box
from tests.gpu.card import Card, told
from tests.journeys.adapter_stack import ended

pytestmark = [pytest.mark.gpu, pytest.mark.redis, pytest.mark.timeout(300)]
RANK = 64


def test_an_adapter_of_rank_64_is_brought_loaded_and_answers(
    card: Card, models: dict[str, Path], passable: Path
) -> None:
    file = passable / "red.gguf"
    made = [sys.executable, str(MAKE), "adapter", str(file), "--rank", str(RANK)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    more = f"[adapters]\ndir = {passable}\nsignatures = off\n"
    with gpu_box(config({"alpha": models["alpha"]}, more=more), card) as box:
        asker = box.asker("alice")
        base = asker.ask("alpha", tokens=24)
        began = time.monotonic()
        pulled = ended(box.hive, box.hive.post("/api/adapters", {"path": file.name, "base": "alpha", "name": "red"}))
        pull_s, began = time.monotonic() - began, time.monotonic()
        assert pulled["state"] == "done", pulled
        loads = []
        for _ in range(3):
            began = time.monotonic()
            loaded = ended(box.hive, box.hive.post("/api/adapters/red/load", {}))
            loads.append(round(time.monotonic() - began, 2))
            assert loaded["state"] == "done", loaded
            answer = asker.ask("red", tokens=24)
            assert answer.is_whole, answer
            box.until_books_hold()
            slot = next(slot for slot in box.hive.get("/api/pool")["slots"] if slot["model"].startswith("red@"))
            assert ended(box.hive, box.hive.post("/api/adapters/red/unload"))["state"] == "done"
        told(test="adapter", megabytes=file.stat().st_size >> 20, pull_s=round(pull_s, 2), load_s=loads, slot=slot,
             base_first_s=round(base.first_s, 2))  # fmt: skip
