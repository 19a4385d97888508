"""Files through the proxy: what they add to a request, and to the proxy's memory.

    python benchmarks/uploads.py [--count N] [--full-mib N]

Before a stand-in runner that answers recorded bytes at once (tests/fakes/fake_runner.py), so that what is measured is
the way there. `overhead`: a clip of 6 s (16 kHz, 16 bits: 192 KB) is sent by turns straight to a stand-in and through a
whole Hive to one that its pool has started; the difference of the medians is to be 3 ms at most. `memory`: 8 agents
send 25 MiB each at once; the largest resident memory of the proxy meanwhile is to be at most 1 MiB above what it was
before. Its page cache is not its memory, and is given back with the file.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from build_line import build_line

from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_uploads import RUNNER, whisper_config

CLIP_BYTES = 44 + 6 * 16_000 * 2
MORE_MS_MAX, MORE_MIB_MAX = 3.0, 1.0
AGENTS = 8
PATH = "/v1/audio/transcriptions"


def form(size: int, *, prompt: str = "", boundary: str = "b0b") -> bytes:
    """A form as curl makes it, the file first."""
    texts = {"model": "ear", **({"prompt": prompt} if prompt else {})}
    begun = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="clip.wav"\r\n\r\n'.encode()
    rest = "".join(
        f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}'
        for name, text in texts.items()
    )
    return begun + secrets.token_bytes(size) + rest.encode() + f"\r\n--{boundary}--\r\n".encode()


class Straight(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def ask(connection: http.client.HTTPConnection, body: bytes, token: str = "") -> float:
    """Milliseconds of one request."""
    began = time.perf_counter()
    fields = {"content-type": "multipart/form-data; boundary=b0b", "authorization": f"Bearer {token}"}
    connection.request("POST", PATH, body, fields)
    answer = connection.getresponse()
    told = answer.read()
    assert answer.status == 200, told
    return (time.perf_counter() - began) * 1000


def through(hive: Stack, agent: str) -> tuple[http.client.HTTPConnection, str]:
    access = hive.get(f"/api/agents/{agent}/tokens")
    host, _, port = access["openai_base_url"].removeprefix("http://").partition("/")[0].partition(":")
    return http.client.HTTPConnection(host, int(port), timeout=120), access["model"]


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[Straight]:
    path = folder / "straight.sock"
    process = subprocess.Popen([sys.executable, str(RUNNER), "whisper", "--socket", str(path)])
    try:
        until(path.exists, within_s=10, what="the stand-in listens")
        time.sleep(0.2)
        yield Straight(path)
    finally:
        process.kill()
        process.wait()


def overhead(hive: Stack, folder: Path, count: int) -> bool:
    body = form(CLIP_BYTES)
    by_hive, token = through(hive, "a0")
    with stand_in(folder) as straight:
        for _ in range(20):
            ask(straight, body)
            ask(by_hive, body, token)
        took = [(ask(straight, body), ask(by_hive, body, token)) for _ in range(count)]
    direct, proxied = (sorted(one) for one in zip(*took, strict=True))
    more = statistics.median(proxied) - statistics.median(direct)
    print(f"a clip of 6 s, {count} times: p50 straight {statistics.median(direct):.2f} ms, through Hive", end=" ")
    print(f"{statistics.median(proxied):.2f} ms: {more:.2f} ms more (at most {MORE_MS_MAX:g});", end=" ")
    at = int(count * 0.95)
    print(f"p95 {direct[at]:.2f} and {proxied[at]:.2f} ms")
    return bool(more <= MORE_MS_MAX)


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)


def memory(hive: Stack, full_mib: float) -> bool:
    """The first round warms the proxy up: what its parser and its buffers take once, it keeps."""
    pid = hive.pid_of("proxy")
    body = form(int(full_mib * 1024 * 1024) - 1000, prompt="wait 1")
    more_mib = 0.0
    for turn in range(2):
        for agent in range(AGENTS if not turn else 0):
            ask(*_with(through(hive, f"a{agent}"), form(CLIP_BYTES)))
        before = _status_kib(pid, "VmRSS")
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        askers = [threading.Thread(target=lambda n=n: ask(*_with(through(hive, f"a{n}"), body))) for n in range(AGENTS)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        more_mib = (_status_kib(pid, "VmHWM") - before) / 1024
        print(f"{AGENTS} uploads of {full_mib:g} MiB at once, round {turn + 1}: the proxy's memory", end=" ")
        print(f"{before / 1024:.1f} MiB before, {more_mib:.2f} MiB more at most (at most {MORE_MIB_MAX:g})")
    return bool(more_mib <= MORE_MIB_MAX)


def _with(
    connected: tuple[http.client.HTTPConnection, str], body: bytes
) -> tuple[http.client.HTTPConnection, bytes, str]:
    return connected[0], body, connected[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--full-mib", type=float, default=25)
    arguments = parser.parse_args()
    print(build_line())
    with tempfile.TemporaryDirectory(prefix="hive-uploads-") as made:
        folder = Path(made)
        with stack(config=whisper_config(folder)) as hive:
            for agent in range(AGENTS):
                hive.create(f"a{agent}", "idler.py")
            ask(*_with(through(hive, "a0"), form(1000)))
            kept = [overhead(hive, folder, arguments.count), memory(hive, arguments.full_mib)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
