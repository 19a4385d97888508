"""Runs a service of conf/cluster on a host as systemd would: its command, its environment, again when it ended."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.namespaces import Host

CONF = Path(__file__).parents[2] / "conf" / "cluster"
VARIABLE = re.compile(r"\$\{(\w+)\}")


class Service:
    """One service of a host: all programs there are its own, and are killed where its main one has ended, as
    KillMode=control-group does. `places`: what of the file is elsewhere in a test (programs, /etc/cluster, %d)."""

    def __init__(self, host: Host, name: str, env: Mapping[str, str], places: Mapping[str, str], log: Path) -> None:
        text = (CONF / name).read_text().replace("\\\n", " ")
        for there, here in places.items():
            text = text.replace(there, here)
        settings = [line.partition("=")[::2] for line in text.splitlines() if line and line[0] not in "#["]
        own = dict(word.split("=", 1) for key, value in settings if key == "Environment" for word in value.split())
        self.env = {**own, **env}
        self.host = host
        self.log = log
        self.starts = 0
        self._command = next(self._words(value) for key, value in settings if key == "ExecStart")
        self._restart_s = float(next(value for key, value in settings if key == "RestartSec"))
        self._ended = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """kill -9 of all of it, for good."""
        self._ended.set()
        while self._thread.is_alive():
            self.host.kill()
            self._thread.join(0.1)

    def hold(self) -> None:
        """kill -9 of all of it, and no start until `release`: a host without power."""
        self._held.set()
        self.host.kill()

    def release(self) -> None:
        self._held.clear()

    def _words(self, line: str) -> list[str]:
        """Words of a command line, in which `${NAME}` is a part of one and `$NAME` is as many as it has."""
        words = []
        for word in shlex.split(line):
            if re.fullmatch(r"\$\w+", word):
                words += self.env.get(word[1:], "").split()
            else:
                words.append(VARIABLE.sub(lambda found: self.env[found[1]], word))
        return words

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self._held.is_set():
                self.starts += 1
                self.host.start(self._command, self.log, self.env).wait()
                self.host.kill()
            self._ended.wait(self._restart_s)


@contextmanager
def running(service: Service) -> Iterator[Service]:
    service.start()
    try:
        yield service
    finally:
        service.stop()


def tail(log: Path) -> str:
    """The end of what a service said, for a failed test."""
    return subprocess.run(["tail", "-c", "3000", str(log)], capture_output=True, text=True, check=False).stdout
