"""The only place that spawns, and what /proc says about processes.

A process is known by pid, start time and boot id: a pid alone may belong to another process by now.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted
from hive.host import netns
from hive.host.parent import die_with_parent, forbid_new_privileges

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_US = 1_000_000 // CLOCK_TICKS
STOPPED = frozenset("TtZX")
"""State letters of a task that does not run: stopped, traced, zombie, dead."""

_DESCRIPTORS_AT_START = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as it may; what it spawns gets the limit it was born with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allowed_files(files: int) -> int:
    """`files`, or the hard limit this process was born with where that is less."""
    hard = _DESCRIPTORS_AT_START[1]
    return files if hard == resource.RLIM_INFINITY else min(files, hard)


def limits_of_spawned(files: int | None) -> list[tuple[int, int, int]]:
    """The limits that `spawn` gives, as (RLIMIT_…, soft, hard); `files` as there."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found = {getattr(resource, name): resource.getrlimit(getattr(resource, name)) for name in names}
    found[resource.RLIMIT_NOFILE] = (
        _DESCRIPTORS_AT_START if files is None else (allowed_files(files), allowed_files(files))
    )
    return [(kind, *limits) for kind, limits in sorted(found.items())]


def differing_limits(pid: int, files: int | None) -> list[str]:
    """The limits in which a process differs from what `spawn` would have given it, by /proc/PID/limits."""
    wanted, found = _limits("self"), _limits(pid)
    soft, hard = _DESCRIPTORS_AT_START if files is None else (allowed_files(files), allowed_files(files))
    wanted["Max open files"] = tuple(
        "unlimited" if each == resource.RLIM_INFINITY else str(each) for each in (soft, hard)
    )
    return [name for name, limits in wanted.items() if found.get(name) != limits]


def _limits(pid: int | str) -> dict[str, tuple[str, ...]]:
    lines = _read_proc(f"/proc/{pid}/limits").decode().splitlines()[1:]
    return {line[:25].rstrip(): tuple(line[25:].split()[:2]) for line in lines}


# --- spawning ----------------------------------------------------------------------------------------------------


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    uid: int | None = None,
    gid: int | None = None,
    groups: Sequence[int] = (),
    stdin_fd: int | None = None,
    stdout_fd: int | None = None,
    stderr_fd: int | None = None,
    session: bool = True,
    is_terminal: bool = False,
    cgroup_dir: Path | None = None,
    limit_dirs: Sequence[Path] = (),
    files: int | None = None,
    network_fd: int | None = None,
    pdeathsig: int | None = None,
    keep_fds: Sequence[int] = (),
    no_new_privs: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts `command` (never through a shell) with exactly `env`; returns once the new program runs.

    stdin is `stdin_fd`, where None /dev/null; stdout and stderr go to `stdout_fd`, where None to this process's own;
    stderr to `stderr_fd` where there is one. `is_terminal`: `stdin_fd` is the terminal of its new session. `uid` None:
    as this user; else with the group `gid` and `groups` besides. The caller reaps it. The child enters `cgroup_dir`,
    each of `limit_dirs` (v1 hierarchies) and the network namespace `network_fd` while it may still do so, then gives up
    its groups, gid, uid, and asks for `pdeathsig` last, because changing the uid clears that. A frozen `cgroup_dir`
    would block the caller: thaw it first. `files`: how many it may have open, never more than the hard limit Hive was
    born with.

    Raises NotFound (no such program or directory), NotPermitted (not executable, or the child may not become what
    was asked), BadRequest (no command, a NUL in it, arguments too long), HiveError.
    """
    if not command:
        raise BadRequest("the command is empty")
    why_read, why_write = os.pipe()
    parent = os.getpid()
    cgroups = [*limit_dirs] if cgroup_dir is None else [cgroup_dir, *limit_dirs]
    descriptors = _DESCRIPTORS_AT_START if files is None else (allowed_files(files), allowed_files(files))
    becomes_other = any(each is not None for each in (network_fd, uid, pdeathsig)) or is_terminal or no_new_privs
    becomes_other = becomes_other or bool(cgroups) or descriptors != resource.getrlimit(resource.RLIMIT_NOFILE)

    def become() -> None:
        step = ""
        try:
            for directory in cgroups:
                step = f"enter {directory}"
                write_control(directory / "cgroup.procs", b"0")
            if network_fd is not None:
                step = "enter its network"
                netns.enter(network_fd)
            # What this process has open is often more than the child may have; nothing is opened below.
            step = "restore limits"
            resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
            if uid is not None:
                step = f"become uid {uid}"
                _become_user(uid, uid if gid is None else gid, groups)
            if is_terminal:
                step = "take its terminal"
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            step = "set process attributes"
            if no_new_privs:
                forbid_new_privileges()
            if pdeathsig is not None:
                die_with_parent(pdeathsig, parent=parent)
        except OSError as error:
            os.write(why_write, f"could not {step}: {error.strerror}".encode())
            raise

    try:
        return subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL if stdin_fd is None else stdin_fd,
            stdout=stdout_fd,
            stderr=stderr_fd if stderr_fd is not None or stdout_fd is None else subprocess.STDOUT,
            start_new_session=session,
            pass_fds=tuple(keep_fds),
            # posix_spawn cannot enter a cgroup; `become` makes system calls only. Without it there is a vfork, which
            # costs the same however large this process is: 1 ms, and 50 ms with 360 MB.
            preexec_fn=become if becomes_other else None,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.close(why_write)
        why_write = -1
        why = os.read(why_read, 4096).decode()
        raise _translate(command[0], env.get("PATH", os.defpath), error, why, uid) from error
    finally:
        os.close(why_read)
        if why_write >= 0:
            os.close(why_write)


class ForkedChild:
    """A child of `fork`: what its parent needs of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def __repr__(self) -> str:
        return f"<ForkedChild {self.pid}>"

    def wait(self) -> int:
        """Returns once it has ended: its code as `Popen` has it."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL. Until `wait` took its end, the pid is nobody else's."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(body: Callable[[], int], *, stdout_fd: int, keep_fds: Sequence[int]) -> ForkedChild:
    """Does `body` in a child with this program, in a session of its own; what it returns is the child's exit code.

    For a process with a single thread and no event loop. The child has `stdout_fd` as stdout and stderr, /dev/null as
    stdin, `keep_fds`, and nothing else of what is open here; signals do there what they do by default. It costs 3 ms,
    where a Python that starts anew costs 100. Raises OSError.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return ForkedChild(pid)
    code = os.EX_SOFTWARE
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout_fd, 1)
        os.dup2(stdout_fd, 2)
        last = 2
        for fd in (*sorted(keep_fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(last + 1, fd)
            last = fd
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = body()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _become_user(uid: int, gid: int, groups: Sequence[int]) -> None:
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def _translate(program: str, path: str, error: Exception, why: str, uid: int | None) -> HiveError:
    if why:
        return NotPermitted(f"cannot start {program}: {why}")
    match error:
        case FileNotFoundError() if error.filename not in (None, program):
            return NotFound(f"cannot start {program}: no directory {error.filename}")
        case FileNotFoundError():
            return NotFound(f"no such command: {program}", hint="or the interpreter its first line names is missing")
        case PermissionError() if "/" not in program and shutil.which(program, path=path) is None:
            # A directory of PATH the child may not enter hides that the program is in no other one either.
            return NotFound(f"no such command: {program}")
        case PermissionError() if uid is not None:
            return NotPermitted(
                f"uid {uid} may not execute {error.filename or program}",
                hint="it runs as that user: the program and every directory above it have to let others in (o+x)",
            )
        case PermissionError():
            return NotPermitted(f"not executable: {error.filename or program}")
        case OSError(errno=errno.ENOEXEC):
            return NotPermitted(f"not a program: {program}", hint="A script needs a first line such as #!/bin/sh.")
        case ValueError() | OSError(errno=errno.E2BIG):
            return BadRequest(f"cannot start {program!r}: {error}")
        case _:
            return HiveError(f"cannot start {program}: {error}")


def replace(command: Sequence[str], *, env: Mapping[str, str]) -> NoReturn:
    """This process goes on as `command`, with its pid, its terminal and exactly `env`. Raises OSError."""
    os.execve(command[0], list(command), dict(env))


def in_foreground(command: Sequence[str], *, stdout_fd: int | None = None) -> int:
    """Runs a program of the person's own at the terminal, with the environment of this process, and waits for its end.

    Returns its exit code as a shell counts. Raises OSError. Blocks: not for an event loop.
    """
    return exit_code(subprocess.run(list(command), stdout=stdout_fd, check=False).returncode)


def end_now(code: int) -> NoReturn:
    """Ends this process without clearing away what the kernel clears away: Python's own end takes 30 ms and more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def wait_until_over(is_over: Callable[[], bool], limit_s: float) -> None:
    """Returns once `is_over()`, or after `limit_s`. Looks often at first: most agents end within milliseconds."""
    import asyncio  # 10 MB, which a warden beside each inference server does without

    until, wait_s = time.monotonic() + limit_s, 0.002
    while not is_over() and (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(min(wait_s, left_s))
        wait_s = min(wait_s * 1.5, 0.1)


def exit_code(returncode: int) -> int:
    """A `Popen.returncode` as a shell counts: 128 + signal for a process that a signal ended.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def write_control(path: Path, data: bytes) -> None:
    """One write(2) to a file of the kernel that exists already. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


# --- one process -------------------------------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """`/proc/<pid>/stat`. Times in clock ticks (`TICK_US` µs each), `start_ticks` since boot."""

    pid: int
    state: str
    parent: int
    session: int
    cpu_ticks: int
    waited_cpu_ticks: int
    """Of its children that ended and were waited for."""
    threads: int
    start_ticks: int
    rss_bytes: int

    @property
    def alive(self) -> bool:
        """Whether it can still run: a zombie with threads left (its first thread ended) can."""
        return self.state not in "ZX" or self.threads > 1


def parse_stat(pid: int, content: bytes) -> ProcessStat:
    """Reads the line by its *last* `)`: a program may put anything, also `) R 1 1`, into its name.

    >>> line = b"7 (a) R 9) S 1 7 7 0 -1 0 0 0 0 0 11 22 3 4 20 0 1 0 500 4096 2 0"
    >>> parse_stat(7, line).start_ticks, parse_stat(7, line).state, parse_stat(7, line).cpu_ticks
    (500, 'S', 33)
    """
    fields = content[content.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        waited_cpu_ticks=int(fields[13]) + int(fields[14]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def read_stat(pid: int) -> ProcessStat | None:
    """The content of /proc about `pid` now; None where there is no such process."""
    content = _read_proc(f"/proc/{pid}/stat")
    return parse_stat(pid, content) if content else None


def program_of(pid: int) -> str:
    """The name a process shows: of its program, or what it calls itself; empty where it has ended.

    >>> program_of(2**22 + 1)
    ''
    """
    return _read_proc(f"/proc/{pid}/comm").decode(errors="replace").strip()


def words_of(pid: int) -> tuple[str, ...]:
    """The command line a process shows; empty where it has ended, or shows none.

    >>> words_of(2**22 + 1)
    ()
    """
    content = _read_proc(f"/proc/{pid}/cmdline").rstrip(b"\0")
    return tuple(content.decode(errors="replace").split("\0")) if content else ()


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid` now. For a look that is repeated: a `ProcessTable` reads all of /proc.

    Only where `has_children_listed()`.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for thread in threads for word in _read_proc(f"/proc/{pid}/task/{thread}/children").split()]


@cache
def has_children_listed() -> bool:
    """Whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def _read_proc(path: str) -> bytes:
    """The content, empty where the process is gone or may not be looked at."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 262144)
    except OSError:
        return b""
    finally:
        os.close(fd)


@cache
def boot_id() -> str:
    """Names this run of the machine: of the kernel, `+`, and when pid 1 began, in ticks.

    A container (nspawn, LXC, Proxmox) that is rebooted has the kernel of its host still, and another pid 1. Where pid 1
    cannot be looked at (hidepid=), the kernel alone is named.
    """
    first = read_stat(1)
    return kernel_boot_id() if first is None else f"{kernel_boot_id()}+{first.start_ticks}"


def kernel_boot_id() -> str:
    """Names this run of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_same_boot(one: str, other: str) -> bool:
    """Whether two names of `boot_id` are of one run. What an earlier Hive noted names the kernel alone.

    >>> [is_same_boot("k+7", other) for other in ("k+7", "k", "k+9000", "other+7")]
    [True, True, False, False]
    """
    kernel, _, began = one.partition("+")
    other_kernel, _, other_began = other.partition("+")
    return kernel == other_kernel and (began == other_began or not (began and other_began))


class Identity(msgspec.Struct, frozen=True):
    """Exactly one process: pids are used again, a pid with its start time and boot id is not."""

    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of(cls, stat: ProcessStat) -> Identity:
        return cls(stat.pid, stat.start_ticks, boot_id())

    def stat(self) -> ProcessStat | None:
        """Its stat, also as a zombie; None where it is gone, even if another process has its pid now."""
        if not self.is_of_this_boot():
            return None
        stat = read_stat(self.pid)
        return stat if stat is not None and stat.start_ticks == self.start_ticks else None

    def is_of_this_boot(self) -> bool:
        """Whether it was started in this run of the machine; else it is gone, and so is all it left behind."""
        return is_same_boot(self.boot, boot_id())

    def is_alive(self) -> bool:
        """Whether it can still run; see `ProcessStat.alive`."""
        stat = self.stat()
        return stat is not None and stat.alive

    def open(self) -> int | None:
        """A pidfd of exactly this process (the caller closes it), None where it is gone.

        The check comes after the open: what the pidfd holds cannot be replaced any more.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return None
        if self.stat() is None:
            os.close(fd)
            return None
        return fd

    def send(self, signum: int) -> bool:
        """Signals exactly this process. False where it is gone or this user may not."""
        fd = self.open()
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, signum)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(fd)
        return True


def identify(pid: int) -> Identity | None:
    """The identity of the process with this pid now."""
    stat = read_stat(pid)
    return None if stat is None else Identity.of(stat)


def is_stopped(pid: int) -> bool:
    """Whether no thread of `pid` runs: each is stopped, traced or dead (a process that is gone does not run).

    Threads are looked at one by one: the state of the process is that of its first thread only. A thread that waits
    in the kernel (state D) with SIGSTOP pending counts as stopped: it runs no more of its program. A shell is in
    that state when its child was stopped between vfork and exec, and stays there.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    for thread in threads:
        content = _read_proc(f"/proc/{pid}/task/{thread}/stat")
        state = parse_stat(pid, content).state if content else "X"
        if state not in STOPPED and not (state == "D" and _has_pending_stop(pid, thread)):
            return False
    return True


def _has_pending_stop(pid: int, thread: str) -> bool:
    status = _read_proc(f"/proc/{pid}/task/{thread}/status").splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    return any(mask >> (signal.SIGSTOP - 1) & 1 for mask in masks)


def own_umask() -> int:
    """The umask of this process, which a child has too. (umask(2) can only be asked by changing it.)"""
    lines = _read_proc("/proc/self/status").splitlines()
    return next((int(line.split()[1], 8) for line in lines if line.startswith(b"Umask:")), 0o022)


def ancestors(pid: int) -> list[int]:
    """The process, its parent, and so on; at most up to process 1."""
    found = [pid]
    while (stat := read_stat(found[-1])) is not None and stat.parent > 0:
        found.append(stat.parent)
    return found


def reaped_here(pidfd: int) -> int | None:
    """The exit code as a shell counts of a process that has ended and whose parent is this one; else None.

    None too for a descriptor that is no pidfd: of a process that was over before it could be opened.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except OSError as error:
        if error.errno in (errno.ECHILD, errno.EBADF, errno.EINVAL):
            return None
        raise
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def has_environment(pid: int, entry: str) -> bool:
    """Whether `pid` was started with `NAME=value` in its environment (False where that may not be read)."""
    return entry.encode() in _environment(pid)


def _environment(pid: int) -> frozenset[bytes]:
    return frozenset(_read_proc(f"/proc/{pid}/environ").split(b"\0"))


def real_uid(pid: int) -> int | None:
    """The real uid of the process, None where it is gone.

    From `status`: the owner of /proc/<pid> is root where a process forbids core dumps.
    """
    for line in _read_proc(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


# --- all processes -----------------------------------------------------------------------------------------------


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


class ProcessTable:
    """One walk of /proc, taken when first looked at, with indexes over it.

    A walk is not one moment: a child born during it of a parent read later may be missing.
    """

    @cached_property
    def processes(self) -> dict[int, ProcessStat]:
        return {pid: stat for pid in _pids() if (stat := read_stat(pid)) is not None}

    @cached_property
    def children(self) -> dict[int, list[int]]:
        index: dict[int, list[int]] = {}
        for stat in self.processes.values():
            index.setdefault(stat.parent, []).append(stat.pid)
        return index

    @cached_property
    def sessions(self) -> dict[int, list[int]]:
        index: dict[int, list[int]] = {}
        for stat in self.processes.values():
            index.setdefault(stat.session, []).append(stat.pid)
        return index

    @cached_property
    def environments(self) -> dict[int, frozenset[bytes]]:
        """`NAME=value` entries each process was started with, empty where that may not be read."""
        return {pid: _environment(pid) for pid in self.processes}

    def with_environment(self, entry: str) -> list[ProcessStat]:
        """The living processes started with `NAME=value` in their environment, oldest first."""
        wanted = entry.encode()
        marked = [self.processes[pid] for pid, entries in self.environments.items() if wanted in entries]
        return sorted((stat for stat in marked if stat.alive), key=lambda stat: stat.start_ticks)

    def with_descendants(self, pids: set[int]) -> set[int]:
        """`pids` and everything below them."""
        found = set(pids)
        fresh = list(pids)
        while fresh:
            below = [child for child in self.children.get(fresh.pop(), ()) if child not in found]
            found.update(below)
            fresh.extend(below)
        return found
