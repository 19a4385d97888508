"""Ears, eyes and words in the room of two: `python benchmarks/ears.py [--requests 200] [--agents 8]`.

Real faster-whisper, real diffusers and a real llama-server in one pool that holds two of the three, behind a whole
Hive, asked by unmodified `openai` in a random order. A request that fails, one that waits beyond the bound that was
printed for it, and a process that the kernel kills for memory are a failed run. Where this runs as root, a memory
control group holds Hive and its servers to that room. Loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

from build_line import build_line
from pool_live import MemoryGroup, check_oom, in_group

from hive.cli.queue import compared
from tests import whisper
from tests.journeys.ears_stack import MODELS, NEED_MB, Wanted, beyond_bound, config, mixed, room_mb
from tests.journeys.stack import Stack, stack

MIB = 1 << 20
OWN_MB = 200
"""Room in the control group for what Hive itself grows by meanwhile."""


def measured(folder: Path, agents: int, requests: int) -> tuple[list[Wanted], float, str]:
    """The requests that were made, the seconds of all, and how the work compared at the end."""
    room = room_mb(NEED_MB)
    text = config(folder, room=room)
    clip = whisper.speech(folder / "clip.wav")
    with contextlib.ExitStack() as ends:
        group = MemoryGroup(f"hive-ears-{os.getpid()}") if os.geteuid() == 0 else None
        if group is not None:
            ends.callback(group.end)
        with in_group(group) if group is not None else contextlib.nullcontext():
            hive = ends.enter_context(stack(config=text, up_within_s=120))
        names = [f"agent-{number}" for number in range(agents)]
        for name in names:
            hive.create(name, "idler.py")
        if group is not None:
            group.limit(group.bytes + (room + OWN_MB) * MIB)
        began = time.perf_counter()
        made = mixed(hive, names, clip, each=requests // agents)
        took_s = time.perf_counter() - began
        if group is not None:
            check_oom(group, "Hive")
        return made, took_s, told_of(hive)


def told_of(hive: Stack) -> str:
    pool, usage = hive.get("/api/pool"), hive.get("/api/usage")["totals"]
    loads = [f"{slot['model']} {slot['need_bytes'] // MIB} MiB" for slot in pool["slots"]]
    cost = f"{usage['audio_s']:.0f} s of audio, {usage['images']} images, {usage['tokens_out']} tokens out"
    return f"learnt: {', '.join(loads)}\nusage: {cost}\n{compared(hive.get('/api/queue'))}"


def printed(made: Sequence[Wanted], took_s: float) -> None:
    print(f"{len(made)} requests in {took_s:.0f} s")
    for model in MODELS:
        of_model = [one for one in made if one.model == model]
        waits = sorted(one.wait_s for one in of_model)
        bounds = [one.bound_s for one in of_model if one.bound_s]
        came_first = f"{len(bounds)} found it not loaded, the least bound printed {min(bounds):.0f} s" if bounds else ""
        print(
            f"  {model:<5} {len(of_model):>4}  wait p50 {statistics.median(waits):.1f} s, longest {waits[-1]:.1f} s;"
            f" {came_first}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--agents", type=int, default=8)
    given = parser.parse_args()
    print(build_line())
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="ears-") as base:
        folder = Path(base)
        folder.chmod(0o755)
        made, took_s, told = measured(folder, given.agents, given.requests)
    printed(made, took_s)
    print(told)
    failed, beyond = [one for one in made if one.fault], beyond_bound(made)
    for one in (*failed, *beyond):
        print(f"  {one}")
    print(f"failed {len(failed)}, waited beyond the bound {len(beyond)}, killed for memory 0")
    if failed or beyond:
        raise SystemExit("a failed run")


if __name__ == "__main__":
    main()
