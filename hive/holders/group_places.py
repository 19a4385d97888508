"""Two ways to hold a lease's processes in a control group: a scope of systemd's, and a group that the helper makes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from hive.errors import HiveError, NotSupported, WrongState
from hive.holders.hold import GroupHold, Hold, is_in, move
from hive.holders.records import HolderPlace
from hive.host import limits, systemd_call
from hive.host.cgroup import Leaf, Subtree, find_mount, mount_of_v1, own_cgroup
from hive.host.memory_group import own_v1_group
from hive.host.process import Identity

SLICE = "hive-lease.slice"
SLICE_PATH = "hive.slice/hive-lease.slice"
"""Its control group: a dash in a slice's name is a level (systemd.slice(5))."""
UNIT = "hive-lease-{}.scope"
MOVED_S = 10.0
"""systemd moves the process in a job of its own: some milliseconds, on a busy machine more."""
LOOK_S = 0.005
FORGOTTEN_S = 2.0
AGAIN_S = 0.1
NO_LIMIT = 2**64 - 1
STOP_US = 60_000_000
"""From SIGTERM to SIGKILL where an operator stops the scope itself."""


def scope_of(id: str) -> str:
    """
    >>> scope_of("l-17")
    'hive-lease-l-17.scope'
    """
    return UNIT.format(id)


def scope_properties(id: str, pid: int) -> systemd_call.Properties:
    """The scope of one lease. It bounds nothing: a program must run in it as it would without."""
    return [
        ("Description", "s", f"Hive lease {id}"),
        ("Slice", "s", SLICE),
        ("PIDs", "au", [pid]),
        ("CollectMode", "s", "inactive-or-failed"),
        ("MemoryAccounting", "b", True),
        ("TasksMax", "t", NO_LIMIT),
        ("TimeoutStopUSec", "t", STOP_US),
    ]


class ScopePlaces:
    """Scopes below hive-lease.slice; see `HolderPlaces`. For an installed Hive, where systemd is PID 1."""

    holds = "scope"

    def __repr__(self) -> str:
        return f"<ScopePlaces {SLICE}>"

    def plan(self, id: str, main: Identity) -> HolderPlace:  # noqa: ARG002 - a scope is the same for all
        mounts = Path("/proc/self/mounts").read_text()
        if (mount := find_mount(mounts)) is None:
            raise NotSupported("this host has no control groups v2")
        root = own_cgroup(Path("/proc/1/cgroup").read_text()).removesuffix("/init.scope").strip("/")
        name = f"{SLICE_PATH}/{scope_of(id)}"
        memory = mount_of_v1("memory", mounts)
        return HolderPlace(self.holds, str(mount / root / name), str((memory or mount) / root / name))

    async def enter(self, id: str, place: HolderPlace, main: Identity) -> HolderPlace:
        if is_in(Path(place.group), main):  # an earlier helper was killed meanwhile
            return place
        await self._start(id, place, main)
        until = time.monotonic() + MOVED_S
        while not is_in(Path(place.group), main):
            if not main.is_alive():
                raise HiveError(f"process {main.pid} ended before it was moved")
            if time.monotonic() > until:
                raise HiveError(f"systemd did not move process {main.pid} within {MOVED_S:g} s")
            await asyncio.sleep(LOOK_S)
        return place

    async def _start(self, id: str, place: HolderPlace, main: Identity) -> None:
        """systemd forgets a scope a moment after the last of it has ended. Raises WrongState where that is not so."""
        until = time.monotonic() + FORGOTTEN_S
        while True:
            try:
                await asyncio.to_thread(systemd_call.start_scope, scope_of(id), scope_properties(id, main.pid))
            except WrongState:
                if is_in(Path(place.group), main):
                    return
                if time.monotonic() > until:
                    raise
            else:
                return
            await asyncio.sleep(AGAIN_S)

    def hold(self, place: HolderPlace, main: Identity, mark: str) -> Hold:  # noqa: ARG002 - the group knows them all
        return GroupHold(place, is_ours=False)


class GroupPlaces:
    """Groups of the helper's own; see `HolderPlaces`. For root, or a user to whom a subtree is delegated."""

    holds = "cgroup"

    def __init__(self, subtree: Subtree, label: str) -> None:
        """`label`: names what is this Hive's in a hierarchy that others use too."""
        self._subtree = subtree
        self._label = label

    def __repr__(self) -> str:
        return f"<GroupPlaces {self._subtree!r}>"

    def plan(self, id: str, main: Identity) -> HolderPlace:
        leaf = self._subtree.leaf(f"lease.{id}").path  # a dot is in no agent's id
        if "memory" in limits.enable(self._subtree):
            return HolderPlace(self.holds, str(leaf), str(leaf))
        # Of v1, below the caller's own: what bounds it goes on to do so.
        with contextlib.suppress(OSError):
            mounts = Path("/proc/self/mounts").read_text()
            above = own_v1_group("memory", Path(f"/proc/{main.pid}/cgroup").read_text(), mounts)
            if above is not None:
                return HolderPlace(self.holds, str(leaf), str(above / f"hive-lease-{self._label}-{id}"))
        return HolderPlace(self.holds, str(leaf))

    async def enter(self, id: str, place: HolderPlace, main: Identity) -> HolderPlace:  # noqa: ARG002
        leaf = Leaf(Path(place.group))
        if is_in(leaf.path, main):
            return place
        try:
            leaf.make()
            move(leaf.path, main.pid)
        except WrongState:
            raise
        except (HiveError, OSError) as error:  # a user may move a process only inside what is delegated
            leaf.remove()
            raise NotSupported(f"no control group holds process {main.pid}: {error}") from error
        if place.memory in ("", place.group):
            return place
        memory = Leaf(Path(place.memory))
        try:
            memory.make()
            move(memory.path, main.pid)
        except (HiveError, OSError):
            memory.remove()
            return HolderPlace(place.held_by, place.group)
        return place

    def hold(self, place: HolderPlace, main: Identity, mark: str) -> Hold:  # noqa: ARG002
        return GroupHold(place, is_ours=True)
