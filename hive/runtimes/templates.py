"""The templates of one helper: each started when the first agent names it, and started anew after its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hive.errors import HiveError, NotFound
from hive.host.cgroup import Leaf, own_cgroup
from hive.host.process import Identity, ancestors, wait_until_over
from hive.host.rollup import read_rollups
from hive.link.helper import Templates, TemplateStat
from hive.link.specs import TemplateSpec
from hive.runtimes.template import Distrusted, ForkOrder, Template, TemplatePlaces, TemplateProcess, WaitingChild
from hive.runtimes.template_check import (
    ExpectedChild,
    OpenFile,
    filters_of,
    namespaces_of,
    now_ticks,
    read_child,
    strays,
    why_not_release,
)
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

CLOSES_S = 1.0
"""For a child to close its own pidfd once it has handed it over: microseconds, more on a busy machine."""
OWN_IN_A_PLACE = frozenset({"net", "mnt", "ipc", "uts"})
"""Namespaces that a child has of its own where it has a place in a unit."""
SOURCES_MAX = 500
"""Files of a script's own that are looked at."""
PACKAGES_MAX = 5000
"""Entries looked at in one directory of packages: a template names them, and may name anything."""


class _Entry:
    """All that is known of one name. `why`: of a start that failed, or of a lie; no other is tried before `restart`."""

    def __init__(self, spec: TemplateSpec) -> None:
        self.spec = spec
        self.starting: asyncio.Task[Template | str] | None = None
        self.template: Template | None = None
        self.why = ""
        self.packages_at = 0.0
        self.sources: dict[str, tuple[int, ...]] = {}


class TemplateTable:
    """All templates of one helper. It adopts none: those of a helper that was killed end when their socket closes."""

    def __init__(self, places: TemplatePlaces) -> None:
        self._places = places
        self._entries: dict[str, _Entry] = {}

    def __repr__(self) -> str:
        return f"<TemplateTable {[entry.template or name for name, entry in self._entries.items()]}>"

    async def get(self, spec: TemplateSpec) -> Template | str:
        """The template, ready; else a clause that says why there is none. Waits for a start under way.

        One that failed is not tried again until `restart`, or until its spec is another; one that ended is.
        """
        entry = self._entries.get(spec.name)
        if entry is None or entry.spec != spec:
            await self._retire(entry)
            entry = self._entries[spec.name] = _Entry(spec)
        if entry.why:
            return entry.why
        if entry.template is not None and not entry.template.is_alive():
            await self._over(entry, entry.template)
        if entry.template is not None:
            return entry.template
        if entry.starting is None:
            entry.starting = spawn(self._start(entry), name=f"start template {spec.name}")
        return await asyncio.shield(entry.starting)

    async def _start(self, entry: _Entry) -> Template | str:
        name = entry.spec.name
        try:
            script = await asyncio.to_thread(written, [entry.spec.script])  # before it is read
            template = await Template.start(entry.spec, self._places)
            entry.packages_at = await asyncio.to_thread(youngest, template.ready.packages)
            entry.sources = {**await asyncio.to_thread(written, template.ready.sources), **script}
        except (HiveError, OSError) as error:
            entry.why = f"template {name} does not start: {error}"
            log.warning("template_failed template=%s why=%r", name, str(error))
            return entry.why
        finally:
            entry.starting = None
        if self._entries.get(name) is not entry:  # its spec is another by now
            await template.end()
            return template
        entry.template = template
        loop = asyncio.get_running_loop()
        loop.add_reader(
            template.process.ended_fd, lambda: spawn(self._over(entry, template), name=f"template {name} ended")
        )
        ready = template.ready
        log.info("template_ready template=%s pid=%d seconds=%.1f", name, template.process.main.pid, ready.imports_s)
        for note in ready.notes:
            log.warning("template_note template=%s note=%r", name, note)
        return template

    async def fork(self, template: Template, order: ForkOrder, *, log_fd: int, fds: Sequence[int] = ()) -> WaitingChild:
        """A child that is what was asked for, looked at from outside. `fds`: see `ForkOrder.place`.

        Raises HiveError; a template that does not do what it should is ended. Then no child is left.
        """
        since = now_ticks()
        try:
            child = await template.fork(order, log_fd=log_fd, fds=fds)
        except Distrusted as error:
            if template.is_alive():
                await self.distrust(template, error.message)
            raise
        try:
            if why := await _why_not_release(template, order, child, log_fd, since):
                raise Distrusted(f"its child is not what was asked for: {why}")
        except BaseException as error:
            child.kill()
            child.close()
            if isinstance(error, Distrusted):
                await self.distrust(template, error.message)
            raise
        return child

    async def distrust(self, template: Template, why: str) -> None:
        """It does not do what it should: it is ended, and counts as failed."""
        log.error("template_distrusted template=%s pid=%d why=%r", template.spec.name, template.process.main.pid, why)
        entry = self._entries.get(template.spec.name)
        if entry is not None and entry.template is template:
            entry.why = f"template {template.spec.name} is not trusted any more: {why}"
            entry.template = None
        await self._end(template)

    async def _over(self, entry: _Entry, template: Template) -> None:
        """It ended by itself, or was killed."""
        if entry.template is template:
            log.warning("template_ended template=%s pid=%d", template.spec.name, template.process.main.pid)
            entry.template = None
            await self._end(template)

    async def _end(self, template: Template) -> None:
        if template.process.ended_fd >= 0:
            asyncio.get_running_loop().remove_reader(template.process.ended_fd)
        await template.end()

    async def _retire(self, entry: _Entry | None) -> None:
        if entry is not None and entry.template is not None:
            template, entry.template = entry.template, None
            await self._end(template)

    async def restart(self, name: str) -> None:
        """A new process for new agents; the old one's agents stay. Raises NotFound where no agent has named it yet."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"template {name} was not started here", hint="it starts with its first agent")
        if entry.starting is not None:
            await asyncio.shield(entry.starting)
        fresh = self._entries[name] = _Entry(entry.spec)
        await self._retire(entry)
        await self.get(fresh.spec)

    async def stats(self, forked: Mapping[str, str], names: frozenset[str] = frozenset()) -> Templates:
        """Those named, all where none is. `forked`: id of a running agent → `Run.template`."""
        found = {}
        for name, entry in list(self._entries.items()):
            if not names or name in names:
                found[name] = await asyncio.to_thread(_stat, entry, forked)
        return Templates(templates=found)

    async def leave(self) -> None:
        """Ends them all; their children go on."""
        for entry in self._entries.values():
            if entry.starting is not None:
                entry.starting.cancel()
                with contextlib.suppress(BaseException):
                    await entry.starting
            await self._retire(entry)
        self._entries.clear()


async def _why_not_release(template: Template, order: ForkOrder, child: WaitingChild, log_fd: int, since: int) -> str:
    """Looks again for a moment: it closes its own pidfd only once it has sent it."""
    expected = _expected(template, order, child, log_fd, since)
    await wait_until_over(lambda: not why_not_release(read_child(child.pidfd), expected), CLOSES_S)
    why, group = why_not_release(read_child(child.pidfd), expected), template.process.group
    if why or order.uid is None or group is None:
        return why
    others = strays(order.uid, Leaf(group).pids(), child=child.pid)
    return f"process {others[0]} runs as its user already" if others else ""


def _expected(template: Template, order: ForkOrder, child: WaitingChild, log_fd: int, since: int) -> ExpectedChild:
    """Its parent is the nearest sub-reaper above: this process, `hive up`, or process 1."""
    parent = read_child(child.pidfd).parent
    if parent not in ancestors(os.getpid()):
        parent = os.getppid()
    log_file, hosts = OpenFile.of_descriptor(log_fd), namespaces_of("self")
    group = template.process.group
    is_apart = order.uid is not None
    own = OWN_IN_A_PLACE if order.place is not None else frozenset({"net"}) if order.own_network else frozenset()
    filters = None
    if order.filter is not None:
        filters = 1 + (filters_of(template.process.main.pid) or 0)
    return ExpectedChild(
        uid=os.geteuid() if order.uid is None else order.uid,
        gid=os.getegid() if order.gid is None else order.gid,
        parent=parent,
        group="" if group is None else own_cgroup(Path(f"/proc/{template.process.main.pid}/cgroup").read_text()),
        namespaces=namespaces_of(template.process.main.pid),
        hosts=hosts,
        socket=child.socket,
        streams=frozenset({log_file}),
        since_ticks=since,
        own=own,
        confined=is_apart,
        filters=filters,
    )


def label(name: str, main: Identity) -> str:
    """Names one process of a template, for `Run.template`."""
    return f"{name} {main.pid} {main.start_ticks}"


def _stat(entry: _Entry, forked: Mapping[str, str]) -> TemplateStat:
    name, template = entry.spec.name, entry.template
    of_name = sorted(agent for agent, of in forked.items() if of.partition(" ")[0] == name)
    if template is None or not template.is_alive():
        state = "starting" if entry.starting is not None else "failed" if entry.why else "ended"
        return TemplateStat(state=state, why=entry.why, agents=tuple(of_name), older=tuple(of_name))
    held_bytes, shared_bytes = held(template.process)
    current = label(name, template.process.main)
    return TemplateStat(
        state="ready",
        pid=template.process.main.pid,
        since=template.since,
        agents=tuple(of_name),
        older=tuple(agent for agent in of_name if forked[agent] != current),
        held_bytes=held_bytes,
        shared_bytes=shared_bytes,
        packages_at=entry.packages_at,
        is_stale=youngest(template.ready.packages) > entry.packages_at or written(entry.sources) != entry.sources,
    )


def held(process: TemplateProcess) -> tuple[int, int]:
    """Bytes of RAM charged to a template (without a memory controller its anonymous memory), and of them those that
    others map too. Of files nothing counts as shared: programs share those without a template."""
    (sizes,) = read_rollups([process.main.pid], wanted=()) or [{}]
    anonymous = sizes.get("Anonymous", 0)
    charged = anonymous
    if process.group is not None:
        with contextlib.suppress(OSError, ValueError):
            charged = int((process.group / "memory.current").read_text())
    return charged, min(charged, max(0, anonymous - sizes.get("Private_Dirty", 0)))


def youngest(directories: list[str]) -> float:
    """Unix seconds of the youngest change among packages: a package manager that installs one touches these."""
    return max((at for directory in directories for at in _changes(directory)), default=0.0)


def written(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The state on the disk of each file that is there: another one is another content, as far as that can be seen."""
    found: dict[str, tuple[int, ...]] = {}
    for file in itertools.islice(files, SOURCES_MAX):
        with contextlib.suppress(OSError, ValueError):
            seen = os.stat(file)
            found[file] = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
    return found


def _changes(directory: str) -> Iterator[float]:
    with contextlib.suppress(OSError):
        yield min(os.stat(directory).st_mtime, time.time())
        with os.scandir(directory) as entries:
            for _, entry in zip(range(PACKAGES_MAX), entries, strict=False):
                if entry.name.endswith((".dist-info", ".egg-link", ".pth")):
                    yield entry.stat().st_mtime
