"""The pool on real servers: `python benchmarks/pool_live.py [--seconds 40] [--runs 3] [--models 6] [--room 3]`.

Real llama-servers with tiny models whose context makes them large; a memory control group plays the GPU, and an OOM
kill in it is a failed run. Eight clients that think between their requests ask for the models (Zipf), each client
mostly for its own; through a whole Hive, and through llama-server's own router (`--models-max`), in turn. Then the time
of a swap between two models, and what of it is not the server's own stop and start. As root, for the control group;
loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from build_line import build_line

sys.path[:0] = [str(Path(__file__).parent.parent)]

from tests import llama
from tests.journeys.stack import Stack, stack  # a Hive of its own, as the tests have it
from tests.ports import free_port

MIB = 1 << 20
CLIENTS = 8
OWN = 0.7
"""Part of a client's requests that are for its own model."""
THINKS_S = 0.4
TOKENS = 16
MEMORY_V1 = Path("/sys/fs/cgroup/memory")
MEMORY_V2 = Path("/sys/fs/cgroup")
SWAP_TARGET_S = 0.35
SERVED_TARGET, P95_TARGET = 0.98, 1.1
UNMAPPED = {"LLAMA_ARG_LOAD_MODE": "none", "LLAMA_ARG_NO_MMAP": "1"}
"""As the pool starts its servers."""
MARGIN = 1.06
"""A server's memory differs a little from start to start."""


class Measured(NamedTuple):
    """One run: requests answered, failed, and their waits until the first token, in seconds."""

    served: int
    failed: int
    waits: list[float]

    @property
    def p95(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.95)] if self.waits else float("inf")


class MemoryGroup:
    """A control group of memory, v1 or v2, that plays the GPU."""

    def __init__(self, name: str) -> None:
        self._is_v1 = MEMORY_V1.is_dir()
        self.path = (MEMORY_V1 if self._is_v1 else MEMORY_V2) / name
        self.path.mkdir(exist_ok=True)

    def enter(self) -> None:
        """Puts this process into it; called between fork and exec."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, bytes: int) -> None:
        (self.path / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(bytes))

    @property
    def bytes(self) -> int:
        """Anonymous and shared memory."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return (
            int(stat["total_rss"]) + int(stat["total_shmem"]) if self._is_v1 else int(stat["anon"]) + int(stat["shmem"])
        )

    @property
    def oom_kills(self) -> int:
        file = "memory.oom_control" if self._is_v1 else "memory.events"
        told = dict(line.split() for line in (self.path / file).read_text().splitlines())
        return int(told.get("oom_kill", "0"))

    def end(self) -> None:
        for _ in range(100):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def server(program: Path, model: Path, context: int, folder: Path) -> Iterator[tuple[float, psutil.Process]]:
    """One llama-server alone; the seconds of its start, and itself."""
    at = folder / "alone.sock"
    at.unlink(missing_ok=True)  # it does not do so itself
    command = [str(program), "-m", str(model), "--alias", model.stem, "--host", str(at), "-c", str(context)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--parallel", "4"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | UNMAPPED
    )
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(at))) as client:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{program} ended with exit code {process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if client.get("http://l/health").status_code == 200:
                    break
            time.sleep(0.002)
    yield time.perf_counter() - began, psutil.Process(process.pid)
    if process.poll() is None:
        process.terminate()
    process.wait()


def own_s(program: Path, model: Path, context: int, folder: Path, rounds: int) -> float:
    """The median of a stop and a start of llama-server itself."""
    took = []
    for _ in range(rounds):
        with server(program, model, context, folder) as (start_s, process):
            began = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            took.append(start_s + time.perf_counter() - began)
    return statistics.median(took)


def first_token_s(client: httpx.Client, url: str, headers: dict[str, str], model: str) -> float | None:
    """Seconds until the first token of a stream; the rest is read. None if it failed."""
    body = {"model": model, "max_tokens": TOKENS, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    began = time.perf_counter()
    first: float | None = None
    try:
        with client.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                answer.read()
                print(f"    {answer.status_code}: {answer.text[:160]}")
                return None
            for line in answer.iter_lines():
                if line.startswith("data: {") and first is None:
                    if "error" in json.loads(line[6:]):
                        return None
                    first = time.perf_counter() - began
    except httpx.HTTPError as error:
        print(f"    {type(error).__name__}: {error}")
        return None
    return first


def load(asks: Callable[[int], tuple[str, dict[str, str]]], models: list[str], seconds: float, seed: int) -> Measured:
    """Eight clients for so many seconds. `asks`: the URL and headers of a client."""
    until = time.monotonic() + seconds
    waits: list[float] = []
    failed = [0]
    weights = [1 / (rank + 1) for rank in range(len(models))]

    def one(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        url, headers = asks(number)
        own = models[number % len(models)]
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < until:
                model = own if chance.random() < OWN else chance.choices(models, weights)[0]
                first = first_token_s(client, url, headers, model)
                if first is None:
                    failed[0] += 1
                else:
                    waits.append(first)
                time.sleep(chance.expovariate(1 / THINKS_S))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Measured(len(waits), failed[0], waits)


def config(program: Path, files: list[Path], context: int, room_bytes: int) -> str:
    """The pool of these models in `room_bytes` of host memory."""
    text = f"[inference]\nllama_program = {program}\n[pool]\nreserve_mb = 0\ncpu_mb = {room_bytes // MIB}\n"
    text += "patience_normal_s = 1\naudience_s = 2\n"
    for file in files:
        text += f"[model {file.stem}]\nbackend = llama\nfile = {file}\ncontext = {context}\nparallel = 4\ngpus = cpu\n"
    return text


def access(hive: Stack, names: list[str]) -> list[tuple[str, dict[str, str]]]:
    """The URL of each agent, and its headers."""
    found = []
    for name in names:
        hive.create(name, "idler.py")
        told = hive.get(f"/api/agents/{name}/tokens")
        found.append((told["openai_base_url"], {"Authorization": f"Bearer {told['model']}"}))
    return found


def wait_s(hive: Stack, url: str, headers: dict[str, str], model: str) -> float:
    with httpx.Client(timeout=120) as client:
        first = first_token_s(client, url, headers, model)
    if first is None:
        raise SystemExit(f"no answer of {model}: {hive.log[-2000:]}")
    return first


def through_hive(text: str, models: list[str], seconds: float, seed: int, room_bytes: int) -> Measured:
    group = MemoryGroup(f"hive-live-{os.getpid()}")
    try:
        with contextlib.ExitStack() as ends:
            with in_group(group):
                hive = ends.enter_context(stack(config=text))
            places = access(hive, [f"agent{number}" for number in range(CLIENTS)])
            group.limit(group.bytes + room_bytes)
            measured = load(lambda number: places[number], models, seconds, seed)
            check_oom(group, "Hive")
    finally:
        group.end()
    return measured


def through_router(
    program: Path, folder: Path, models: list[str], context: int, seconds: float, seed: int, room: int, room_bytes: int
) -> Measured:
    group = MemoryGroup(f"router-live-{os.getpid()}")
    port = free_port()
    command = [str(program), "--models-dir", str(folder), "--models-max", str(room), "--port", str(port)]
    command += ["-c", str(context), "--parallel", "4", "--offline"]
    with in_group(group), (folder.parent / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | UNMAPPED)
    try:
        wait_for_port(port)
        group.limit(group.bytes + room_bytes)
        measured = load(lambda _: (f"http://127.0.0.1:{port}/v1", {}), models, seconds, seed)
        check_oom(group, "the router")
    finally:
        process.terminate()
        process.wait(30)
        group.end()
    return measured


@contextlib.contextmanager
def in_group(group: MemoryGroup) -> Iterator[None]:
    """Processes started inside are in the group; this one only meanwhile."""
    before = Path("/proc/self/cgroup").read_text()
    group.enter()
    try:
        yield
    finally:
        own = next((line for line in before.splitlines() if ":memory:" in line or line.startswith("0::")), "0::/")
        root = MEMORY_V1 if MEMORY_V1.is_dir() else MEMORY_V2
        (root / own.rsplit(":", 1)[1].lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def check_oom(group: MemoryGroup, whose: str) -> None:
    if kills := group.oom_kills:
        raise SystemExit(f"{whose}: the kernel killed {kills} processes for memory: a failed run")


def wait_for_port(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)


def swaps(text: str, pair: list[str], rounds: int) -> list[float]:
    """Seconds from a request for the model that is not loaded to its first token, with room for one."""
    with stack(config=text) as hive:
        ((url, headers),) = access(hive, ["swapper"])
        for model in pair:
            wait_s(hive, url, headers, model)  # learnt
        return [wait_s(hive, url, headers, pair[number % 2]) for number in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--room", type=int, default=3)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--context", type=int, default=262144, help="tokens: what makes the servers large")
    given = parser.parse_args()
    print(build_line())
    program = llama.program()
    if program is None:
        raise SystemExit("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="pool-live-") as base:
        Path(base).chmod(0o755)
        folder = Path(base) / "models"
        folder.mkdir()
        files = [folder / f"m{number}.gguf" for number in range(given.models)]
        for number, file in enumerate(files):
            subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(file), "--seed", str(number)], check=True)
        models = [file.stem for file in files]
        with server(program, files[0], given.context, Path(base)) as (_, process):
            memory = process.memory_full_info()
            one_bytes = int(memory.uss * MARGIN)
        room_bytes = one_bytes * given.room + 64 * MIB
        print(f"one server: {one_bytes / MIB:.0f} MiB; room for {given.room} of {given.models}")
        if given.runs:
            compare(given, program, folder, files, models, room_bytes)
        own = own_s(program, files[0], given.context, Path(base), given.swaps)
        text = config(program, files[:2], given.context, one_bytes + 32 * MIB)
        took = statistics.median(
            swaps(text.replace("patience_normal_s = 1", "patience_normal_s = 0"), models[:2], given.swaps)
        )
        print(f"swap of two models: {took:.3f} s to the first token (target {SWAP_TARGET_S}); "
              f"the server's own stop and start {own:.3f} s, the rest {took - own:.3f} s")  # fmt: skip


def compare(
    given: argparse.Namespace, program: Path, folder: Path, files: list[Path], models: list[str], room_bytes: int
) -> None:
    """Hive and the router in turn, and the medians."""
    ours, peers = [], []
    text = config(program, files, given.context, room_bytes)
    for run in range(given.runs):
        ours.append(through_hive(text, models, given.seconds, run, room_bytes))
        peers.append(through_router(program, folder, models, given.context, given.seconds, run, given.room, room_bytes))
        for name, measured in (("Hive", ours[-1]), ("router", peers[-1])):
            print(f"  run {run + 1} {name:7} served {measured.served:5}  failed {measured.failed:3}  "
                  f"wait p50 {statistics.median(measured.waits):6.3f} s  p95 {measured.p95:6.3f} s")  # fmt: skip
    served = statistics.median(run.served for run in ours) / statistics.median(run.served for run in peers)
    p95 = statistics.median(run.p95 for run in ours) / statistics.median(run.p95 for run in peers)
    print(f"served {served:.2f} x the router's (target {SERVED_TARGET}), p95 {p95:.2f} x (target {P95_TARGET})")
    if failed := sum(run.failed for run in ours):
        raise SystemExit(f"{failed} requests through Hive failed")


if __name__ == "__main__":
    main()
