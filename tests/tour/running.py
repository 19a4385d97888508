"""`hive demo` as a program, in a pipe or on a terminal, and the look for what it has left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hive.client.client import Client
from hive.demo.port_claims import is_free
from hive.files.ports import recall
from hive.host.cgroup import find_mount, subtree_name
from hive.host.process import is_stopped
from hive.paths import runtime_dir
from tests.journeys.stack import until

HIVE = [sys.executable, "-P", "-m", "hive", "demo"]


class RunningTour:
    """A tour whose temporary directory is `place`. `facts`: what it had at its last look, to be gone at the end."""

    def __init__(self, place: Path, *words: str, **env: str) -> None:
        self.place = place
        self.states: set[Path] = set()
        self.ports: set[int] = set()
        self._words = words
        plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self.environment = {**plain, "TMPDIR": str(place), **env}
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._log = os.memfd_create("tour")
        return subprocess.Popen(
            [*HIVE, *self._words], env=self.environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def shown(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")

    def until_it_says(self, text: str) -> None:
        until(lambda: text in self.shown() or self.process.poll() is not None, within_s=90, what=text)
        assert text in self.shown(), self.shown()
        self.look()

    def look(self) -> None:
        """Notes its state directory and its ports."""
        for state in self.place.glob("hive-demo-*/state"):
            self.states.add(state)
            remembered = recall(state / "ports.json")
            if remembered is not None:
                self.ports |= {remembered.got.proxy, remembered.got.ingress}
            with contextlib.suppress(Exception):
                self.ports |= {view["port"] for view in self.client.get("/api/agents")["agents"] if view["port"]}

    @property
    def state(self) -> Path:
        (state,) = self.place.glob("hive-demo-*/state")
        return state

    @property
    def client(self) -> Client:
        return Client(Path((self.state / "socket").read_text().strip()), timeout_s=30)

    def agents(self) -> list[dict[str, object]]:
        return list(self.client.get("/api/agents")["agents"])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(100)

    def up_pid(self) -> int:
        """The pid of its `hive up`."""
        return int((self.state / "up.lock").read_text())

    def close(self) -> None:
        self.kill()
        os.close(self._log)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class TourTerminal(RunningTour):
    """A tour on a terminal of 80 x 24."""

    def _started(self) -> subprocess.Popen[bytes]:
        self.fd, of_program = pty.openpty()
        fcntl.ioctl(of_program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._seen = b""
        self._of_program = of_program
        self.modes = termios.tcgetattr(of_program)
        return subprocess.Popen(
            [*HIVE, *self._words],
            stdin=of_program,
            stdout=of_program,
            stderr=of_program,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            start_new_session=True,
            env={**self.environment, "TERM": "xterm"},
        )

    def shown(self) -> str:
        while self.fd >= 0 and select.select([self.fd], [], [], 0)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                break
            if not data:
                break
            self._seen += data
        return self._seen.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until_asked(self, heading: str) -> None:
        """Waits for the prompt behind this heading."""
        until(
            lambda: PROMPT in self.shown().partition(heading)[2] or self.process.poll() is not None,
            within_s=90,
            what=heading,
        )
        assert PROMPT in self.shown().partition(heading)[2], self.shown()
        self.look()

    def wait(self) -> int:
        until(lambda: (self.shown(), self.process.poll())[1] is not None, within_s=100, what="the end")
        return self.process.returncode

    def hang_up(self) -> None:
        """Closes the terminal: the kernel says SIGHUP to who runs on it."""
        os.close(self._of_program)
        os.close(self.fd)
        self.fd = self._of_program = -1

    def close(self) -> None:
        self.kill()
        for descriptor in (self.fd, self._of_program):
            if descriptor >= 0:
                os.close(descriptor)


PROMPT = "[Enter] go on   [s] skip   [q] end"


def left(tour: RunningTour) -> list[str]:
    """Everything that is there although the tour has ended: processes, directories, control groups, ports."""
    found = [f"process {process.pid} {words}" for process, words in _processes(tour.place)]
    found += [str(path) for path in tour.place.iterdir()]
    for state in tour.states:
        runtime = runtime_dir(state, os.getuid(), tour.environment)
        found += [str(runtime)] if runtime.exists() else []
        mount = find_mount(Path("/proc/self/mounts").read_text())
        groups = [mount, *Path("/sys/fs/cgroup").glob("*")] if mount else list(Path("/sys/fs/cgroup").glob("*"))
        found += [str(group / subtree_name(state)) for group in groups if (group / subtree_name(state)).exists()]
    return found + [f"port {port}" for port in tour.ports if not is_free(port)]


def _processes(place: Path) -> Sequence[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if (str(place) in words or process.cwd().startswith(str(place))) and process.status() != "zombie":
                found.append((process, words))
    return found


def is_frozen(pid: int) -> bool:
    """Whether the kernel has frozen this process: by its control group, or by signals."""
    if is_stopped(pid):
        return True
    mount = find_mount(Path("/proc/self/mounts").read_text())
    group = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    assert mount is not None
    events: Mapping[str, str] = dict(
        line.split() for line in (mount / group.lstrip("/") / "cgroup.events").read_text().splitlines()
    )
    return events["frozen"] == "1"


def nothing_left(tour: RunningTour) -> None:
    """Holds that nothing is; the kernel may take a moment for a port or a group."""
    until_s = time.monotonic() + 10
    while (found := left(tour)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert found == []


class UnreadTour(RunningTour):
    """A tour into a pipe that nobody reads."""

    def _started(self) -> subprocess.Popen[bytes]:
        self._log = os.memfd_create("tour")
        reading, writing = os.pipe()
        os.close(reading)
        command = [*HIVE, *self._words]
        try:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=writing, stderr=self._log
            )
        finally:
            os.close(writing)
