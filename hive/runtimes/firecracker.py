"""The `firecracker` runtime: an agent is a virtual machine of its own, as root in a jail under a uid of its own.

A guest reaches Hive at CID 2, port 11434, which its VMM connects to a socket in its jail; a caller of the guest asks
its VMM to connect (`Started.address`). It gets no environment from here: how it finds the model is in its image, see
conf/guest/.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

from hive.domain import PROGRAM_PATH, FirecrackerSpec
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
from hive.host.cgroup import Leaf, Subtree
from hive.host.firecracker import ask_version, why_not_pause, why_too_old
from hive.host.limits import Fence, Fences
from hive.host.process import Identity, ProcessTable, identify, spawn
from hive.link.helper import dialled
from hive.link.server import PATH_MAX_BYTES
from hive.link.specs import RuntimeCapabilities, SandboxSpec
from hive.runtimes import home, pageout, vmm
from hive.runtimes.log_pipes import AgentOutput, LogPipes
from hive.runtimes.machine import ENDS_S, RunningMachine
from hive.runtimes.machine_dir import DISK, INITRD, KERNEL, ROOTFS, MachineDir, Note, Owner, all_in, check_image
from hive.runtimes.process import check_user, group_of, kill_all, log_pipes_of, trim_if_its_own
from hive.runtimes.runtime import NO_EXEC, Run, RunningAgent, SocketPlace
from hive.runtimes.vmm import PAUSED, RUNNING, START, Vmm
from hive.settings.table import Paths, Sandbox

log = logging.getLogger("hive.sandbox")

NAME = "firecracker"
"""The name of the VMM's file: a jailer names the directory of its jails after it."""
LOG_LEVEL = "Warning"
"""Of the VMM's own lines, which go where its guest's console goes: at `Info` each look would be one, 2 MB a day."""
NO_FILTER = "what a tap device lets through is the host's firewall's to say"
UP_S = 5.0
"""From the fork to an API that answers."""


class FirecrackerRuntime:
    """See `Runtime` for the contract."""

    def __init__(
        self,
        paths: Paths,
        settings: Sandbox,
        *,
        log_max_bytes: int,
        pipes: LogPipes | None = None,
        kvm: Path = Path("/dev/kvm"),
    ) -> None:
        """Jails machines if it runs as root and a jailer is set. `pipes`: shared with other runtimes of this helper;
        `kvm`: the device this takes."""
        self._paths = paths
        self._pipes = pipes or log_pipes_of(paths, log_max_bytes)
        self._firecracker = Path(settings.firecracker)
        self._jailer = Path(settings.jailer) if settings.jailer and os.geteuid() == 0 else None
        self._chroot_base = Path(settings.chroot_base)
        self._log_max_bytes = log_max_bytes
        self._kvm = kvm
        self._groups: tuple[Subtree | None, Fences] | None = None

    # --- what there is -------------------------------------------------------------------------------------------

    def _dir(self, agent: str) -> MachineDir:
        if self._jailer is None:
            return MachineDir(self._paths.state / "vm" / agent, jailed=False)
        return MachineDir(self._chroot_base.resolve() / NAME / agent, jailed=True)

    @property
    def _state(self) -> str:
        return str(self._paths.state.resolve())

    def _cgroups(self) -> tuple[Subtree | None, Fences]:
        """Looked for when first needed: it takes a process."""
        if self._groups is None:
            subtree = Subtree.find(self._paths.state)
            self._groups = (subtree, Fences(self._paths.state, subtree))
        return self._groups

    async def capabilities(self) -> RuntimeCapabilities:
        subtree, fences = self._cgroups()
        why_not = why_not_freeze = ""
        try:
            self._check_host()
        except HiveError as error:
            why_not = error.message
        else:
            version = await asyncio.to_thread(self._ask_version)
            why_not = why_too_old(version)
            why_not_freeze = why_not_pause(version, has_vsock=True)
        return RuntimeCapabilities(
            why_not=why_not,
            why_not_freeze=why_not_freeze,
            why_not_page_out=pageout.why_not(None if subtree is None else subtree.path),
            why_not_egress=NO_FILTER,
            why_not_exec=NO_EXEC,
            limits=fences.lacking(),
        )

    def _check_host(self) -> None:
        """Raises NotFound or NotPermitted with what is missing here."""
        _check_program("Firecracker", self._firecracker, "[sandbox] firecracker says where it is")
        if self._jailer is not None:
            _check_program("jailer", self._jailer, "[sandbox] jailer says where it is; empty: without one")
            _check_base(self._chroot_base)
        if not self._kvm.exists():
            raise NotFound(f"no {self._kvm}: this host offers no hardware virtualisation")
        if not os.access(self._kvm, os.R_OK | os.W_OK):
            raise NotPermitted(f"{self._kvm} may not be opened", hint="add this user to the group kvm")

    def _ask_version(self) -> str:
        """The output of `firecracker --version`, empty where it prints nothing."""
        try:
            return ask_version(self._firecracker)
        except HiveError:
            return ""

    def place(self, agent: str, spec: SandboxSpec) -> SocketPlace:  # noqa: ARG002
        found = self._dir(agent)
        return SocketPlace(found.listener, jail=found.top)

    # --- before the first start ----------------------------------------------------------------------------------

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        found = self._dir(agent)
        machine = self._check(agent, spec, found)
        if self._jailer is not None:
            _check_base(self._chroot_base)
        found.top.parent.mkdir(mode=0o711, exist_ok=True)
        return await asyncio.to_thread(self._make, found, agent, machine, _owner(spec))

    def _check(self, agent: str, spec: SandboxSpec, found: MachineDir) -> FirecrackerSpec:
        machine = spec.firecracker
        if machine is None:
            raise BadRequest("firecracker: missing")
        if spec.command:
            raise BadRequest("command: a virtual machine runs what its image says")
        if Path(spec.log) != self._paths.log(agent):
            raise BadRequest(f"the log of {agent} must be {self._paths.log(agent)}")
        if spec.uid is None and self._jailer is not None:
            raise BadRequest("a jailed machine needs a uid of its own")
        check_user(spec)
        check_image("kernel", Path(machine.kernel))
        if machine.initrd:
            check_image("initrd", Path(machine.initrd))
        check_image("root file system", Path(machine.rootfs))
        if spec.egress is not None and machine.tap:
            raise NotSupported(
                f"egress: {NO_FILTER}",
                hint="leave out egress, or tap: without one a guest reaches Hive and nothing else",
            )
        if spec.limits.memory_mb is not None and spec.limits.memory_mb <= machine.memory_mb:
            raise BadRequest(
                f"limits: memory_mb: the guest alone has {machine.memory_mb} MiB", hint="its VMM needs some more"
            )
        if spec.port is not None and spec.uid is None and len(os.fsencode(found.vsock)) > PATH_MAX_BYTES:
            raise BadRequest(
                f"{found.vsock} has more than {PATH_MAX_BYTES} bytes", hint="use a shorter --state-dir or chroot_base"
            )
        return machine

    def _make(self, found: MachineDir, agent: str, machine: FirecrackerSpec, owner: Owner | None) -> bool:
        note = Note(state=self._state, agent=agent)
        new = found.make(note, owner)
        try:
            found.provide(KERNEL, Path(machine.kernel))
            if machine.initrd:
                found.provide(INITRD, Path(machine.initrd))
            if machine.rootfs_read_only:
                found.provide(ROOTFS, Path(machine.rootfs))
            else:
                found.provide_disk(Path(machine.rootfs), owner, note)
        except BaseException:
            if new:
                found.remove()
            raise
        return new

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> RunningAgent:
        found, machine = self._dir(agent), spec.firecracker
        assert machine is not None, "prepare checked it"
        self._check_host()
        if found.note() is None:
            raise NotFound(f"{found.top} is gone", hint="define the agent again")
        if left := found.residents(ProcessTable()):
            raise WrongState(f"processes are left in {found.root}: {left}")
        found.clear(NAME)
        said_before = _size_of(Path(spec.log))
        subtree, _ = self._cgroups()
        if subtree is not None:
            await subtree.leaf(agent).let_go()
        running, api = self._spawn(agent, spec, found, mark)
        try:
            await _until_it_answers(running, api)
            disk = found.root / (ROOTFS if machine.rootfs_read_only else DISK)
            for call in vmm.boot(
                machine,
                kernel=found.inside(found.root / KERNEL),
                initrd=found.inside(found.root / INITRD) if machine.initrd else "",
                rootfs=found.inside(disk),
                uds_path=found.inside(found.vsock),
            ):
                await api.call(call, limit_s=vmm.BOOT_S if call == START else vmm.CALL_S)
            try:
                await api.ask()
            except HiveError:
                if not await running.ends_by_itself(within_s=ENDS_S):  # a guest may end as soon as it likes
                    raise
        except BaseException as error:
            ended = isinstance(error, DependencyDown) and await running.ends_by_itself(within_s=ENDS_S)
            await running.kill()
            await running.finish_output()
            running.close()
            if ended:
                raise HiveError(f"Firecracker ended: {_last_words(Path(spec.log), said_before)}") from error
            raise
        return running

    def _spawn(self, agent: str, spec: SandboxSpec, found: MachineDir, mark: str) -> tuple[RunningMachine, Vmm]:
        subtree, fences = self._cgroups()
        leaf = subtree.leaf(agent) if subtree else None
        with contextlib.ExitStack() as unused, contextlib.ExitStack() as made:
            output = self._pipes.make(agent)
            made.callback(output.remove)
            log_fd = output.writing_end()
            unused.callback(os.close, log_fd)
            if leaf is not None:
                leaf.make()
                made.callback(leaf.remove)
            fence = fences.make(agent, spec.limits, leaf)
            made.callback(fence.remove)
            name, _, value = mark.partition("=")
            child = spawn(
                self._command(agent, spec, found),
                env={"PATH": PROGRAM_PATH, name: value},
                cwd=found.root,
                uid=None if found.jailed else spec.uid,
                gid=None if found.jailed else spec.gid,
                groups=() if found.jailed or spec.uid is None else self._kvm_groups(spec.uid),
                stdout_fd=log_fd,
                cgroup_dir=leaf.path if leaf else None,
                limit_dirs=fence.dirs,
                files=spec.limits.files,
                no_new_privs=True,
            )
            made.pop_all()
        main = identify(child.pid)
        assert main is not None, "a child that was not waited for is at least a zombie"
        run = Run(main=main, leaf=None if leaf is None else str(leaf.path), since=time.time(), handle=str(found.top))
        ended_fd = os.pidfd_open(child.pid)
        return self._running(spec, run, mark, fence, ended_fd=ended_fd, output=output, child=child)

    def _kvm_groups(self, uid: int) -> tuple[int, ...]:
        """The device's group, where it is that group's to open and not all users': a VMM without a jailer needs it.

        A jailer makes a device node of the machine's own instead. Raises NotPermitted.
        """
        found = self._kvm.stat()
        if found.st_mode & 0o006 == 0o006:
            return ()
        if found.st_mode & 0o060 == 0o060 and found.st_gid != 0:
            return (found.st_gid,)
        raise NotPermitted(
            f"{self._kvm} may not be opened by uid {uid}",
            hint=f"give it to a group: chgrp kvm {self._kvm} && chmod g+rw {self._kvm}; or use a jailer",
        )

    def _command(self, agent: str, spec: SandboxSpec, found: MachineDir) -> list[str]:
        its_own = ["--api-sock", found.inside(found.api), "--level", LOG_LEVEL]
        if self._jailer is None:
            return [str(self._firecracker), "--id", agent, *its_own]
        uid, gid = _owner(spec) or (0, 0)
        assert uid > 0, "prepare checked it"
        files = [] if spec.limits.files is None else ["--resource-limit", f"no-file={spec.limits.files}"]
        return [
            *(str(self._jailer), "--id", agent, "--exec-file", str(self._named_firecracker())),
            *("--uid", str(uid), "--gid", str(gid), "--chroot-base-dir", str(self._chroot_base.resolve())),
            *files,
            *("--", *its_own),
        ]

    def _named_firecracker(self) -> Path:
        """The VMM under the name the jails are found by; a copy where its file has another (`firecracker-v1.15.1`)."""
        program = self._firecracker.resolve()
        if program.name == NAME:
            return program
        copy, beside = self._paths.state / "bin" / NAME, self._paths.state / "bin" / f".{NAME}"
        wanted = program.stat()
        found = copy.stat() if copy.exists() else None
        if found is None or (found.st_size, found.st_mtime_ns) != (wanted.st_size, wanted.st_mtime_ns):
            copy.parent.mkdir(mode=0o711, exist_ok=True)
            shutil.copy2(program, beside)
            beside.replace(copy)
        return copy

    def _running(
        self,
        spec: SandboxSpec,
        run: Run,
        mark: str,
        fence: Fence,
        *,
        ended_fd: int,
        output: AgentOutput | None,
        child: subprocess.Popen[bytes] | None = None,
    ) -> tuple[RunningMachine, Vmm]:
        found = MachineDir(Path(run.handle), jailed=self._jailer is not None)
        api = Vmm(found.api, pid=run.main.pid)
        address = _address_of(found, spec)
        group = group_of(spec, run, mark)
        running = RunningMachine(
            run, api, group, fence, address=address, place=found, ended_fd=ended_fd, output=output, child=child
        )
        return running, api

    # --- across helpers ------------------------------------------------------------------------------------------

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:
        running = self._adopt(agent, spec, run, mark)
        if running is not None:
            await running.learn()
        return running

    def _adopt(self, agent: str, spec: SandboxSpec, run: Run, mark: str) -> RunningMachine | None:
        if (fd := run.main.open()) is None:
            return None
        _, fences = self._cgroups()
        fence = fences.find(agent, spec.limits, None if run.leaf is None else Leaf(Path(run.leaf)))
        return self._running(spec, run, mark, fence, ended_fd=fd, output=self._pipes.adopt(agent))[0]

    async def find(self, agent: str, spec: SandboxSpec, snapshot: ProcessTable, *, mark: str) -> RunningAgent | None:
        """Kills a machine that does not say that it was booted: no caller was told that it had been started."""
        found = self._dir(agent)
        if found.jailed:
            candidates = [snapshot.processes[pid] for pid in found.residents(snapshot)]
        else:
            candidates = snapshot.with_environment(mark)
        leaders = [process for process in candidates if process.pid == process.session]
        if not leaders:
            return None
        main = Identity.of(leaders[0])
        subtree, _ = self._cgroups()
        leaf = subtree.leaf(agent) if subtree else None
        in_leaf = leaf is not None and main.pid in leaf.pids()
        run = Run(
            main=main, leaf=str(leaf.path) if leaf and in_leaf else None, since=time.time(), handle=str(found.top)
        )
        running = self._adopt(agent, spec, run, mark)
        if running is not None and await running.learn() not in (RUNNING, PAUSED):
            await running.kill()
            await running.finish_output()
            running.close()
            return None
        return running

    async def sweep(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> None:
        if run.main.is_of_this_boot():
            await kill_all(group_of(spec, run, mark), run.main)
            for pid in self._dir(agent).residents(ProcessTable()):
                if (who := identify(pid)) is not None and pid in self._dir(agent).residents(ProcessTable()):
                    who.send(signal.SIGKILL)
        await self._pipes.sweep(agent)

    async def thaw_strays(self, known: set[str]) -> list[str]:
        snapshot, thawed = ProcessTable(), []
        above = self._dir("any").top.parent
        for agent, found in all_in(above, jailed=self._jailer is not None, state=self._paths.state.resolve()):
            residents = found.residents(snapshot) if agent not in known else []
            for pid in residents[:1]:
                if await _thaw_stray(Vmm(found.api, pid=pid)):
                    thawed.append(agent)
        return thawed

    async def discard(self, agent: str, spec: SandboxSpec) -> None:
        self._pipes.remove(agent)
        await asyncio.to_thread(self._dir(agent).remove)
        await asyncio.to_thread(home.discard, Path(spec.home), Path(spec.log))

    def trim_log(self, spec: SandboxSpec) -> None:
        trim_if_its_own(self._pipes, Path(spec.log), self._log_max_bytes)


# --- steps -------------------------------------------------------------------------------------------------------


def _owner(spec: SandboxSpec) -> Owner | None:
    return None if spec.uid is None else (spec.uid, spec.uid if spec.gid is None else spec.gid)


def _address_of(found: MachineDir, spec: SandboxSpec) -> str:
    """The address at which its port is asked for: its VMM; for another user's VMM the helper, which follows no link."""
    if spec.port is None:
        return ""
    return f"vsock:{found.vsock}:{spec.port}" if spec.uid is None else dialled(found.top.name, spec.port)


def _check_program(what: str, path: Path, hint: str) -> None:
    if not path.is_file():
        raise NotFound(f"no {what} at {path}", hint=hint)
    if not os.access(path, os.X_OK):
        raise NotPermitted(f"{path} is not executable")


def _check_base(base: Path) -> None:
    """Checks the directory of the jails: a user that may write there could replace Hive's directories with his own."""
    try:
        found = base.stat()
    except OSError as error:
        what = "is missing" if error.errno == errno.ENOENT else error.strerror
        raise NotFound(f"chroot_base {base} {what}", hint=f"install -d -m 0711 -o root {base}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotPermitted(f"chroot_base {base} must be a directory of root's that nobody else may write")


async def _until_it_answers(running: RunningMachine, api: Vmm) -> None:
    """Raises DependencyDown as soon as it ended, TimedOut."""
    until = time.monotonic() + UP_S
    while True:
        try:
            await api.ask()
        except DependencyDown:
            if await running.ends_by_itself(within_s=0):
                raise
            if time.monotonic() > until:
                raise TimedOut(f"Firecracker did not answer within {UP_S:g} s") from None
            await asyncio.sleep(0.005)
        else:
            return


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _last_words(path: Path, offset: int) -> str:
    """The cause that the VMM or its jailer gave for its end: both write on what is the guest's console later.

    Firecracker's very last line only has the exit code; the cause is the `Error: …` before it (1.15.1).
    """
    if not path.exists():
        return "it said nothing"
    with path.open("rb") as file:
        file.seek(offset)
        lines = [line.strip() for line in file.read(65536).decode(errors="replace").splitlines()]
    said = [line for line in lines if line]
    causes = [line for line in said if line.startswith("Error: ")]
    return (causes or said or ["it said nothing"])[-1][:300]


async def _thaw_stray(api: Vmm) -> bool:
    """Whether it was paused and is no longer."""
    try:
        if (await api.ask()).state != PAUSED:
            return False
        await api.call(vmm.RESUME)
        return (await api.ask()).state != PAUSED
    except HiveError as error:
        log.error("stray_not_thawed vmm=%r error=%s", api, error)
        return False
