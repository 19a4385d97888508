"""Hosts where no namespaces can be made: all are this machine, and each has ports of its own. No link can be cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import pytest

from tests.cluster.namespaces import Host, hosts, why_not
from tests.ports import free_port


class Loopback(Host):
    """A part of this machine: what was started there."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "127.0.0.1", os.getpid(), None)
        self._ports: dict[int, int] = {}

    def port(self, wanted: int) -> int:
        return self._ports.setdefault(wanted, free_port())

    def command(self, words: Sequence[str]) -> list[str]:
        return ["setpriv", "--pdeathsig=KILL", "--", *words]

    def pids(self, named: str = "") -> list[int]:
        found = []
        for started in self.started:
            with contextlib.suppress(psutil.Error):
                first = psutil.Process(started.pid)
                family = [first, *first.children(recursive=True)] if started.poll() is None else []
                found += [process.pid for process in family if named in " ".join(process.cmdline())]
        return found

    def _set_link(self, to: str) -> None:
        pytest.skip(f"no link can be cut: {why_not() or 'HIVE_CLUSTER_LOOPBACK is set'}")


@contextmanager
def machines(*names: str) -> Iterator[list[Host]]:
    """Hosts made of namespaces, or of this machine where that is impossible or HIVE_CLUSTER_LOOPBACK is set."""
    if not os.environ.get("HIVE_CLUSTER_LOOPBACK") and not why_not():
        with hosts(*names) as made:
            yield made
        return
    parts = [Loopback(name) for name in names]
    try:
        yield [*parts]
    finally:
        for part in parts:
            part.kill()
            for process in part.started:
                process.wait()
