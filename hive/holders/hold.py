"""The processes of one lease, as far as they are held together: by a control group, or (in hive.sandbox) by /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from hive.errors import HiveError
from hive.holders.records import HolderPlace
from hive.host.cgroup import Leaf, find_mount, own_cgroup
from hive.host.directory_watch import FileWatch
from hive.host.memory_group import held_by_group, held_by_processes
from hive.host.process import Identity, read_stat, write_control
from hive.tasks import spawn

LOOK_S = 2.0
"""Between looks at a group of which the kernel tells when it is empty: in case it did not."""
UNTOLD_S = 0.25
"""The same where it cannot tell (no inotify instance is left)."""
COST_SHARE = 20
"""Memory that only a walk of the processes tells is looked at for 1/20 of the time at most."""


class HolderUse(NamedTuple):
    """Processes and memory of a holder now; the same as in `LeaseHolder`."""

    pids: list[int]
    bytes: int | None


class Hold(Protocol):
    """All processes of one lease. They outlive whoever holds them; only `terminate` and `kill` end them."""

    def pids(self) -> list[int]: ...

    def terminate(self) -> None:
        """SIGTERM to all, and SIGCONT: also what stands still hears it."""
        ...

    def kill(self) -> None:
        """SIGKILL to all that is found now; to be repeated until `over`."""
        ...

    async def over(self) -> None:
        """Returns once none of them lives."""
        ...

    async def look(self) -> HolderUse: ...

    def let_go(self) -> None:
        """The helper leaves; they go on."""
        ...

    def remove(self) -> None:
        """None of them lives: takes away what held them."""
        ...


class HolderPlaces(Protocol):
    """One way to hold the processes of a lease."""

    holds: str
    """Its name; as `held_by` in `LeaseHolder`."""

    def plan(self, id: str, main: Identity) -> HolderPlace:
        """The place of this lease; nothing is made. Raises NotSupported where there is none."""
        ...

    async def enter(self, id: str, place: HolderPlace, main: Identity) -> HolderPlace:
        """Moves this process there, by its number, and no other; where it is then. It is there already: nothing to do.

        Raises NotSupported where that may not be done, HiveError.
        """
        ...

    def hold(self, place: HolderPlace, main: Identity, mark: str) -> Hold:
        """Processes of that place as they are now, also for a helper that begins."""
        ...


class MemoryLook:
    """Memory of processes, from their group or else from each, not too often."""

    def __init__(self, group: Path | None) -> None:
        self._group = group
        self._held: tuple[int | None, float] = (None, 0.0)

    async def held_by(self, pids: list[int]) -> int | None:
        held = None if self._group is None else held_by_group(self._group)
        if held is not None:
            return held
        held, again_at = self._held
        if time.monotonic() >= again_at:
            began = time.monotonic()
            held = await asyncio.to_thread(held_by_processes, pids)
            self._held = held, time.monotonic() + COST_SHARE * (time.monotonic() - began)
        return held


class GroupHold:
    """A control group; see `Hold`. Whatever forks, leaves its session or loses its parent is in it all the same."""

    def __init__(self, place: HolderPlace, *, is_ours: bool) -> None:
        """`is_ours`: the group is this helper's to remove, else systemd does that."""
        self._leaf = Leaf(Path(place.group))
        self._memory = Path(place.memory) if place.memory and place.memory != place.group else None
        self._is_ours = is_ours
        self._look = MemoryLook(Path(place.memory) if place.memory else None)

    def __repr__(self) -> str:
        return f"<GroupHold {self._leaf!r}>"

    def pids(self) -> list[int]:
        return self._leaf.pids()

    def terminate(self) -> None:
        self._leaf.signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # its owner may have frozen it
            self._leaf.thaw()
        self._leaf.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._leaf.kill()

    async def over(self) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        watch: FileWatch | None = None
        with contextlib.suppress(OSError):  # gone already, or too many are watched
            watch = FileWatch(self._leaf.path / "cgroup.events")
        try:
            if watch is not None:
                loop.add_reader(watch.fd, changed.set)
            while self._is_populated():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(UNTOLD_S if watch is None else LOOK_S):
                        await changed.wait()
                changed.clear()
                if watch is not None:
                    watch.forget()
        finally:
            if watch is not None:
                loop.remove_reader(watch.fd)
                watch.close()

    def _is_populated(self) -> bool:
        """By the kernel's own word; a group that is gone has nobody in it."""
        try:
            return "populated 0" not in (self._leaf.path / "cgroup.events").read_text()
        except OSError:
            return bool(self._leaf.pids())

    async def look(self) -> HolderUse:
        pids = self.pids()
        return HolderUse(pids, await self._look.held_by(pids))

    def let_go(self) -> None:
        """The kernel holds them."""

    def remove(self) -> None:
        if self._is_ours:
            spawn(self._removed(), name="lease group")

    async def _removed(self) -> None:
        """The kernel lets go of a group some milliseconds after the last of its processes."""
        await self._leaf.let_go()
        if self._memory is not None:
            await Leaf(self._memory).let_go()


def is_in(group: Path, main: Identity) -> bool:
    """Whether exactly this process is in this control group."""
    return main.pid in Leaf(group).pids() and main.is_alive()


def turn_out(group: Path, main: Identity) -> None:
    """Gives a process back to the group of its parent that was moved in place of `main`, whose pid it was given.

    `main` ended between the check and the move, which goes by the number. Does nothing where no such process is there.
    """
    stat = read_stat(main.pid)
    mount = find_mount(Path("/proc/self/mounts").read_text())
    if stat is None or stat.start_ticks == main.start_ticks or mount is None or main.pid not in Leaf(group).pids():
        return
    with contextlib.suppress(OSError):
        above = own_cgroup(Path(f"/proc/{stat.parent}/cgroup").read_text())
        write_control(mount / above.lstrip("/") / "cgroup.procs", str(main.pid).encode())


def move(group: Path, pid: int) -> None:
    """Moves a process into a control group, of v1 or v2. Raises HiveError."""
    try:
        write_control(group / "cgroup.procs", str(pid).encode())
    except OSError as error:
        raise HiveError(f"cannot move process {pid} to {group}: {os.strerror(error.errno or 0)}") from error
