"""The control groups of a service: its processes and what they use."""

from __future__ import annotations

from pathlib import Path

from hive.host.cgroup import Leaf, find_mount, mount_of_v1
from hive.host.memory_group import held_by_group, held_by_processes
from hive.host.process import ProcessTable
from hive.slots.slot_run import SlotUse


class UnitGroups:
    """The control groups of one unit: `unified` (v2), and `memory` where that is one of v1."""

    def __init__(self, unified: Path | None, memory: Path | None) -> None:
        self._leaf = None if unified is None else Leaf(unified)
        self._memory = memory

    def __repr__(self) -> str:
        return f"<UnitGroups {self._leaf!r}>"

    @classmethod
    def of(cls, group: str) -> UnitGroups:
        """`group`: as systemd names it (`ControlGroup=`)."""
        mounts = Path("/proc/self/mounts").read_text()
        unified, memory = find_mount(mounts), mount_of_v1("memory", mounts)
        if not group:
            return cls(None, None)
        found = None if unified is None else unified / group.lstrip("/")
        return cls(found, found if memory is None else memory / group.lstrip("/"))

    def use(self, pid: int) -> SlotUse:
        """Reads them; of a host without v2 the tree below `pid` is looked at instead."""
        if self._leaf is not None:
            pids, cpu_s = self._leaf.pids(), self._leaf.cpu_us() / 1e6
        else:
            pids, cpu_s = (sorted(ProcessTable().with_descendants({pid})) if pid else []), 0.0
        held = None if self._memory is None else held_by_group(self._memory)
        return SlotUse(pids, held_by_processes(pids) if held is None else held, cpu_s)
