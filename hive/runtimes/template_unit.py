"""Templates as units of systemd: `hive-template@NAME.service`, in an agent's sandbox, in a user namespace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from hive.errors import DependencyDown, HiveError, NotPermitted, TimedOut, WrongState
from hive.host import systemd
from hive.host.cgroup import Leaf
from hive.host.process import Identity, identify, write_control
from hive.link.specs import TemplateSpec
from hive.runtimes import syscall_filter, template_unit_plan
from hive.runtimes.entering import readable
from hive.runtimes.template import StartOrder
from hive.runtimes.template_check import namespaces_of
from hive.runtimes.template_process import environment_of_template
from hive.runtimes.template_unit_plan import template_unit_of
from hive.runtimes.unit_plan import SLICE, Places
from hive.templates import connect, handed_over

log = logging.getLogger("hive.sandbox")

CONNECT = "connect.py"
"""The copy of its first program, beside its socket."""
CONNECTS_S = 20.0
"""Seconds from its execution until it asks for its end of the control socket: an interpreter starts in 20 ms."""
SOCKETS_NAME = "templates"
"""The directory of Hive's runtime directory that has one for each template on its way."""


class UnitTemplates:
    """See `TemplatePlaces`. `places`: of an agent of this name; its own parts are not a template's."""

    def __init__(self, runtime: Path, places: Callable[[], Places], group: Callable[[], Path]) -> None:
        """`group`: the control group of the slice."""
        self._sockets = runtime / SOCKETS_NAME
        self._places = places
        self._group = group

    def why_not(self, spec: TemplateSpec) -> str:
        if spec.first_uid is None or spec.first_uid <= 0:
            return "as a unit a template needs uids of its own"
        return syscall_filter.why_no_filter()

    def order(self, spec: TemplateSpec) -> StartOrder:
        """Its unit gives it a network with nothing in it."""
        return StartOrder(
            imports=spec.imports,
            warm=spec.warm,
            script=spec.script,
            user_namespace=True,
            pin=spec.pin,
            filter=syscall_filter.for_template(),
        )

    async def start(self, spec: TemplateSpec, control: socket.socket) -> UnitTemplate:
        assert spec.first_uid is not None, "asked by why_not"
        unit = template_unit_of(spec.name)
        self._sockets.mkdir(mode=0o711, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=f"{spec.name}-", dir=self._sockets) as name,
            contextlib.ExitStack() as made,
        ):
            directory = Path(name)
            listening = _listen(directory / "control", spec.first_uid)
            made.callback(listening.close)
            shutil.copyfile(connect.__file__, directory / CONNECT)
            (directory / CONNECT).chmod(0o444)
            os.chown(directory, spec.first_uid, spec.first_uid)
            try:
                await self._start_unit(unit, spec, directory)
                main = await _hand_control(listening, unit, spec, control)
                ended_fd = main.open()
                if ended_fd is None:
                    raise DependencyDown("it ended at once")
            except BaseException:
                with contextlib.suppress(HiveError):
                    await systemd.forget(unit)
                raise
        return UnitTemplate(spec, unit, main, ended_fd, self._group() / unit)

    async def _start_unit(self, unit: str, spec: TemplateSpec, directory: Path) -> None:
        """Once more where one has the name: of a helper that was killed, or one that ends just now."""
        properties = template_unit_plan.template_properties(spec, self._places(), directory)
        command = template_unit_plan.template_command(spec, directory / CONNECT, directory / "control")
        description = f"Hive template {spec.name}"
        try:
            await systemd.start(unit, description, properties, command, slice_=SLICE)
        except WrongState:
            await systemd.forget(unit)
            await systemd.start(unit, description, properties, command, slice_=SLICE)

    def sweep(self) -> None:
        """Removes what a helper that was killed left of templates on their way."""
        shutil.rmtree(self._sockets, ignore_errors=True)


def _listen(path: Path, uid: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listening.bind(os.fspath(path))
        path.chmod(0o600)
        os.chown(path, uid, uid)
        listening.listen(1)
    except OSError as error:
        listening.close()
        raise DependencyDown(f"its socket cannot be made: {error.strerror}") from error
    return listening


async def _hand_control(listening: socket.socket, unit: str, spec: TemplateSpec, control: socket.socket) -> Identity:
    """Gives the unit's process its end of the control socket, and says which one that is. Raises HiveError."""
    try:
        async with asyncio.timeout(CONNECTS_S):
            await readable(listening.fileno())
    except TimeoutError:
        raise TimedOut(f"it did not begin within {CONNECTS_S:g} s", hint=f"journalctl -u {unit}") from None
    its, _ = listening.accept()
    with its:
        pid, uid, _ = struct.unpack("=iII", its.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        shown = await systemd.show(unit, "MainPID")
        main = identify(pid)
        if uid != spec.first_uid or shown.get("MainPID") != str(pid) or main is None:
            raise NotPermitted("another process than its own asked for its socket")
        command = handed_over.command(spec.python, connect.PROGRAM_FD, connect.CONTROL_FD)
        order = {"command": command, "env": environment_of_template(spec)}
        with handed_over.opened_fork_server() as program:
            socket.send_fds(its, [msgspec.json.encode(order)], [control.fileno(), program])
    return main


class UnitTemplate:
    """See `TemplateProcess`; systemd's child, not the helper's."""

    def __init__(self, spec: TemplateSpec, unit: str, main: Identity, ended_fd: int, group: Path) -> None:
        self.main = main
        self.ended_fd = ended_fd
        self.group: Path | None = group
        self._spec = spec
        self._unit = unit

    def __repr__(self) -> str:
        return f"<UnitTemplate {self._unit} {self.main.pid}>"

    async def map_users(self) -> None:
        line = f"{self._spec.first_uid} {self._spec.first_uid} {self._spec.uids}\n".encode()
        try:
            if namespaces_of(self.main.pid).get("user") == namespaces_of("self").get("user"):
                raise DependencyDown("it has no user namespace of its own")
            for name in ("gid_map", "uid_map"):
                write_control(Path(f"/proc/{self.main.pid}/{name}"), line)
        except OSError as error:
            raise DependencyDown(f"its users cannot be mapped: {error.strerror}") from error
        if not self.main.is_alive():
            raise DependencyDown("it has ended")

    def last_words(self) -> str:
        """They are in the journal."""
        return f"journalctl -u {self._unit}"

    async def kill(self) -> bool:
        """All that is in its group: its children in use are in units of their own."""
        assert self.group is not None
        with contextlib.suppress(OSError):
            Leaf(self.group).kill()
        try:
            await systemd.forget(self._unit)
        except HiveError as error:
            log.warning("unit_not_forgotten unit=%s error=%r", self._unit, error.message)
        return not self.main.is_alive()

    def close(self) -> None:
        if self.ended_fd >= 0:
            os.close(self.ended_fd)
            self.ended_fd = -1
