"""Templates as processes of the helper's own: under `hive up`, as root in a user namespace, else as this user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

from hive.domain import PROGRAM_PATH, Limits
from hive.errors import DependencyDown
from hive.host.cgroup import Leaf, Subtree
from hive.host.limits import Fence, Fences
from hive.host.process import Identity, identify, spawn, wait_until_over, write_control
from hive.link.specs import TemplateSpec
from hive.runtimes.template import StartOrder, has_ended
from hive.runtimes.template_fit import HOME
from hive.templates import handed_over

KILL_S = 2.0
KEPT_BYTES = 16 * 1024
"""Of what a template prints, the end."""
INHERITED = ("LANG", "TZ")


def environment_of_template(spec: TemplateSpec) -> dict[str, str]:
    """All that it is started with: no secret, no home, nothing of this process's but where it is."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {"PATH": PROGRAM_PATH, **inherited, "HOME": HOME, **spec.env}


class ProcessTemplates:
    """See `TemplatePlaces`."""

    def __init__(self, subtree: Subtree | None, fences: Fences) -> None:
        self._subtree = subtree
        self._fences = fences

    def why_not(self, spec: TemplateSpec) -> str:
        """As root only in a user namespace of its own: its packages may be anybody's code."""
        if os.geteuid() == 0 and not spec.first_uid:
            return "as root a template needs uids of its own"
        if os.geteuid() != 0 and spec.first_uid is not None:
            return "only root can run a template as other users"
        return ""

    def order(self, spec: TemplateSpec) -> StartOrder:
        is_apart = spec.first_uid is not None
        return StartOrder(
            imports=spec.imports,
            warm=spec.warm,
            script=spec.script,
            user_namespace=is_apart,
            own_network=is_apart,
            pin=spec.pin,
        )

    async def start(self, spec: TemplateSpec, control: socket.socket) -> TemplateChild:
        leaf = None
        if self._subtree is not None:
            leaf = self._subtree.leaf(f"template.{spec.name}")  # a dot is in no agent's id
            await leaf.let_go()
        with contextlib.ExitStack() as made:
            if leaf is not None:
                leaf.make()
                made.callback(leaf.remove)
            fence = self._fences.make(f"template.{spec.name}", Limits(memory_mb=spec.memory_mb), leaf)
            made.callback(fence.remove)
            out, its = os.pipe2(os.O_CLOEXEC)
            made.callback(os.close, out)
            try:
                with handed_over.opened_fork_server() as program:
                    child = spawn(
                        handed_over.command(spec.python, program, control.fileno()),
                        env=environment_of_template(spec),
                        cwd="/",
                        uid=spec.first_uid,
                        gid=spec.first_uid,
                        stdout_fd=its,
                        cgroup_dir=leaf.path if leaf else None,
                        limit_dirs=fence.dirs,
                        keep_fds=[control.fileno(), program],
                        no_new_privs=True,
                    )
            finally:
                os.close(its)
            if spec.pin:
                with contextlib.suppress(OSError):  # without the right to it the template says that it is not pinned
                    resource.prlimit(child.pid, resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
            made.pop_all()
        return TemplateChild(spec, child, leaf, fence, out)


class TemplateChild:
    """See `TemplateProcess`; one that is this helper's child."""

    def __init__(
        self, spec: TemplateSpec, child: subprocess.Popen[bytes], leaf: Leaf | None, fence: Fence, out: int
    ) -> None:
        main = identify(child.pid)
        assert main is not None, "a child that was not waited for is at least a zombie"
        self.main: Identity = main
        self.ended_fd = os.pidfd_open(child.pid)
        self.group: Path | None = None if leaf is None else leaf.path
        self._spec = spec
        self._child = child
        self._leaf = leaf
        self._fence = fence
        self._out = out
        self._printed = b""
        os.set_blocking(out, False)
        asyncio.get_running_loop().add_reader(out, self._read)

    def __repr__(self) -> str:
        return f"<TemplateChild {self._spec.name} {self.main.pid}>"

    def _read(self) -> None:
        """Reads what it prints: a full pipe would stop it. A flood costs the helper one pipe at a time."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._out, KEPT_BYTES)
            if not data:
                asyncio.get_running_loop().remove_reader(self._out)
            self._printed = (self._printed + data)[-KEPT_BYTES:]

    async def map_users(self) -> None:
        first = self._spec.first_uid
        assert first is not None, "asked for with a user namespace only"
        line = f"{first} {first} {self._spec.uids}".encode()
        try:
            for name in ("uid_map", "gid_map"):
                write_control(Path(f"/proc/{self.main.pid}/{name}"), line)
        except OSError as error:
            raise DependencyDown(f"its users cannot be mapped: {error.strerror}") from error

    def last_words(self) -> str:
        if self._out >= 0:
            self._read()
        return self._printed.decode(errors="replace").strip().rpartition("\n")[2]

    async def kill(self) -> bool:
        """A child that was not released is of it yet; those that were have gone to groups of their own."""
        if self._leaf is not None:
            with contextlib.suppress(OSError):
                self._leaf.kill()
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.ended_fd, signal.SIGKILL)
        await wait_until_over(lambda: has_ended(self.ended_fd), KILL_S)
        return self._child.poll() is not None

    def close(self) -> None:
        if self._out >= 0:
            asyncio.get_running_loop().remove_reader(self._out)
            os.close(self._out)
            os.close(self.ended_fd)
            self._out = self.ended_fd = -1
        # Where it does not end it must not keep Popen from being collected.
        self._child.returncode = self._child.poll() or 0
        if self._leaf is not None:
            self._leaf.remove()
        self._fence.remove()
