"""The control groups an engine put a container into: what the kernel says of it without asking the engine.

Docker freezes by the v1 freezer where there is one (also on a hybrid host), else by v2 `cgroup.freeze`.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from hive.host.cgroup import Leaf, find_mount, mount_of_v1
from hive.host.limits import oom_kills
from hive.host.memory import held_by
from hive.host.process import write_control

_OF_V1 = ("freezer", "cpuacct", "memory")
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class GroupUsage(NamedTuple):
    """CPU time in µs of all that ever ran in it; RSS and swap of the living, and how many they are."""

    cpu_us: int
    rss_bytes: int
    swap_bytes: int
    processes: int


def paths_of(cgroups: str) -> dict[str, str]:
    """Controller → path, by the text of /proc/<pid>/cgroup; v2 is the controller ``.

    >>> paths_of("6:freezer:/docker/ab\\n2:cpu,cpuacct:/docker/ab\\n0::/x\\n")
    {'freezer': '/docker/ab', 'cpu': '/docker/ab', 'cpuacct': '/docker/ab', '': '/x'}
    """
    lines = [line.split(":", 2) for line in cgroups.splitlines() if line.count(":") >= 2]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def container_of(cgroups: str) -> str:
    """The id of the container a process is in, by the text of its /proc/<pid>/cgroup; empty where it is in none.

    >>> container_of("0::/system.slice/docker-" + "a1" * 32 + ".scope\\n") == "a1" * 32, container_of("0::/user.slice")
    (True, '')
    """
    found = _ID.search(cgroups)
    return "" if found is None else found[0]


def is_first(status: str) -> bool:
    """Whether a process is the first one of a pid namespace, by the text of its /proc/<pid>/status.

    >>> is_first("Name:\\tsh\\nNSpid:\\t4711\\t1\\n"), is_first("NSpid:\\t1\\n"), is_first("NSpid:\\t4712\\t7\\n")
    (True, False, False)
    """
    lines = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
    return any(len(pids) > 1 and pids[-1] == "1" for pids in lines)


def find_container(pid: int) -> str:
    """The id of the container with the main process `pid`; empty where it is the main process of none."""
    return container_of(_read(Path(f"/proc/{pid}/cgroup"))) if is_first(_read(Path(f"/proc/{pid}/status"))) else ""


class ContainerGroup:
    """One container's cgroups: `unified` in v2, the others in v1, each None where there is none."""

    def __init__(
        self, *, unified: Path | None, freezer: Path | None, cpuacct: Path | None, memory: Path | None = None
    ) -> None:
        self.unified = unified
        self.memory = memory or unified
        """The group that counts its memory and nobody else's, where there is a controller for that."""
        self._freezer = freezer
        self._cpuacct = cpuacct

    def __repr__(self) -> str:
        return f"<ContainerGroup {self._freezer or self.unified}{' frozen' if self.is_frozen() else ''}>"

    @classmethod
    def of(cls, pid: int, container: str) -> ContainerGroup | None:
        """The group of the container's main process; None where that has left it, or it cannot be seen from here."""
        cgroups = _read(Path(f"/proc/{pid}/cgroup"))
        if container_of(cgroups) != container:
            return None
        paths, mounts = paths_of(cgroups), Path("/proc/self/mounts").read_text()
        found = {name: _directory(mount_of_v1(name, mounts), paths.get(name)) for name in _OF_V1}
        unified = _directory(find_mount(mounts), paths.get(""))
        if found["freezer"] is None and unified is None:
            return None
        return cls(unified=unified, **found)

    def is_frozen(self) -> bool:
        if self._freezer is not None and _read(self._freezer / "freezer.state").strip() == "FROZEN":
            return True
        return self.unified is not None and Leaf(self.unified).is_frozen()

    def freeze(self) -> None:
        """Asks the kernel. Raises OSError where this user may not."""
        if self._freezer is not None:
            write_control(self._freezer / "freezer.state", b"FROZEN")
        elif self.unified is not None:
            write_control(self.unified / "cgroup.freeze", b"1")

    def thaw(self) -> None:
        """Behind the engine's back, which then still calls it paused. What is gone, or not to be written, stays so."""
        with contextlib.suppress(OSError):
            if self._freezer is not None:
                write_control(self._freezer / "freezer.state", b"THAWED")
        with contextlib.suppress(OSError):
            if self.unified is not None:
                write_control(self.unified / "cgroup.freeze", b"0")

    def pids(self) -> list[int]:
        """Living processes of the container; none once it is gone."""
        directory = self.unified or self._freezer
        return [] if directory is None else Leaf(directory).pids()

    def oom_kills(self) -> int:
        """Number of its processes the kernel killed because it was full; 0 once the engine has removed the group."""
        return 0 if self.memory is None else oom_kills(self.memory)

    def usage(self) -> GroupUsage:
        pids = self.pids()
        held = held_by(pids)
        return GroupUsage(self._cpu_us(), held.rss_bytes, held.swap_bytes, len(pids))

    def _cpu_us(self) -> int:
        if self.unified is not None and (lines := _read(self.unified / "cpu.stat").splitlines()):
            return int(lines[0].split()[1])  # usage_usec
        nanoseconds = "" if self._cpuacct is None else _read(self._cpuacct / "cpuacct.usage").strip()
        return int(nanoseconds) // 1000 if nanoseconds else 0


def _directory(mount: Path | None, path: str | None) -> Path | None:
    """The group's directory, if it can be seen under that mount."""
    if mount is None or path is None:
        return None
    directory = mount / path.lstrip("/")
    return directory if directory.is_dir() else None


def _read(path: Path) -> str:
    """The content of one file of the kernel, empty where it, or its process, is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""
