"""What `hive top` costs with many agents: `python benchmarks/top.py [--agents 1000] [--for 20]`.

The real API over agents in memory, in a process of its own; `hive top` at 120 columns without a terminal in this one,
a look a second. Prints the CPU time of both, the longest time the screen stood still, and the time to the first paint
of a program that is started anew. Loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE)]

import psutil

from hive.control.client import Client
from hive.tui.app import Top
from hive.tui.source import Source

FAKE = HERE / "tests" / "fakes" / "memory_daemon.py"
OF_A_CORE_PERCENT, PAINTED_IN_S = 3.0, 0.5
"""What is promised, for 1,000 agents."""
PAINT = """
import asyncio, sys, time
from pathlib import Path
from hive.tui.source import Source
source = Source([Path(sys.argv[1])], None, uid=0, env={})
first = source.look()
from hive.tui.app import Top
async def main():
    async with Top(source, first).run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        print(time.monotonic() - float(sys.argv[2]))
asyncio.run(main())
"""


async def cost(socket: Path, for_s: float, daemon: psutil.Process) -> tuple[float, float, float]:
    """CPU seconds of this process and of the daemon, and the longest the loop stood still, over `for_s`."""
    source = Source([socket], None, uid=0, env={})
    app = Top(source, await asyncio.to_thread(source.look))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(2)
        own, theirs, began = time.process_time(), sum(daemon.cpu_times()[:2]), time.monotonic()
        stood_s = 0.0
        while (now := time.monotonic()) < began + for_s:
            await asyncio.sleep(0.1)
            stood_s = max(stood_s, time.monotonic() - now - 0.1)
        return time.process_time() - own, sum(daemon.cpu_times()[:2]) - theirs, stood_s


def first_paint_s(socket: Path) -> float:
    """From the start of the interpreter to the first picture; the best of five."""
    took = []
    for _ in range(5):
        words = [sys.executable, "-c", PAINT, str(socket), str(time.monotonic())]
        took.append(float(subprocess.run(words, capture_output=True, text=True, check=True, cwd=HERE).stdout))
    return min(took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--for", type=float, default=20.0, dest="for_s")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hive-") as directory:
        socket = Path(directory, "hive.sock")
        words = [sys.executable, str(FAKE), str(socket)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=HERE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                client = Client(socket)
                for number in range(given.agents - 2):
                    client.post("/api/agents", {"name": f"agent-{number:05}", "command": ["/bin/true"]})
                own_s, daemon_s, stood_s = asyncio.run(cost(socket, given.for_s, psutil.Process(process.pid)))
                paint_s = first_paint_s(socket)
            finally:
                process.terminate()
    percent = 100 * own_s / given.for_s
    print(f"{given.agents} agents, a look a second, {given.for_s:.0f} s")
    print(f"hive top          {percent:6.2f} % of a core   promised {OF_A_CORE_PERCENT} %")
    print(f"the API (a fake desk) {100 * daemon_s / given.for_s:.2f} % of a core")
    print(f"stood still       {1000 * stood_s:6.1f} ms at most")
    print(f"first paint       {1000 * paint_s:6.0f} ms   promised {1000 * PAINTED_IN_S:.0f} ms")
    return 0 if given.agents > 1000 or (percent <= OF_A_CORE_PERCENT and paint_s <= PAINTED_IN_S) else 1


if __name__ == "__main__":
    sys.exit(main())
