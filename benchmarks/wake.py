"""Time for which a caller waits for a sleeping agent: `python benchmarks/wake.py [--rounds 200]`.

Last byte of the ingress request → first byte of the agent's answer, through a whole Hive, with the agent asleep; its
peer is the same call to the same agent awake, in turn. As root once more for an agent with a network of its own
(`egress = []`), where the helper connects. Then how late a wake at a time is, by what the agent itself sees: it
writes the time every 2 ms. Needs redis-server; loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

from build_line import build_line
from journeys.stack import Stack, stack  # a Hive of its own, as the tests have it


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def call_ms(port: int, token: str) -> float:
    """One call through ingress on a new connection."""
    request = f"GET /agents/echo/ HTTP/1.1\r\nHost: h\r\nX-Hive-Token: {token}\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        sock.sendall(request)
        first = sock.recv(65536)
        took_ms = (time.perf_counter() - begun) * 1e3
        if b" 200 " not in first.split(b"\r\n")[0]:
            raise SystemExit(f"the agent answered {first[:200]!r}")
        while sock.recv(65536):
            pass
    return took_ms


def measure(hive: Stack, rounds: int, egress: list[str] | None) -> None:
    port = free_port()
    command = ["/usr/bin/python3", "-m", "http.server", str(port)]
    hive.post("/api/agents", {"name": "echo", "command": command, "port": port, "egress": egress})
    ingress, token = hive.health()["proxy"]["ingress_port"], hive.get("/api/agents/echo/tokens")["ingress"]
    time.sleep(1)
    asleep, awake = [], []
    for _ in range(rounds):
        hive.post("/api/agents/echo/pause")
        asleep.append(call_ms(ingress, token))
        awake.append(call_ms(ingress, token))
    for label, times in (("asleep", asleep), ("awake", awake)):
        times.sort()
        print(f"  {label:7} p50 {statistics.median(times):6.2f} ms   p99 {times[int(len(times) * 0.99)]:6.2f} ms")
    added = statistics.median(asleep) - statistics.median(awake)
    print(f"  a caller of a sleeping agent waits {added:.2f} ms longer at the median; promised: < 5 ms")
    told = hive.get("/api/stats")["wake_ms"]
    hive.client().delete("/api/agents/echo")
    print(f"  the daemon's own figure, first ask → gate open: p50 {told['p50']:.2f} ms, p99 {told['p99']:.2f} ms")


TICKS = "import time\nwhile True:\n    print(f'{time.time():.6f}', flush=True)\n    time.sleep(0.002)\n"


def measure_times(hive: Stack, rounds: int) -> None:
    """Each from another moment within a second, and one from 40 s before."""
    hive.post("/api/agents", {"name": "clock", "command": ["/usr/bin/python3", "-c", TICKS]})
    log = hive.state / "logs" / f"{hive.get('/api/agents/clock')['id']}.log"
    late_ms = []
    for when in [*["+2s"] * rounds, "+40s"]:
        hive.post("/api/agents/clock/pause")
        at = hive.post("/api/agents/clock/schedules", {"when": when})["at"]
        time.sleep(at - time.time() + 0.2)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            seen = [float(line) for line in file.read().split()[1:-1]]
        late_ms.append(1000 * (min((moment for moment in seen if moment > at), default=at + 9) - at))
    print(f"  p50 {statistics.median(late_ms):.1f} ms late, {max(late_ms):.1f} ms at most; promised: ≤ 50 ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    print(build_line())
    with stack() as hive:
        freezer = hive.health()["freezer"]
        print(f"ingress call, request sent → first byte of the answer, {rounds} rounds, frozen by {freezer}")
        measure(hive, rounds, None)
        if os.geteuid() == 0:
            print("the same to an agent with a network of its own")
            measure(hive, rounds, [])
        print("a wake at a time, until the agent sees the clock again")
        measure_times(hive, min(10, rounds))


if __name__ == "__main__":
    main()
