"""The `docker` runtime: an agent is a container of a Docker engine, which is asked over its socket.

What a container is given is decided in container_spec.py, one started container is container.py. The engine does not
restart it: Hive does. An agent that runs does not need the engine; a helper that is killed finds it again without.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from hive.errors import DependencyDown, HiveError, NotFound, NotPermitted, Saturated, WrongState
from hive.host.cgroup import state_label
from hive.host.engine import Engine, filters
from hive.host.process import Identity, ProcessTable, boot_id, identify
from hive.link.helper import dialled
from hive.link.specs import RuntimeCapabilities, SandboxSpec
from hive.runtimes import container_log, container_spec, home, pageout
from hive.runtimes.container import RunningContainer
from hive.runtimes.container_group import find_container
from hive.runtimes.container_log import ContainerLog
from hive.runtimes.container_notes import Notes
from hive.runtimes.container_spec import SOCKET_NAME, NetworkKind
from hive.runtimes.runtime import Run, RunningAgent, SocketPlace
from hive.settings.table import Paths, Sandbox
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

CREATE_S = 20.0
START_S = 30.0
"""An engine takes 0.2 s for a start on an idle machine, seconds for many at once."""
REMOVE_S = 20.0
STRAYS_S = 1.0
"""A helper that begins waits no longer for an engine that hangs: others are frozen and want to be thawed."""
NO_NETWORK_LEFT = "could not find an available"
"""…, non-overlapping IPv4 address pool: what Docker says when its networks are used up."""


class DockerRuntime:
    """See `Runtime` for the contract."""

    def __init__(self, paths: Paths, settings: Sandbox, *, log_max_bytes: int) -> None:
        self._paths = paths
        self._engine = Engine(Path(settings.docker_socket))
        self._log_max_bytes = log_max_bytes
        self._state = state_label(paths.state)
        self._info: dict[str, Any] = {}
        """The engine's answer about itself when it was last asked."""
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<DockerRuntime {self._engine!r}>"

    async def capabilities(self) -> RuntimeCapabilities:
        try:
            info = await self._ask_info()
        except HiveError as error:
            return RuntimeCapabilities(why_not=error.message)
        return RuntimeCapabilities(
            why_not_freeze=container_spec.why_not_freeze(info),
            why_not_page_out=pageout.why_not(None),
            why_not_egress=container_spec.NO_LISTS,
            limits=container_spec.lacking(info, None),
        )

    async def _ask_info(self) -> dict[str, Any]:
        self._info = await self._engine.ask("GET", "/info")
        return self._info

    def place(self, agent: str, spec: SandboxSpec) -> SocketPlace:  # noqa: ARG002
        """Places it in a directory of the agent's own, which is what the container gets: a socket mounted by itself
        would stay the one it was when the next helper renames a new one over its name."""
        directory = self._place_of(agent)
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        return SocketPlace(directory / SOCKET_NAME)

    def _place_of(self, agent: str) -> Path:
        """Below a directory that only Hive may enter, so that the mount is the one way there."""
        return self._paths.runtime / "c" / agent[:8]

    def _notes(self, agent: str) -> Notes:
        return Notes(self._paths.state / "docker" / agent)

    # --- define --------------------------------------------------------------------------------------------------

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        container_spec.check(agent, spec, self._paths, engine=self._engine.path, own=_own())
        uid, gid = container_spec.user_of(spec, _own())
        as_root = os.geteuid() == 0
        return await asyncio.to_thread(
            home.make_home,
            Path(spec.home),
            uid=uid if as_root else None,
            gid=gid if as_root else None,
            files=spec.files,
        )

    async def discard(self, agent: str, spec: SandboxSpec) -> None:
        notes = self._notes(agent)
        if notes.has_container:
            await self._remove_all(agent)
        await asyncio.to_thread(self._discard_files, agent, spec, notes)

    def _discard_files(self, agent: str, spec: SandboxSpec, notes: Notes) -> None:
        home.discard(Path(spec.home), Path(spec.log))
        notes.remove()
        for leftover in (self._place_of(agent) / SOCKET_NAME, self._place_of(agent)):
            with contextlib.suppress(FileNotFoundError):
                leftover.rmdir() if leftover.is_dir() else leftover.unlink()

    def trim_log(self, spec: SandboxSpec) -> None:
        """Does nothing: the copy of the container's log keeps itself short."""

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> RunningAgent:
        info, notes = await self._ask_info(), self._notes(agent)
        state = str(info.get("DockerRootDir") or "")
        container_spec.check_mounts(spec, self._paths, engine=self._engine.path, engine_state=state)
        image = await self._image(spec)
        await self._remove_all(agent)  # what is left of an earlier one; it has no holder any more
        notes.begin()
        container_log.begin_anew(Path(spec.log), notes.log, self._log_max_bytes)
        self._open_place(agent, spec)
        try:
            container = await self._create(agent, spec, mark, image, info)
            await self._engine.ask("POST", f"/containers/{container}/start", timeout_s=START_S)
            told = await self._engine.ask("GET", f"/containers/{container}/json")
            notes.address = container_spec.address_of(told, spec.port) or _dialled(agent, spec)
            return self._running(agent, spec, _run_of(told))
        except (HiveError, OSError):
            with contextlib.suppress(HiveError):
                await self._remove_all(agent)
            raise

    async def _image(self, spec: SandboxSpec) -> dict[str, Any]:
        assert spec.docker is not None, "prepare has checked it"
        name = spec.docker.image
        try:
            found: dict[str, Any] = await self._engine.ask("GET", f"/images/{name}/json")
        except NotFound:
            raise NotFound(f"no image {name} on this host", hint=f"docker pull {name}, or docker load") from None
        return found

    async def _create(
        self, agent: str, spec: SandboxSpec, mark: str, image: dict[str, Any], info: dict[str, Any]
    ) -> str:
        labels = {"hive.agent": agent, "hive.name": spec.name, "hive.state": self._state, "hive.mark": mark}
        body = container_spec.create_body(
            spec,
            labels=labels,
            mark=mark,
            network=await self._network(agent, spec, labels),
            place=self._place_of(agent),
            image=image,
            info=info,
            user=container_spec.user_of(spec, _own()),
            log_max_bytes=self._log_max_bytes,
        )
        name = f"hive-{spec.name}-{agent[:8]}"
        try:
            made = await self._engine.ask("POST", "/containers/create", body, query={"name": name}, timeout_s=CREATE_S)
        except WrongState as error:
            raise WrongState(error.message, hint=f"another container is called {name}: docker rm {name}") from None
        for warning in made.get("Warnings") or ():
            log.warning("engine_warns agent=%s warning=%r", spec.name, warning)
        return str(made["Id"])

    async def _network(self, agent: str, spec: SandboxSpec, labels: dict[str, str]) -> str:
        """Its network mode: a bridge of its own, made now, or none."""
        if container_spec.network_of(spec) is NetworkKind.NONE:
            return "none"
        name = f"hive-{agent}"
        body = {"Name": name, "Driver": "bridge", "CheckDuplicate": True, "Labels": labels}
        try:
            await self._engine.ask("POST", "/networks/create", body, timeout_s=CREATE_S)
        except HiveError as error:
            if NO_NETWORK_LEFT not in error.message:
                raise
            raise Saturated(
                "the engine has no network left for one more agent",
                hint="give it more and smaller ones (default-address-pools in daemon.json), or use egress = []",
            ) from None
        return name

    def _open_place(self, agent: str, spec: SandboxSpec) -> None:
        """Lets an agent that runs as another user than its own connect all the same: every process in the container is
        the agent, and no other process gets as far as the socket."""
        if spec.docker is not None and spec.docker.user:
            with contextlib.suppress(FileNotFoundError):
                (self._place_of(agent) / SOCKET_NAME).chmod(0o666)

    def _running(self, agent: str, spec: SandboxSpec, run: Run) -> RunningContainer:
        """The handle of a container whose main process may have ended already: then `ended_fd` is readable at once."""
        descriptor = run.main.open()
        if descriptor is None:
            descriptor, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.close(write)
        notes = self._notes(agent)
        output = ContainerLog(
            self._engine,
            run.handle,
            path=Path(spec.log),
            limit_bytes=container_spec.own_log_max_bytes(self._log_max_bytes),
            note=notes.log,
            agent=spec.name,
            is_over=lambda: not run.main.is_alive(),
        )
        running = RunningContainer(
            run,
            self._engine,
            notes,
            output,
            agent=spec.name,
            port=spec.port,
            ended_fd=descriptor,
            lacking=lambda: container_spec.lacking(self._info, spec.limits),
            clear=lambda: self._remove_all(agent),
        )
        output.begin()
        return running

    # --- across helpers ------------------------------------------------------------------------------------------

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:  # noqa: ARG002
        """Without the engine: it may be down, or hang, and the agent runs all the same."""
        if not run.main.is_alive():
            return None
        self._open_place(agent, spec)
        if not self._info and self._asking is None:
            self._asking = spawn(self._learn_info(), name="ask the engine")
        return self._running(agent, spec, run)

    async def _learn_info(self) -> None:
        """Asks which limits the engine enforces: once for all agents, and no agent waits for it."""
        with contextlib.suppress(HiveError):
            await self._ask_info()

    async def find(self, agent: str, spec: SandboxSpec, snapshot: ProcessTable, *, mark: str) -> RunningAgent | None:
        for stat in snapshot.with_environment(mark):
            if container := find_container(stat.pid):
                run = Run(main=Identity.of(stat), leaf=None, since=time.time(), handle=container)
                return await self.adopt(agent, spec, run, mark=mark)
        return None

    async def sweep(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> None:  # noqa: ARG002
        notes = self._notes(agent)
        last = ContainerLog(
            self._engine,
            run.handle,
            path=Path(spec.log),
            limit_bytes=container_spec.own_log_max_bytes(self._log_max_bytes),
            note=notes.log,
            agent=spec.name,
            is_over=lambda: True,
        )
        last.begin()
        await last.finish()
        notes.asleep = False
        with contextlib.suppress(HiveError):
            await self._remove_all(agent)

    async def thaw_strays(self, known: set[str]) -> list[str]:
        """Thaws strays of this state directory, and only those that Hive paused: a human's pauses are left alone."""
        try:
            paused = await self._engine.ask(
                "GET", "/containers/json", query=self._ours("hive.agent", status="paused"), timeout_s=STRAYS_S
            )
        except HiveError as error:
            if not isinstance(error, DependencyDown | NotPermitted):
                log.warning("strays_not_looked_for error=%r", error.message)
            return []
        strays = {one["Id"]: one["Labels"]["hive.agent"] for one in paused}
        thawed = []
        for container, agent in strays.items():
            if agent in known or not self._notes(agent).asleep:
                continue
            with contextlib.suppress(HiveError):
                await self._engine.ask("POST", f"/containers/{container}/unpause")
            self._notes(agent).asleep = False
            thawed.append(agent)
        return thawed

    # --- what the engine has of an agent ---------------------------------------------------------------------------

    def _ours(self, *labels: str, **others: str) -> dict[str, str]:
        return {"all": "1", **filters(f"hive.state={self._state}", *labels, **others)}

    async def _remove_all(self, agent: str) -> None:
        """Its containers, running or not, and its network. Raises HiveError, where something may be left."""
        query = self._ours(f"hive.agent={agent}")
        for container in await self._engine.ask("GET", "/containers/json", query=query):
            with contextlib.suppress(NotFound):
                await self._engine.ask(
                    "DELETE", f"/containers/{container['Id']}", query={"force": "1", "v": "1"}, timeout_s=REMOVE_S
                )
        for network in await self._engine.ask("GET", "/networks", query=query):
            with contextlib.suppress(NotFound):
                await self._engine.ask("DELETE", f"/networks/{network['Id']}", timeout_s=REMOVE_S)
        self._notes(agent).has_container = False


def _dialled(agent: str, spec: SandboxSpec) -> str:
    """The address through the helper, for a network that leads nowhere: the helper alone reaches its port, as root."""
    nowhere = container_spec.network_of(spec) is NetworkKind.NONE
    return dialled(agent) if nowhere and spec.port is not None and os.geteuid() == 0 else ""


def _own() -> tuple[int, int]:
    return os.geteuid(), os.getegid()


def _run_of(told: dict[str, Any]) -> Run:
    """The `Run` of an inspected container. One that has ended already has the pid it had, if that is known, and no
    start time, so that no later process with that pid is taken for it."""
    pid = int(told["State"]["Pid"])
    main = identify(pid) if pid else None
    return Run(main=main or Identity(pid, 0, boot_id()), leaf=None, since=time.time(), handle=str(told["Id"]))
