"""Hosts made of namespaces: each has a network, processes and temporary files of its own, all are on one bridge.

Nothing is left of them after kill -9 of who made them: the first process of each reads a pipe from its maker and ends
with it, the kernel then ends all other processes there, and with them go their networks, the bridge and every link.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

FIRST = "import sys; print('up', flush=True); sys.stdin.read()"
"""The program of a host's first process: it waits for its maker's end. (As the first process of its namespace it takes
over what loses its parent; subprocess reaps nothing, so SIGCHLD is ignored and the kernel does.)"""
FIRST_REAPS = f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); {FIRST}"
OWN = ("/tmp", "/dev/shm")
"""Directories that each host has of its own: Ray's sessions, and its shared memory."""
_numbers = itertools.count(os.getpid())


class Host:
    """One host. `address`: where the others, and the machine of the test, reach it."""

    def __init__(self, name: str, address: str, first_pid: int, link: tuple[int, str] | None) -> None:
        self.name = name
        self.address = address
        self._first_pid = first_pid
        self._link = link
        self.started: list[subprocess.Popen[bytes]] = []

    def port(self, wanted: int) -> int:
        """The port to listen at there for what listens at `wanted` by itself."""
        return wanted

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` there."""
        return ["nsenter", f"--target={self._first_pid}", "--net", "--pid", "--mount", "--", *words]

    def start(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a program there. It is nsenter's child: signals are for `pids`."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.command(words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )
        self.started.append(process)
        return process

    def run(self, *words: str) -> None:
        subprocess.run(self.command(words), check=True, capture_output=True)

    def pids(self, named: str = "") -> list[int]:
        """Pids, as the test sees them, of the programs there whose command line has `named` in it."""
        mine = os.stat(f"/proc/{self._first_pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == mine
                if is_here and process.pid != self._first_pid and named in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def kill(self, named: str = "") -> int:
        """kill -9 of these; how many there were."""
        pids = self.pids(named)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def cut(self) -> None:
        """Takes its link down: nothing comes or goes, and nobody is told."""
        self._set_link("down")

    def mend(self) -> None:
        self._set_link("up")

    def _set_link(self, to: str) -> None:
        assert self._link is not None, f"{self.name} has no link that could be cut"
        switch, port = self._link
        _run("nsenter", f"--target={switch}", "--net", "--", "ip", "link", "set", port, to)


def why_not() -> str:
    """The reason why no hosts of namespaces can be made here, empty where they can."""
    if os.geteuid() != 0:
        return "hosts made of namespaces need root"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"hosts made of namespaces need {program}"
    tried = ["unshare", "--net", "ip", "link", "add", "name", "bridge0", "type", "bridge"]
    said = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"no bridge can be made here: {said.stderr.strip()}" if said.returncode else ""


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts on a bridge, which the machine of the test is on as well, with an address in the same network."""
    number = next(_numbers) % 4000
    network = f"10.{224 + number // 250}.{number % 250}"
    found: list[Host] = []
    with ExitStack() as made:
        made.callback(lambda: [process.wait() for host in found for process in host.started])
        switch = made.enter_context(_first_process("--net"))
        inside = ("nsenter", f"--target={switch}", "--net", "--")
        _run(*inside, "ip", "link", "add", "name", "bridge0", "type", "bridge")
        _run(*inside, "ip", "link", "set", "bridge0", "up")
        own = f"hive-{number}"
        made.callback(subprocess.run, ["ip", "link", "delete", own], check=False, capture_output=True)
        _run("ip", "link", "add", own, "type", "veth", "peer", "name", "test", "netns", str(switch))
        _run(*inside, "ip", "link", "set", "test", "master", "bridge0", "up")
        _run("ip", "address", "add", f"{network}.254/24", "dev", own)
        _run("ip", "link", "set", own, "up")
        for place, name in enumerate(names, 1):
            first = made.enter_context(_first_process("--net", "--pid", "--fork", "--mount", "--mount-proc"))
            port = f"to-{name}"
            host = Host(name, f"{network}.{place}", first, (switch, port))
            for directory in OWN:
                host.run("mount", "-t", "tmpfs", "-o", "mode=1777", "hive-test", directory)
            _run(
                *inside, "ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(first)
            )
            _run(*inside, "ip", "link", "set", port, "master", "bridge0", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                host.run("ip", "link", "set", link, "up")
            found.append(host)
        yield found


@contextmanager
def _first_process(*flags: str) -> Iterator[int]:
    """The pid of a process in namespaces of its own, which ends with this one, however that ends."""
    command = ["unshare", *flags, *(["--kill-child"] if "--fork" in flags else [])]
    command += ["--", sys.executable, "-S", "-E", "-c", FIRST_REAPS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "no first process"
            yield psutil.Process(process.pid).children()[0].pid if "--fork" in flags else process.pid
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _run(*words: str) -> None:
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{' '.join(words)}: {said.stderr}"


def wait_for(condition: Callable[[], object], within_s: float, what: str) -> float:
    """Seconds until `condition()` is true; fails after `within_s`."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(Exception):
            if condition():
                return time.monotonic() - began
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
