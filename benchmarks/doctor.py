"""Time that `hive doctor` takes (SPECIFICATION.md): beside nothing, and beside a Hive of which everything hangs.

The second is the worst there is: the daemon, Redis, the Docker engine and the inference server accept connections and
never answer, so every limit is used up. Wall-clock time, the start of the interpreter included, median of RUNS.

    python benchmarks/doctor.py [RUNS]

Prints one line a case and exits 1 where the promise is broken: < 2 s.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from build_line import build_line

PROMISED_S = 2.0
HANGING = ("hive.sock", "redis.sock", "docker.sock")


def listeners(directory: Path) -> list[socket.socket]:
    """Sockets that accept, in the kernel, and answer nothing."""
    found = [socket.socket(socket.AF_UNIX) for _ in HANGING]
    for sock, name in zip(found, HANGING, strict=True):
        sock.bind(str(directory / name))
        sock.listen(100)
    return [*found, socket.create_server(("127.0.0.1", 0), backlog=100)]


def measure(runs: int, *options: str) -> float:
    """Median seconds of `hive doctor` with these options, each run in a new process."""
    took = []
    for _ in range(runs):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hive", "doctor", "--json", *options], stdout=subprocess.DEVNULL
        )
        took.append(time.monotonic() - began)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"hive doctor ended with {done.returncode}")
    return statistics.median(took)


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(build_line())
    with tempfile.TemporaryDirectory(prefix="hive-") as name:
        directory = Path(name)
        listening = listeners(directory)
        conf = directory / "hive.conf"
        conf.write_text(
            f"[inference]\nport = {listening[-1].getsockname()[1]}\n"
            f"[sandbox]\ndocker_socket = {directory / 'docker.sock'}\n"
        )
        os.environ["HIVE_SOCKET"] = str(directory / "nobody.sock")
        cases = {
            "beside nothing": measure(runs),
            "everything hangs": measure(runs, "--socket", str(directory / "hive.sock"), "--config", str(conf)),
        }
        for sock in listening:
            sock.close()
    for case, took_s in cases.items():
        print(f"hive doctor, {case}: {took_s:.2f} s (promised: < {PROMISED_S:g} s)")
    return 0 if max(cases.values()) < PROMISED_S else 1


if __name__ == "__main__":
    sys.exit(main())
