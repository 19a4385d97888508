"""The `process` runtime: an agent is a command in a session of its own, and where permitted a cgroup and a network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from hive.domain import INNER_PORT, PROGRAM_PATH
from hive.errors import BadRequest, HiveError, NotPermitted, NotSupported, TimedOut, WrongState
from hive.host import netns, packet_filter
from hive.host.cgroup import Leaf, Subtree
from hive.host.limits import Fence, Fences
from hive.host.packet_filter import FilterRules
from hive.host.process import (
    Identity,
    ProcessTable,
    exit_code,
    identify,
    reaped_here,
    spawn,
    wait_until_over,
)
from hive.link.helper import PagedOut, Stat, dialled
from hive.link.script_form import exec_of
from hive.link.specs import RuntimeCapabilities, SandboxSpec, TemplateSpec
from hive.runtimes import home, pageout, process_fork
from hive.runtimes.closed_paths import why_unread
from hive.runtimes.dialling import to_port
from hive.runtimes.entering import GROUP, Channels, Entered, EnteredProcess, EnteredProgram, kill_groups, make_channels
from hive.runtimes.log_pipes import AgentOutput, LogPipes
from hive.runtimes.runtime import Run, RunningAgent, SocketPlace
from hive.runtimes.signals import SignalGroup
from hive.runtimes.template_fit import said_of, why_not_forked
from hive.runtimes.template_process import ProcessTemplates, environment_of_template
from hive.runtimes.templates import TemplateTable
from hive.settings.table import Paths

log = logging.getLogger("hive.sandbox")

NO_LISTS = "a list of networks takes control groups v2; here it is [] or the host's network"
NO_NETWORK = "a network of its own for an agent takes root"
INHERITED = ("LANG", "TZ")
KILL_S = 2.0
"""Seconds until a process that survives SIGKILL counts as stuck in the kernel."""
REMOVE_AGAIN_S = 0.1
"""The kernel (6.18) may hold a control group a moment longer than its last process can be seen; then once more."""


class ProcessGroup(Protocol):
    """All processes of one agent; `Leaf` (cgroup) and `SignalGroup` (walks of /proc) are this."""

    @property
    def how(self) -> str: ...
    def pids(self) -> list[int]: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def is_frozen(self) -> bool: ...
    def is_thawed(self) -> bool: ...
    def was_asked_to_freeze(self) -> bool: ...
    def looks_frozen(self, snapshot: ProcessTable) -> bool: ...
    def usage(self, snapshot: ProcessTable) -> tuple[int, int, int, int]: ...
    def signal(self, signum: int) -> None: ...
    def kill(self) -> None: ...
    def remove(self) -> None: ...


async def look_again(attempt: int) -> None:
    """Between looks at the kernel: the first ones at once (a busy process freezes in 16 µs), then every ms.

    Not by inotify: the kernel tells changes of `cgroup.events` at most every 10 ms.
    """
    await asyncio.sleep(0 if attempt < 20 else 0.001)


async def kill_all(group: ProcessGroup, main: Identity) -> bool:
    """Kills all of an agent; whether nothing of it is left.

    Again and again: one may have forked meanwhile, and a killed process is gone only once it has had its turn.
    """
    until = time.monotonic() + KILL_S
    while _is_left(group, main):
        group.kill()
        group.thaw()
        main.send(signal.SIGKILL)
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.002)
    return True


def _is_left(group: ProcessGroup, main: Identity) -> bool:
    """The main process is looked at by itself too: as the user of the subtree it could have left its cgroup."""
    return main.is_alive() or bool(group.pids())


class RunningProcess:
    """One started agent; see `RunningAgent` for the contract."""

    why_ended = ""
    hides_homes = False

    def __init__(
        self,
        run: Run,
        group: ProcessGroup,
        spec: SandboxSpec,
        fence: Fence,
        *,
        ended_fd: int,
        child: subprocess.Popen[bytes] | None = None,
        inner: socket.socket | None = None,
        address: str = "",
        output: AgentOutput | None = None,
    ) -> None:
        """`child` where it is this process's own; `inner`: what listens in its network already (see `take_inner`);
        `output`: what it prints into, None where that is nothing of this helper's."""
        self.run = run
        self.address = address
        self.ended_fd = ended_fd
        self._group = group
        self._spec = spec
        self._fence = fence
        self._child = child
        self._inner = inner
        self._output = output

    def __repr__(self) -> str:
        return f"<RunningProcess {self.run.main.pid} {self._group!r}>"

    @property
    def freezer(self) -> str:
        return self._group.how

    async def freeze(self, *, deadline_s: float, give_up: Callable[[], bool]) -> None:
        try:
            await self._freeze(deadline_s, give_up)
        except BaseException:
            self.thaw_now()
            raise

    async def _freeze(self, deadline_s: float, give_up: Callable[[], bool]) -> None:
        until = time.monotonic() + deadline_s
        for attempt in count():
            if give_up():
                raise WrongState("woken, stopped or ended while it was being frozen")
            self._group.freeze()
            if self._group.is_frozen():
                return
            if time.monotonic() > until:
                raise TimedOut(f"its processes did not all stop within {deadline_s:g} s")
            await look_again(attempt)

    def thaw_now(self) -> bool:
        self._group.thaw()
        return self._group.is_thawed()

    async def thaw(self, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        for attempt in count():
            if self.thaw_now():
                return
            if time.monotonic() > until:
                raise TimedOut(f"its processes did not all continue within {deadline_s:g} s")
            await look_again(attempt)

    def is_frozen(self) -> bool:
        return self._group.is_frozen()

    def is_half_frozen(self) -> bool:
        return self._group.was_asked_to_freeze() and not self._group.is_frozen()

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        leaf = None if self.run.leaf is None else Path(self.run.leaf)
        return await pageout.page_out(self._group.pids, leaf, give_up=give_up)

    def pids(self) -> list[int]:
        return self._group.pids()

    def memory_group(self) -> Path | None:
        return self._fence.memory

    def stat(self, snapshot: ProcessTable) -> Stat:
        cpu_us, rss_bytes, processes, swap_bytes = self._group.usage(snapshot)
        return Stat(
            state="frozen" if self._group.looks_frozen(snapshot) else "running",
            pid=self.run.main.pid,
            cpu_us=cpu_us,
            rss_bytes=rss_bytes,
            processes=processes,
            swap_bytes=swap_bytes,
            freezer=self.freezer,
            address=self.address,
            limits=self._fence.lacking,
        )

    async def stop(self, *, grace_s: float) -> bool:
        self.thaw_now()
        self._group.signal(signal.SIGTERM)
        await wait_until_over(lambda: not _is_left(self._group, self.run.main), grace_s)
        return await self.kill()

    async def kill(self) -> bool:
        return await kill_all(self._group, self.run.main)

    def take_inner(self) -> socket.socket | None:
        """See `BringsInner`. Once: from then on it is the caller's."""
        taken, self._inner = self._inner, None
        return taken

    async def connect(self) -> socket.socket:
        if not self.address or self._spec.port is None:
            raise NotSupported("it has no port that only the helper gets to")
        return await to_port(self.ended_fd, self._spec.port)

    async def enter(self, program: EnteredProgram) -> Entered:
        """Enters the agent's session of namespaces and its control group; see `Enterable`."""
        channels = make_channels(program.terminal, program.spec.uid)
        inner = None if self.run.leaf is None else Leaf(Path(self.run.leaf, GROUP + program.run))
        try:
            if inner is not None:
                inner.make()
            child = self._spawn_inside(program, channels, inner)
        except BaseException:
            if inner is not None:
                inner.remove()
            channels.close()
            raise
        channels.close_program()
        main = identify(child.pid)
        assert main is not None, "a child that was not waited for is at least a zombie"
        group = SignalGroup(main, uid=None, mark=program.run_mark) if inner is None else inner
        return EnteredProcess(child, group, channels, pidfd=os.pidfd_open(child.pid))

    def _has_own_network(self) -> bool:
        """Looks, and never guesses: else a program may get into the host's. Raises WrongState where the agent ended."""
        if os.geteuid() != 0:
            return False  # nobody but root gives one
        try:
            return os.stat(f"/proc/{self.run.main.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
        except OSError:
            raise WrongState(f"agent {self._spec.name} has ended") from None

    def _spawn_inside(self, program: EnteredProgram, channels: Channels, inner: Leaf | None) -> subprocess.Popen[bytes]:
        spec, (stdin_fd, stdout_fd, stderr_fd) = program.spec, channels.program
        return spawn(
            spec.command,
            env=environment_inside(program),
            cwd=spec.home,
            uid=spec.uid,
            gid=spec.gid,
            stdin_fd=stdin_fd,
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
            is_terminal=program.terminal is not None,
            cgroup_dir=inner.path if inner else None,
            limit_dirs=self._fence.dirs,
            files=spec.limits.files,
            network_fd=self.ended_fd if self._has_own_network() else None,
            pdeathsig=signal.SIGKILL,
            no_new_privs=True,
        )

    async def reap(self) -> int | None:
        if killed := self._fence.oom_kills():
            self.why_ended = "out of memory"
            self._tell_of_memory(killed)
        if self._output is not None:
            await self._output.finish()
        if self._child is None:
            code = reaped_here(self.ended_fd)  # a template's child, where this process is who reaps it
        else:
            returncode = self._child.poll()
            code = None if returncode is None else exit_code(returncode)
        self._tell_of_closed_paths(code)
        return code

    def _tell_of_closed_paths(self, code: int | None) -> None:
        """Its user may not read its script: that is why it has ended, where nothing else is known."""
        spec = self._spec
        self.why_ended = self.why_ended or why_unread(
            spec.command, code, spec.uid, spec.gid, hides_homes=self.hides_homes
        )

    def _tell_of_memory(self, killed: int) -> None:
        """Into the agent's log too: there its owner looks for why it ended."""
        limit = f"limits.memory_mb = {self._fence.memory_mb()}"
        log.warning("agent_out_of_memory agent=%s killed=%d %s", self._spec.name, killed, limit)
        if self._output is not None:
            self._output.say(
                f"hive: it used more memory than it may ({limit}); the kernel killed {killed} of its processes\n"
            )

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        if (inner := self.take_inner()) is not None:
            inner.close()
        if self.ended_fd >= 0:
            if self._child is None:
                reaped_here(self.ended_fd)
            os.close(self.ended_fd)
            self.ended_fd = -1
        if self._child is not None:
            # It lives on without this helper: Popen must not complain when it is collected.
            self._child.returncode = self._child.poll() or 0
        self._remove_groups()

    def _remove_groups(self) -> None:
        remove_groups(self._group, self._fence)


def remove_groups(group: ProcessGroup, fence: Fence) -> None:
    """Removes the groups without a process, now and once more in `REMOVE_AGAIN_S`.

    Those with processes stay: of an agent that goes on without this helper, or was started anew meanwhile.
    """

    def remove() -> None:
        group.remove()
        fence.remove()

    remove()
    if not group.pids():
        asyncio.get_running_loop().call_later(REMOVE_AGAIN_S, remove)


def group_of(spec: SandboxSpec, run: Run, mark: str) -> ProcessGroup:
    """All of a started agent: its cgroup, without one what carries its uid or its `mark`.

    A jailer clears the environment, mark and all: then its uid is what tells.
    """
    return SignalGroup(run.main, uid=spec.uid, mark=mark) if run.leaf is None else Leaf(Path(run.leaf))


def environment_of(spec: SandboxSpec, mark: str) -> dict[str, str]:
    """All that its program is started with; nothing else of this process's environment is the agent's."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    name, _, value = mark.partition("=")
    return {"PATH": PROGRAM_PATH, **inherited, "HOME": spec.home, **spec.env, name: value}


def environment_inside(program: EnteredProgram) -> dict[str, str]:
    """The environment of the agent, and the mark that tells this program from it."""
    name, _, value = program.run_mark.partition("=")
    terminal = {} if program.terminal is None else {"TERM": program.terminal.kind}
    return {**environment_of(program.spec, program.mark), **terminal, name: value}


def rules_of(spec: SandboxSpec) -> FilterRules:
    """The networks of an agent that names some: those, and on the loopback Hive and the agent's callers."""
    return FilterRules(tuple(spec.egress or ()), hive_port=spec.proxy_port, own_port=spec.port)


def check_user(spec: SandboxSpec) -> None:
    """Raises NotPermitted for a uid that is root's or Hive's own, or that only root may give. None is as this user."""
    if spec.uid is None:
        return
    if spec.uid <= 0 or spec.gid == 0 or spec.uid == os.geteuid():
        raise NotPermitted(f"an agent runs as a user of its own, never as uid {spec.uid}, gid {spec.gid}")
    if os.geteuid() != 0:
        raise NotPermitted("only root can run agents as other users")


async def make_home(spec: SandboxSpec) -> bool:
    """`home.make_home`, off the loop: a disk takes its time, and a file to copy may be anything."""
    return await asyncio.to_thread(home.make_home, Path(spec.home), uid=spec.uid, gid=spec.gid, files=spec.files)


async def make_network() -> netns.Private:
    """`netns.make`, off the loop: while others are taken down the kernel lets it wait (seen: 40 ms)."""
    return await asyncio.to_thread(netns.make, INNER_PORT)


def _address_of(agent: str, spec: SandboxSpec) -> str:
    return dialled(agent) if spec.port is not None and spec.egress == [] else ""


class ProcessRuntime:
    """See `Runtime` for the contract."""

    def __init__(
        self, paths: Paths, *, subtree: Subtree | None, log_max_bytes: int, pipes: LogPipes | None = None
    ) -> None:
        """`subtree` None: agents are frozen by signals. `pipes`: shared with other runtimes of this helper."""
        self._paths = paths
        self._pipes = pipes or log_pipes_of(paths, log_max_bytes)
        self._subtree = subtree
        self._fences = Fences(paths.state, subtree)
        self.templates = TemplateTable(ProcessTemplates(subtree, self._fences))
        self._log_max_bytes = log_max_bytes

    async def capabilities(self) -> RuntimeCapabilities:
        top = None if self._subtree is None else self._subtree.path
        return RuntimeCapabilities(
            why_not_page_out=pageout.why_not(top),
            why_not_egress=self._why_not_egress(),
            limits=self.limits,
        )

    def _why_not_egress(self) -> str:
        if os.geteuid() != 0:
            return NO_NETWORK
        return NO_LISTS if self._subtree is None else packet_filter.why_not()

    @property
    def limits(self) -> str:
        """The limits that are not enforced here, in words; empty where all are."""
        return self._fences.lacking()

    def place(self, agent: str, spec: SandboxSpec) -> SocketPlace:  # noqa: ARG002
        return SocketPlace(self._paths.agent_socket(agent))

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        self._check(agent, spec)
        return await make_home(spec)

    def _check(self, agent: str, spec: SandboxSpec) -> None:
        if not spec.command or not all(spec.command[:1]):
            raise BadRequest("the command is empty")
        home.check_places(agent, spec, self._paths)
        self._check_network(spec)
        check_user(spec)

    def _check_network(self, spec: SandboxSpec) -> None:
        """`egress = []` is a network of its own, where Hive alone is reached; a list is a filter in the host's."""
        if spec.egress is None:
            return
        if os.geteuid() != 0:
            raise NotSupported(f"egress: {NO_NETWORK}", hint="run Hive as root")
        if not spec.egress:
            return
        if why_not := self._why_not_egress():
            raise NotSupported(f"egress: {why_not}", hint="egress = [] reaches Hive and nothing else")
        packet_filter.check(rules_of(spec))

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> RunningAgent:
        self._check_network(spec)  # it may be another helper's by now, on another host
        if spec.template is None:
            return await self._start_program(agent, spec, mark)
        try:
            return await self._fork(agent, spec, spec.template, mark)
        except (HiveError, OSError) as error:
            why = str(error)
        log.warning("template_not_used agent=%s template=%s why=%r", spec.name, spec.template.name, why)
        plain = msgspec.structs.replace(spec, command=exec_of(spec.command, spec.template.python))
        return await self._start_program(agent, plain, mark, note=why)

    async def _start_program(self, agent: str, spec: SandboxSpec, mark: str, *, note: str = "") -> RunningAgent:
        """`note`: why it is no fork of its template."""
        leaf = self._subtree.leaf(agent) if self._subtree else None
        if leaf is not None:
            await leaf.let_go()
        network = await make_network() if spec.egress == [] else None
        # No await from here to the spawn: `close` of an earlier start may yet remove a group that is empty.
        with contextlib.ExitStack() as unused, contextlib.ExitStack() as made:
            if network is not None:
                unused.callback(os.close, network.fd)
                made.callback(network.sock.close)
            output = self._pipes.make(agent)
            made.callback(output.remove)
            if note:
                output.say(said_of(spec, note) + "\n")
            log_fd = output.writing_end()
            unused.callback(os.close, log_fd)
            if leaf is not None:
                leaf.make()
                made.callback(leaf.remove)
                if spec.egress:
                    packet_filter.put_on(leaf.path, rules_of(spec))
            fence = self._fences.make(agent, spec.limits, leaf)
            made.callback(fence.remove)
            child = self._spawn(spec, mark, log_fd, leaf, fence, network)
            made.pop_all()
        main = identify(child.pid)
        assert main is not None, "a child that was not waited for is at least a zombie"
        run = Run(main=main, leaf=str(leaf.path) if leaf else None, since=time.time(), template_note=note)
        return RunningProcess(
            run,
            group_of(spec, run, mark),
            spec,
            fence,
            ended_fd=os.pidfd_open(child.pid),
            child=child,
            inner=network.sock if network else None,
            address=_address_of(agent, spec),
            output=output,
        )

    async def _fork(self, agent: str, spec: SandboxSpec, template: TemplateSpec, mark: str) -> RunningAgent:
        """Starts it as a child of its template. Raises HiveError or OSError where it has to be an ordinary program."""
        env = environment_of(spec, mark)
        if why := why_not_forked(spec, env, environment_of_template(template), is_root=os.geteuid() == 0):
            raise NotSupported(why)
        ground = process_fork.ForkGround(self.templates, self._pipes, self._subtree, self._fences)
        forked = await process_fork.fork(agent, spec, env, ground)
        return RunningProcess(
            forked.run,
            group_of(spec, forked.run, mark),
            spec,
            forked.fence,
            ended_fd=forked.ended_fd,
            inner=forked.inner,
            address=_address_of(agent, spec),
            output=forked.output,
        )

    def _spawn(
        self,
        spec: SandboxSpec,
        mark: str,
        log_fd: int,
        leaf: Leaf | None,
        fence: Fence,
        network: netns.Private | None,
    ) -> subprocess.Popen[bytes]:
        return spawn(
            spec.command,
            env=environment_of(spec, mark),
            cwd=spec.home,
            uid=spec.uid,
            gid=spec.gid,
            stdout_fd=log_fd,
            cgroup_dir=leaf.path if leaf else None,
            limit_dirs=fence.dirs,
            files=spec.limits.files,
            network_fd=network.fd if network else None,
            no_new_privs=True,
        )

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:
        fd = run.main.open()
        if fd is None:
            return None
        fence = self._fences.find(agent, spec.limits, Leaf(Path(run.leaf)) if run.leaf else None)
        if run.leaf is not None:
            await kill_groups(Path(run.leaf))
        return RunningProcess(
            run,
            group_of(spec, run, mark),
            spec,
            fence,
            ended_fd=fd,
            address=_address_of(agent, spec),
            output=self._pipes.adopt(agent),
        )

    async def find(self, agent: str, spec: SandboxSpec, snapshot: ProcessTable, *, mark: str) -> RunningAgent | None:
        leaf = self._subtree.leaf(agent) if self._subtree else None
        leaders = [stat for stat in snapshot.with_environment(mark) if stat.pid == stat.session]
        if not leaders and spec.template is not None and leaf is not None:
            leaders = process_fork.leading(leaf.pids(), snapshot, mark)
        if not leaders:
            return None
        main = Identity.of(leaders[0])
        in_leaf = leaf is not None and main.pid in leaf.pids()
        of = process_fork.forked_from(spec, main.pid)
        run = Run(main=main, leaf=str(leaf.path) if leaf and in_leaf else None, since=time.time(), template=of)
        return await self.adopt(agent, spec, run, mark=mark)

    async def sweep(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> None:
        if run.main.is_of_this_boot():
            await kill_all(group_of(spec, run, mark), run.main)
            self._fences.find(agent, spec.limits, None).remove()
        await self._pipes.sweep(agent)

    async def thaw_strays(self, known: set[str]) -> list[str]:
        leaves = [leaf for leaf in self._subtree.leaves() if "." not in leaf.path.name] if self._subtree else []
        strays = [leaf for leaf in leaves if leaf.path.name not in known]  # with a dot: of a model's server
        for leaf in strays:
            leaf.thaw()
            leaf.remove()
        return [leaf.path.name for leaf in strays if leaf.path.exists()]

    async def discard(self, agent: str, spec: SandboxSpec) -> None:
        self._pipes.remove(agent)
        await asyncio.to_thread(home.discard, Path(spec.home), Path(spec.log))

    def leave(self) -> None:
        """Removes what is left of Hive's control groups; those of running agents stay."""
        self._fences.remove()
        if self._subtree is not None:
            self._subtree.remove()

    def trim_log(self, spec: SandboxSpec) -> None:
        trim_if_its_own(self._pipes, Path(spec.log), self._log_max_bytes)


def log_pipes_of(paths: Paths, limit_bytes: int) -> LogPipes:
    return LogPipes(paths.log_pipes, paths.log("any").parent, limit_bytes=limit_bytes)


def trim_if_its_own(pipes: LogPipes, log_path: Path, limit_bytes: int) -> None:
    """Trims the log of an agent that an older Hive started, with a log of its own: no other process cuts it."""
    if not pipes.has(log_path.stem):
        home.trim_log(log_path, limit_bytes)
