"""A program inside an agent that is a systemd unit: a unit with the same sandbox, in the agent's control group.

systemd makes the sandbox, as it made the agent's: of its filters of system calls none can be taken over from a process
that has them. Its mounts are made anew after the same plan, so what is private to the agent and no file of its home or
its /tmp (a /dev/shm) is private to each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from hive.errors import HiveError, WrongState
from hive.host import systemd
from hive.host.cgroup import Leaf, own_cgroup
from hive.host.process import Identity, identify
from hive.runtimes import unit_plan
from hive.runtimes.entering import (
    GROUP,
    KILL_S,
    Channels,
    Entered,
    EnteredHere,
    EnteredProgram,
    make_channels,
    readable,
)
from hive.runtimes.process import environment_inside
from hive.runtimes.runtime import Run
from hive.runtimes.unit_plan import Network, Places, exec_unit_of
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")


async def enter_unit(run: Run, program: EnteredProgram, places: Places) -> Entered:
    """Begins it. `places`: of the agent's unit, with the script of this program, which is written here.

    Raises WrongState where the agent has ended, NotPermitted, DependencyDown, HiveError; then nothing was started.
    """
    assert run.leaf is not None
    spec, unit = program.spec, exec_unit_of(program.run)
    group = Leaf(Path(run.leaf, GROUP + program.run))
    channels = make_channels(program.terminal, spec.uid)
    try:
        group.make()
        network = _network_of(run) if unit_plan.has_own_network(spec.egress) else None
        filtered = os.stat(run.leaf).st_ino if network is None else None
        write_script(places.script, unit_plan.script(spec.command, environment_inside(program), stdin="<&3"))
        properties = unit_plan.properties_inside(
            spec,
            places,
            network,
            unit=run.handle,
            helper=_helper_unit(),
            stdio=[f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in channels.program],
            terminal=os.ttyname(channels.program[0]) if program.terminal else "",
            private=_private_of(run.handle) if run.template else None,
        )
        command = unit_plan.command(spec, places, network, filtered, group=group.path.name)
        description = f"A program inside Hive agent {spec.name}"
        await systemd.start(unit, description, properties, command, slice_=unit_plan.SLICE)
        entered = EnteredUnit(unit, await _main_of(unit), group, channels)
    except BaseException:
        spawn(_forget(unit), name=f"forget {unit}")
        group.kill()
        group.remove()
        channels.close()
        raise
    finally:
        places.script.unlink(missing_ok=True)
    channels.close_program()
    return entered


def write_script(path: Path, text: str) -> None:
    """0600 in a 0700 directory: an agent's holds its tokens. There is never half of one. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(os.fsencode(text))
    beside.rename(path)


def _network_of(run: Run) -> Network:
    path = f"/proc/{run.main.pid}/ns/net"
    try:
        return Network(path, os.stat(path).st_ino)
    except OSError:
        raise WrongState("the agent has ended") from None


def _private_of(unit: str) -> dict[str, str]:
    """The directories of this host that systemd has made for a unit with PrivateTmp=. Raises WrongState."""
    found = {}
    for target in ("/tmp", "/var/tmp"):
        # As process 1 sees them: the helper's own /tmp is another.
        made = next(Path(f"/proc/1/root{target}").glob(f"systemd-private-*-{unit}-*/tmp"), None)
        if made is None:
            raise WrongState("the agent has ended, or its /tmp was removed")
        found[target] = f"/{made.relative_to('/proc/1/root')}"
    return found


def _helper_unit() -> str:
    """The service this process is, with which such programs end; empty where it is none."""
    unit = own_cgroup(Path("/proc/self/cgroup").read_text()).rpartition("/")[2]
    return unit if unit.endswith(".service") else ""


async def _main_of(unit: str) -> Identity | None:
    """Its main process; None where that has ended already."""
    shown = await systemd.show(unit, "MainPID")
    return identify(int(shown.get("MainPID") or 0))


async def _forget(unit: str) -> None:
    try:
        await systemd.forget(unit)
    except HiveError as error:
        log.warning("unit_not_forgotten unit=%s error=%r", unit, error.message)


class EnteredUnit(EnteredHere):
    """See `Entered`; systemd's child, not the helper's."""

    def __init__(self, unit: str, main: Identity | None, group: Leaf, channels: Channels) -> None:
        super().__init__(group, channels, pidfd=-1 if main is None or (pidfd := main.open()) is None else pidfd)
        self._unit = unit
        self._main = main

    def __repr__(self) -> str:
        return f"<EnteredUnit {self._unit}>"

    async def ended(self) -> int | None:
        if self._pidfd >= 0:
            await readable(self._pidfd)
        return None if (ended := (await systemd.find_end(self._unit))[0]) is None else ended.code

    async def kill(self) -> bool:
        until = time.monotonic() + KILL_S
        while self._group.pids() or (self._main is not None and self._main.is_alive()):
            self._group.kill()
            if self._main is not None:
                self._main.send(9)
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.002)
        return True

    def close(self) -> None:
        spawn(_forget(self._unit), name=f"forget {self._unit}")
        super().close()
