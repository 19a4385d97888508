"""The `process` runtime where systemd is PID 1: an agent is a unit, `hive-agent@<id>.service`.

It is systemd's child, not the helper's: it lives on when the helper dies, systemd keeps its exit code for the next
one, and every stop of the unit, at shutdown too, thaws it first. What the unit says is in unit_plan.py. Its output goes
to the journal under the agent's name (`journalctl -u hive-agent@<id>`, or `hive.host.systemd.read_journal`), not to
`spec.log`; its /tmp is its own and does not outlive it.

Frozen is the group of Hive's own inside the unit's, by `cgroup.freeze`; systemd's FreezeUnit is never used: it leaves
units that can neither be thawed nor stopped (systemd #37569, #38517).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec

from hive.domain import INNER_PORT, PROGRAM_PATH, Limits, is_name
from hive.errors import (
    BadRequest,
    DependencyDown,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    TimedOut,
    WrongState,
)
from hive.host import mount_trees, netns, packet_filter, systemd
from hive.host.cgroup import Leaf, find_mount, mount_of_v1, own_cgroup
from hive.host.limits import ALL, CONTROLLERS, Fence, in_words, knobs
from hive.host.process import Identity, ProcessTable, boot_id, identify
from hive.link.helper import PagedOut, dialled
from hive.link.script_form import exec_of
from hive.link.specs import RuntimeCapabilities, SandboxSpec, TemplateSpec
from hive.runtimes import home, pageout, syscall_filter, template_unit_plan, unit_handover, unit_plan
from hive.runtimes.container_group import paths_of
from hive.runtimes.entering import Entered, EnteredProgram, kill_groups
from hive.runtimes.process import RunningProcess, environment_of, look_again, make_home, make_network, rules_of
from hive.runtimes.process_fork import forked_from, order_of
from hive.runtimes.runtime import Run, RunningAgent, SocketPlace
from hive.runtimes.template_fit import OWN_PROGRAM, said_of, why_not_forked
from hive.runtimes.template_process import environment_of_template
from hive.runtimes.template_unit import UnitTemplates
from hive.runtimes.templates import TemplateTable
from hive.runtimes.templates import label as template_label
from hive.runtimes.unit_exec import enter_unit, write_script
from hive.runtimes.unit_handover import RunningStub
from hive.runtimes.unit_plan import LEAF, SLICE, SLICE_PATH, Network, Places, agent_of, unit_of
from hive.settings.table import Paths, Sandbox

log = logging.getLogger("hive.sandbox")

TOOLS = ("systemd-run", "systemctl", "journalctl", "setpriv")
BECOMES_S = 10.0
"""Seconds from the script's first line to the agent's first instruction; 3 ms on an idle machine."""
SAID_S = 10.0
"""Seconds the journal may take to have the last line of a unit that ended; seen: more than the unit lived, and more
than 2 where the cores were busy. Waited for only where a program ends at once with 125, 126 or 127 and says nothing."""
ROOT_STEP_NAME = "root_step"
"""Beside the agents' scripts; no agent's id has such a character."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RunningUnit(RunningProcess):
    """One started agent; see `RunningAgent` for the contract. `run.leaf` is the group it is frozen by."""

    hides_homes = True
    places_of: Callable[[EnteredProgram], Places]
    """Of a program inside it."""

    def __repr__(self) -> str:
        return f"<RunningUnit {self.run.handle} {self.run.main.pid} {self._group!r}>"

    async def enter(self, program: EnteredProgram) -> Entered:
        return await enter_unit(self.run, program, self.places_of(program))

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        """Pages out by the unit's own group: systemd gives it the memory controller, the leaf has none."""
        return await pageout.page_out(self._group.pids, _unit_group(self.run), give_up=give_up)

    def memory_group(self) -> Path | None:
        """The unit's own group: in v2, on hybrid hosts in v1's memory hierarchy, under the same name."""
        group = _unit_group(self.run)
        if group is None or (group / "memory.current").exists():
            return group
        return _v1_group(self.run)

    async def reap(self) -> int | None:
        """Asks systemd how it ended, then lets it forget the unit: the name is free for the next start."""
        ended = await self._ended()
        if ended is not None and ended.why == "oom-kill":
            self.why_ended = "out of memory"
            limit = self._spec.limits.memory_mb
            log.warning("agent_out_of_memory agent=%s limits.memory_mb=%s", self._spec.name, limit)
        with contextlib.suppress(HiveError):
            await systemd.forget(self.run.handle)
        code = None if ended is None else ended.code
        self._tell_of_closed_paths(code)
        return code

    def _remove_groups(self) -> None:
        """They are systemd's to remove: here it could be that of the next start, between its making and its use."""

    async def _ended(self) -> systemd.ServiceEnd | None:
        """None where systemd does not know it any more, or does not answer."""
        try:
            return (await systemd.find_end(self.run.handle, self.run.main.pid))[0]
        except HiveError as error:
            log.error("unit_unknown unit=%s error=%r", self.run.handle, error.message)
            return None


def _unit_group(run: Run) -> Path | None:
    return None if run.leaf is None else Path(run.leaf).parent


def _v1_group(run: Run) -> Path | None:
    """The unit's group in v1's memory hierarchy; None where there is none, or its main process is not in it."""
    try:
        cgroups = Path(f"/proc/{run.main.pid}/cgroup").read_text()
    except OSError:
        return None
    mount, inside = mount_of_v1("memory", _mounts()), Path(paths_of(cgroups).get("memory", "/"))
    for path in (inside, *inside.parents):
        if path.name == run.handle and mount is not None:
            return mount / path.relative_to("/")
    return None


class UnitRuntime:
    """See `Runtime` for the contract. For root, where systemd is PID 1: `capabilities` says whether that is so."""

    def __init__(self, paths: Paths, settings: Sandbox, *, log_max_bytes: int) -> None:  # noqa: ARG002
        """`log_max_bytes` is for runtimes that write logs; how much the journal keeps is in journald.conf."""
        self._paths = paths
        self._settings = settings
        self._template_units = UnitTemplates(paths.runtime, self._places_of_templates, _slice_group)
        self.templates = TemplateTable(self._template_units)

    def __repr__(self) -> str:
        return f"<UnitRuntime {SLICE}>"

    @property
    def _scripts(self) -> Path:
        return self._paths.runtime / "start"

    async def capabilities(self) -> RuntimeCapabilities:
        if why_not := _why_not():
            return RuntimeCapabilities(why_not=why_not, why_not_freeze=why_not, why_not_page_out=why_not)
        return RuntimeCapabilities(
            why_not_page_out=pageout.why_not(_slice_group()),
            why_not_egress=packet_filter.why_not(),
            limits=_lacking(ALL),
            journal=unit_of("{}"),
        )

    def place(self, agent: str, spec: SandboxSpec) -> SocketPlace:  # noqa: ARG002
        return SocketPlace(self._paths.agent_socket(agent))

    # --- before it runs ------------------------------------------------------------------------------------------

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        self._check(agent, spec)
        return await make_home(spec)

    def _check(self, agent: str, spec: SandboxSpec) -> None:
        if why_not := _why_not():
            raise NotPermitted(why_not)
        if not spec.command or not all(spec.command[:1]):
            raise BadRequest("the command is empty")
        if not is_name(spec.name):
            raise BadRequest(f"{spec.name[:60]!r} is no name")
        if any("\0" in text for text in [*spec.command, *spec.env.values()]):
            raise BadRequest("a NUL in the command or the environment")
        if wrong := [name for name in spec.env if not _ENV_NAME.fullmatch(name)]:
            raise BadRequest(f"env: {wrong[0][:60]!r} is no environment name")
        home.check_places(agent, spec, self._paths)
        if spec.uid is None or spec.uid <= 0 or spec.gid == 0 or spec.uid == os.geteuid():
            raise NotPermitted(f"an agent runs as a user of its own, never as uid {spec.uid}, gid {spec.gid}")
        if not unit_plan.has_own_network(spec.egress):
            if why_not := packet_filter.why_not():
                raise NotSupported(f"egress: {why_not}", hint="egress = [] reaches Hive and nothing else")
            packet_filter.check(rules_of(spec))

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> RunningAgent:
        template = spec.template
        if template is None:
            return await self._start_program(agent, spec, mark)
        try:
            return await self._fork(agent, spec, template, mark)
        except (HiveError, OSError) as error:
            why = str(error)
        log.warning("template_not_used agent=%s template=%s why=%r", spec.name, template.name, why)
        plain = msgspec.structs.replace(spec, command=exec_of(spec.command, template.python))
        return await self._start_program(agent, plain, mark, note=why)

    async def _fork(self, agent: str, spec: SandboxSpec, of: TemplateSpec, mark: str) -> RunningAgent:
        """Starts it as a child of its template. Raises HiveError or OSError where it has to be an ordinary program."""
        env, unit, places = environment_of(spec, mark), unit_of(agent), self._places(agent, spec)
        if why := why_not_forked(_apart(spec), env, environment_of_template(of), is_root=True):
            raise NotSupported(why)
        template = await self.templates.get(of)
        if isinstance(template, str):
            raise NotSupported(template)
        await _has_ended_stub(unit, places.cgroup)
        if pids := Leaf(places.cgroup).pids():
            raise WrongState(f"processes are left in {unit}: {pids}")
        write_script(places.root_step, unit_plan.ROOT_STEP)  # for programs inside it
        place = template_unit_plan.place_of(places)
        order = msgspec.structs.replace(
            order_of(agent, _apart(spec), of, env),
            umask=unit_plan.UMASK,
            place=place,
            filter=syscall_filter.for_child(),
        )
        with contextlib.ExitStack() as unused, contextlib.ExitStack() as made:
            log_fd = unit_handover.journal_stream(spec.name, unit)
            unused.callback(os.close, log_fd)
            try:
                stub = await _begin_stub(unit, spec, places)
                unused.callback(os.close, stub.pidfd)
                trees = await asyncio.to_thread(mount_trees.clone, stub.pidfd, place["trees"])
                for tree in trees:
                    unused.callback(os.close, tree)
                order = msgspec.structs.replace(order, limits=unit_handover.limits_of_stub(stub))
                child = await self.templates.fork(template, order, log_fd=log_fd, fds=trees)
                unused.callback(child.close)
                made.callback(child.kill)
                inner = netns.listen_inside(child.pidfd, INNER_PORT)
                if inner is None:
                    raise NotPermitted("its template made no network for it")
                made.callback(inner.close)
                assert spec.uid is not None, "looked at by why_not_forked"
                leaf = await unit_handover.hand_over(
                    stub, child, uid=spec.uid, gid=spec.uid if spec.gid is None else spec.gid
                )
                await child.release()
            except BaseException:
                await _undo(unit, places.cgroup)
                raise
            made.pop_all()
            ended_fd = child.take_pidfd()
        label = template_label(of.name, template.process.main)
        run = Run(main=child.main, leaf=str(leaf.path), since=time.time(), handle=unit, template=label)
        return self._running(agent, spec, run, ended_fd, inner)

    async def _start_program(self, agent: str, spec: SandboxSpec, mark: str, *, note: str = "") -> RunningAgent:
        """`note`: why it is no fork of its template."""
        _find_program(spec)
        unit = unit_of(agent)
        with contextlib.ExitStack() as unused, contextlib.ExitStack() as made:
            private = await make_network() if unit_plan.has_own_network(spec.egress) else None
            network = None
            if private is not None:
                unused.callback(os.close, private.fd)
                made.callback(private.sock.close)
                inode = os.fstat(private.fd).st_ino
                network = Network(f"/proc/{os.getpid()}/fd/{private.fd}", inode)
            places = self._places(agent, spec)
            write_script(places.root_step, unit_plan.ROOT_STEP)
            said = said_of(spec, note) if note else ""
            write_script(places.script, unit_plan.script(spec.command, environment_of(spec, mark), said=said))
            unused.callback(places.script.unlink, missing_ok=True)
            await _has_ended_stub(unit, places.cgroup)
            if pids := Leaf(places.cgroup).pids():
                raise WrongState(f"processes are left in {unit}: {pids}")
            try:
                await _start_unit(unit, spec, places, network)
                main, ended_fd = await self._became(unit, spec, places.root_step)
            except BaseException:
                await _undo(unit, places.cgroup)
                raise
            made.pop_all()
        leaf = str(places.cgroup / LEAF)
        run = Run(main=main, leaf=leaf, since=time.time(), handle=unit, template_note=note)
        return self._running(agent, spec, run, ended_fd, None if private is None else private.sock)

    def _places(self, agent: str, spec: SandboxSpec, *, script: str = "") -> Places:
        hidden = [Path("/etc/hive"), Path(self._settings.chroot_base), Path(self._settings.docker_socket)]
        return Places(
            home=Path(spec.home),
            state=self._paths.state,
            runtime=self._paths.runtime,
            sockets=self._paths.agent_socket(agent).parent,
            cgroup=_slice_group() / unit_of(agent),
            cgroups=_cgroups(),
            root_step=self._scripts / ROOT_STEP_NAME,
            script=self._scripts / (script or agent),
            hidden=tuple(path for path in hidden if not path.is_relative_to("/run")),
        )

    def _places_of_templates(self) -> Places:
        """A template has nothing of one agent's."""
        nobody = SandboxSpec(name="", command=[], env={}, home="/", log="")
        return self._places("template", nobody)

    @staticmethod
    async def _became(unit: str, spec: SandboxSpec, root_step: Path) -> tuple[Identity, int]:
        """The main process once it is the agent, or was, and a descriptor that is readable once it ended."""
        shown = await systemd.show(unit, *systemd.HOW_IT_ENDED)
        pid = int(shown.get("ExecMainPID", "0"))
        main = identify(pid) if shown.get("MainPID") == str(pid) else None
        ended_fd = None if main is None else main.open()
        if main is not None and ended_fd is not None:
            if await _becomes(main, root_step):
                return main, ended_fd
            os.close(ended_fd)
        await _raise_if_not_executed(spec, *await systemd.find_end(unit, pid))
        return main or Identity(pid, 0, boot_id()), os.eventfd(1, os.EFD_CLOEXEC)

    def _running(
        self, agent: str, spec: SandboxSpec, run: Run, ended_fd: int, inner: socket.socket | None = None
    ) -> RunningUnit:
        assert run.leaf is not None
        fence = Fence(lacking=_lacking(spec.limits))
        address = dialled(agent) if spec.port is not None and unit_plan.has_own_network(spec.egress) else ""
        running = RunningUnit(run, Leaf(Path(run.leaf)), spec, fence, ended_fd=ended_fd, inner=inner, address=address)
        running.places_of = lambda program: self._places(agent, program.spec, script=f"{agent}.{program.run}")
        return running

    # --- across helpers ------------------------------------------------------------------------------------------

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:  # noqa: ARG002
        fd = run.main.open()
        if fd is None:
            return None
        if run.leaf is not None:
            await kill_groups(Path(run.leaf))
        return self._running(agent, spec, run, fd)

    async def find(self, agent: str, spec: SandboxSpec, snapshot: ProcessTable, *, mark: str) -> RunningAgent | None:  # noqa: ARG002
        """Finds it by the unit's name. Asks systemd only where there is such a group: few of many agents are lost."""
        unit, group = unit_of(agent), _slice_group() / unit_of(agent)
        if not group.is_dir():
            return None
        pid = int((await systemd.show(unit, "MainPID")).get("MainPID", "0"))
        main = identify(pid) if pid else None
        if await _has_ended_stub(unit, group) or main is None:
            return None
        of = forked_from(spec, main.pid)
        run = Run(main=main, leaf=str(group / LEAF), since=time.time(), handle=unit, template=of)
        return await self.adopt(agent, spec, run, mark=mark)

    async def sweep(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> None:  # noqa: ARG002
        if run.main.is_of_this_boot():
            await _undo(unit_of(agent), _slice_group() / unit_of(agent))

    async def thaw_strays(self, known: set[str]) -> list[str]:
        for path in self._scripts.iterdir() if self._scripts.is_dir() else ():
            if path.name != ROOT_STEP_NAME:
                path.unlink()  # a helper was killed while it started this one
        with contextlib.suppress(HiveError):
            await systemd.forget(unit_plan.EXEC_UNITS)
        self._template_units.sweep()
        strays = {agent: group for agent, group in _groups() if agent not in known}
        for group in strays.values():
            Leaf(group / LEAF).thaw()
        living = [agent for agent, group in strays.items() if Leaf(group).pids()]
        for agent in strays.keys() - living:
            with contextlib.suppress(HiveError):
                await systemd.forget(unit_of(agent))
        return living

    async def discard(self, agent: str, spec: SandboxSpec) -> None:  # noqa: ARG002
        await asyncio.to_thread(home.discard, Path(spec.home), Path(spec.log))

    def trim_log(self, spec: SandboxSpec) -> None:
        """The journal keeps its own size."""


# --- this host -----------------------------------------------------------------------------------------------


def _why_not() -> str:
    """The reason that no unit can be started here, empty where one can."""
    if not systemd.is_booted():
        return "agents as systemd units: systemd is not PID 1 here"
    if os.geteuid() != 0:
        return "agents as systemd units: it takes root"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=PROGRAM_PATH) is None]:
        return f"agents as systemd units: no {', '.join(missing)} here"
    if find_mount(_mounts()) is None:
        return "agents as systemd units: control groups v2 are not mounted"
    return ""


def _mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def _cgroups() -> Path:
    """The mount point of control groups v2. Raises DependencyDown."""
    mount = find_mount(_mounts())
    if mount is None:
        raise DependencyDown("control groups v2 are not mounted")
    return mount


def _root_group() -> Path:
    """systemd's own root: PID 1 is in `init.scope` below it, in a container somewhere below the mount."""
    own = own_cgroup(Path("/proc/1/cgroup").read_text()).removesuffix("/init.scope")
    return _cgroups() / own.strip("/")


def _slice_group() -> Path:
    return _root_group() / SLICE_PATH


def _groups() -> Iterator[tuple[str, Path]]:
    """(agent id, control group) of every agent's unit that has one."""
    with contextlib.suppress(FileNotFoundError):
        for group in _slice_group().iterdir():
            if (agent := agent_of(group.name)) is not None:
                yield agent, group


def _lacking(limits: Limits) -> str:
    """The parts of `limits` that systemd cannot enforce here, in words: it uses v2, or (on hybrid hosts) v1."""
    v2, mounts = (_root_group() / "cgroup.controllers").read_text().split(), _mounts()
    enforced = {c for c in CONTROLLERS.values() if c in v2 or mount_of_v1(c, mounts) is not None}
    wanted = knobs(limits, version=2)
    return in_words(name for name, c in CONTROLLERS.items() if c in wanted and c not in enforced)


# --- one start -----------------------------------------------------------------------------------------------


def _find_program(spec: SandboxSpec) -> None:
    """Raises NotFound before a unit is made for nothing. What its sandbox hides is found out by starting it."""
    program = spec.command[0]
    if shutil.which(program, mode=os.F_OK, path=spec.env.get("PATH", PROGRAM_PATH)) is None:
        raise NotFound(f"no such command: {program}")


def _apart(spec: SandboxSpec) -> SandboxSpec:
    """The same as the other runtime says it: where no network is named, it has one of its own."""
    return msgspec.structs.replace(spec, egress=[]) if unit_plan.has_own_network(spec.egress) else spec


async def _begin_stub(unit: str, spec: SandboxSpec, places: Places) -> RunningStub:
    """Once more where an ended unit has the name, as in `_start_unit`."""
    properties, description = template_unit_plan.stub_properties(spec, places), f"Hive agent {spec.name}"
    try:
        await systemd.begin(unit, description, properties, template_unit_plan.STUB, slice_=SLICE)
    except WrongState:
        await systemd.forget(unit)
        await systemd.begin(unit, description, properties, template_unit_plan.STUB, slice_=SLICE)
    return await unit_handover.wait_for_stub(unit, places.cgroup)


async def _has_ended_stub(unit: str, group: Path) -> bool:
    """Whether there was a stub in it that was not handed over: its helper was killed. It is gone then, unit and all."""
    if not any(unit_handover.is_stub(pid) for pid in Leaf(group).pids()):
        return False
    await _undo(unit, group)
    return True


async def _start_unit(unit: str, spec: SandboxSpec, places: Places, network: Network | None) -> None:
    """Once more where an ended unit has the name: a helper was killed before it read how that ended."""
    properties, description = unit_plan.properties(spec, places, network), f"Hive agent {spec.name}"

    async def start() -> None:
        filtered = _put_filter(spec, places) if network is None else None
        command = unit_plan.command(spec, places, network, filtered)
        await systemd.start(unit, description, properties, command, slice_=SLICE)

    try:
        await start()
    except WrongState:
        await systemd.forget(unit)
        await start()


def _put_filter(spec: SandboxSpec, places: Places) -> int:
    """Inode of the leaf that the agent will run in, which is filtered from now on: systemd takes the group as it is."""
    leaf = Leaf(places.cgroup / LEAF)
    places.cgroup.mkdir(parents=True, exist_ok=True)
    leaf.make()
    packet_filter.put_on(leaf.path, rules_of(spec))
    return leaf.path.stat().st_ino


async def _becomes(main: Identity, root_step: Path) -> bool:
    """Waits until it is the agent. False where it ended before that was seen. Raises TimedOut."""
    until = time.monotonic() + BECOMES_S
    for attempt in count():
        cmdline = _cmdline(main.pid)
        if not main.is_alive():
            return False
        if cmdline and unit_plan.has_become_the_agent(cmdline, root_step):
            return True
        if time.monotonic() > until:
            raise TimedOut(f"the agent's program was not reached within {BECOMES_S:g} s")
        await look_again(attempt)
    return False


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def _raise_if_not_executed(spec: SandboxSpec, ended: systemd.ServiceEnd | None, invocation: str) -> None:
    """Tells a program that was never executed from one that ended at once with the same exit code: by what the
    steps before it print. Raises NotFound, NotPermitted, HiveError."""
    if ended is None or ended.code not in (unit_plan.FAILED, unit_plan.NOT_EXECUTABLE, unit_plan.NO_PROGRAM):
        return
    program = spec.command[0]
    said = await _words_of(invocation)
    if f"exec: {program}: " in said:
        if ended.code == unit_plan.NO_PROGRAM:
            hint = "its sandbox hides /home, /root, /run and Hive's own directories"
            raise NotFound(f"no such command: {program}", hint=hint)
        raise NotPermitted(f"uid {spec.uid} may not execute {program}, or it is no program")
    if ended.code == unit_plan.FAILED and "hive: " in said:
        raise HiveError(f"its unit could not be set up: {said.strip().splitlines()[-1]}")


async def _words_of(invocation: str) -> str:
    """The words of this run of a unit as soon as the journal has any, but for the note that its template was not taken.

    Empty where none come: a step before the program that fails says so, and says nothing else.
    """
    until = time.monotonic() + SAID_S
    while True:
        lines = (await systemd.read_invocation(invocation)).splitlines()
        said = "\n".join(line for line in lines if not line.startswith(OWN_PROGRAM))
        if said or time.monotonic() > until:
            return said
        await asyncio.sleep(0.1)


async def _undo(unit: str, cgroup: Path) -> None:
    """Kills all of it and frees the name."""
    group = Leaf(cgroup)
    if group.path.is_dir():
        group.kill()
        Leaf(cgroup / LEAF).thaw()
    with contextlib.suppress(HiveError):
        await systemd.forget(unit)
    group.remove()  # made before there was a unit, where it has a filter
