"""The step of an installation that starts Hive, or starts it anew with another version, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hive.client.client import Client
from hive.errors import ConfigError, DependencyDown, HiveError, NotFound, TimedOut
from hive.files import layout, share
from hive.host import program, systemd
from hive.host.cgroup import Subtree, state_label, subtree_name
from hive.host.engine import Engine, filters
from hive.install.steps import Box, QuietStep
from hive.install.steps_system import call
from hive.settings.file import load
from hive.settings.table import Paths, Sandbox

API = Paths(Path(layout.STATE), Path(layout.RUNTIMES[0]), apart=True).api_socket
OWN = ("hive-redis.service", "hive-sandbox.service", "hive-daemon.service", "hive-proxy.service")
"""Units that are started anew with a version. Not the inference servers: a model that is loaded stays."""
AGENT_UNITS = "hive-agent@*"
MODEL_UNITS = "hive-model@*"
SLICES = ("hive-agents.slice", "hive-model.slice", "hive-lease.slice", "hive.slice")
"""The last is there because of the others (systemd.slice(5): a dash is a level)."""
TEMPLATE = "@.service"
"""The end of the name of a unit that only has instances: it is never loaded itself."""
START_S = 180.0
ANSWER_S = 30.0
LOG_LINES = 8
REMOVE_S = 30.0
KILL_S = 10.0


class SystemdUnit(NamedTuple):
    """The state of one unit, by systemd."""

    name: str
    active: str
    result: str
    type: str
    condition: str

    @property
    def failed(self) -> bool:
        """A oneshot may have ended, and what has its condition unmet is not meant to run.

        >>> SystemdUnit("a.service", "inactive", "success", "notify", "yes").failed
        True
        >>> SystemdUnit("a.service", "inactive", "success", "oneshot", "yes").failed
        False
        """
        if self.active == "active":
            return False
        if self.active == "inactive":
            return self.type != "oneshot" and self.condition == "yes"
        return True


class StartStep(QuietStep):
    """hive.target is up with this version, and the daemon answers."""

    name = "start"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan(self) -> list[str]:
        if not self._box.layout.live:
            return []
        manifest = self._box.manifest
        if manifest.settled and manifest.running == self._box.version and _is_active(layout.TARGET):
            return []
        again = [f"systemctl try-restart {' '.join(OWN)}"] if manifest.running else []
        failed = "systemctl reset-failed, for each unit of Hive"
        return [
            "systemctl daemon-reload",
            failed,
            *again,
            f"systemctl start {layout.TARGET}",
            f"wait until {API} answers",
        ]

    def do(self) -> None:
        """Raises DependencyDown with the last words of the unit that failed."""
        call(["systemctl", "daemon-reload"])
        program.run(["systemctl", "reset-failed", *self._units()])
        calls = [["try-restart", *OWN]] if self._box.manifest.running else []
        problems = [problem for verb in [*calls, ["start", layout.TARGET]] if (problem := _told(verb))]
        if failed := [unit for unit in wanted_units() if unit.failed]:
            raise _not_up(failed)
        if problems:
            raise DependencyDown(
                f"{layout.TARGET} does not come up: {problems[0]}", hint=f"systemctl status {layout.TARGET}"
            )
        _wait_for_answer(Client(API))
        self._box.manifest.running = self._box.version
        self._box.manifest.settled = True
        self._box.manifest.save(self._box.layout)

    def _units(self) -> list[str]:
        names = [os.path.basename(unit.path) for unit in share.units(self._box.share)]
        return [name for name in names if name.startswith("hive") and not name.endswith(TEMPLATE)]

    def plan_undo(self, *, purge: bool) -> list[str]:
        if not self._box.layout.live or not systemd.is_booted():
            return []
        ended = [f"{'remove' if purge else 'stop'} every agent", f"systemctl stop {layout.TARGET} and all its units"]
        has_engine = engine_socket(self._box.at(layout.CONF_FILE)) is not None
        return [*ended, "remove the containers that agents leave at the Docker engine"] if has_engine else ended

    def undo(self, *, purge: bool) -> None:
        if not self._box.layout.live or not systemd.is_booted():
            return
        _end_agents(self._box, purge=purge)
        # The links that `systemctl enable` made since go as well.
        units = [os.path.basename(path) for path in self._box.manifest.files if os.path.dirname(path) == layout.UNITS]
        # Removed already where an earlier run was cut off: systemd forgets a unit without a file once it has stopped.
        loaded = [name for name in dict.fromkeys(units) if not name.endswith(TEMPLATE) and _is_loaded(name)]
        if loaded:
            program.run(["systemctl", "disable", "--quiet", *loaded])
            call(["systemctl", "stop", *loaded], limit_s=START_S)
        for instances in (MODEL_UNITS, AGENT_UNITS):
            program.run(["systemctl", "stop", instances], limit_s=START_S)
        program.run(["systemctl", "stop", *SLICES], limit_s=START_S)
        program.run(["systemctl", "reset-failed", "hive*"])
        for line in sweep(Path(layout.STATE), self._box.at(layout.CONF_FILE)):
            self._box.say(line)
        remove_groups(Path(layout.STATE))
        self._box.manifest.running = ""
        self._box.manifest.save(self._box.layout)


class Reload(QuietStep):
    """systemd forgets the units when they are gone."""

    name = "reload"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        return ["systemctl daemon-reload"] if self._box.layout.live and systemd.is_booted() else []

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        if self._box.layout.live and systemd.is_booted():
            call(["systemctl", "daemon-reload"])


def wanted_units() -> list[SystemdUnit]:
    """The units that hive.target wants, and itself. Raises HiveError."""
    shown = systemd.parse_show(call(["systemctl", "show", layout.TARGET, "--property=Wants", "--property=Requires"]))
    names = [name for value in shown.values() for name in value.split()]
    return [_unit(name) for name in dict.fromkeys([layout.TARGET, *names])]


def _unit(name: str) -> SystemdUnit:
    wanted = ("ActiveState", "Result", "Type", "ConditionResult")
    found = systemd.parse_show(call(["systemctl", "show", name, *(f"--property={one}" for one in wanted)]))
    return SystemdUnit(name, *(found.get(one, "") for one in wanted))


def _told(verb: Sequence[str]) -> str:
    """The error of systemctl where it failed, or did not come to an end; the state of each unit is looked up there."""
    try:
        ran = program.run(["systemctl", *verb], limit_s=START_S)
    except TimedOut as error:
        return error.message
    return ran.last_line if ran.code else ""


def _not_up(failed: Sequence[SystemdUnit]) -> DependencyDown:
    first = failed[0]
    log = program.run(["journalctl", "--quiet", "--no-pager", "--output=cat", f"--lines={LOG_LINES}", "-u", first.name])
    said = "\n".join(f"    {line}" for line in log.text.strip().splitlines())
    names = ", ".join(unit.name for unit in failed)
    return DependencyDown(
        f"not up: {names} ({first.active}, {first.result}). The last words of {first.name}:\n{said}",
        hint=f"journalctl -u {first.name}; after that, run the installer again",
    )


def _is_active(unit: str) -> bool:
    return program.run(["systemctl", "is-active", "--quiet", unit]).code == 0


def _is_loaded(unit: str) -> bool:
    shown = program.run(["systemctl", "show", unit, "--property=LoadState", "--property=ActiveState"])
    found = systemd.parse_show(shown.text)
    return found.get("LoadState") not in ("not-found", None) or found.get("ActiveState") == "active"


def _wait_for_answer(client: Client) -> None:
    until = time.monotonic() + ANSWER_S
    while True:
        try:
            client.get("/api/health", timeout_s=5)
        except HiveError as error:
            if time.monotonic() > until:
                raise DependencyDown(
                    f"hive.target is up, but {client.path} does not answer: {error.message}",
                    hint="journalctl -u hive-daemon.service",
                ) from error
            time.sleep(0.1)  # an installer has nothing else to do
        else:
            return


def _end_agents(box: Box, *, purge: bool) -> None:
    """Ends the agents by the daemon, which knows every runtime; systemd stops the rest with the slice."""
    client = Client(API)
    try:
        ended = client.post("/api/system/shutdown", timeout_s=START_S)
        agents = client.get("/api/agents", timeout_s=5)["agents"] if purge else []
    except HiveError as error:
        box.say(f"the daemon does not answer ({error.message}): agents are stopped by their units")
        return
    if ended["failed"]:
        box.say(f"not stopped by the daemon: {', '.join(ended['failed'])}")
    for agent in agents:
        try:
            client.delete(f"/api/agents/{agent['id']}")
        except HiveError as error:
            box.say(f"agent {agent['name']}: {error.message}")


def remove_groups(state: Path) -> None:
    """Takes away the control groups of this state directory's Hive, and kills what is left in them.

    Raises DependencyDown where something in one does not die.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]
    name = subtree_name(state)
    found = [path for top in tops for pattern in (name, f"*/{name}", f"*/*/{name}") for path in top.glob(pattern)]
    until = time.monotonic() + KILL_S
    for subtree in map(Subtree, found):
        while leaves := subtree.leaves():
            for leaf in leaves:
                leaf.kill()
                leaf.remove()
            if time.monotonic() > until:
                raise DependencyDown(f"processes do not end: {leaves}", hint="end them, then try again")
            time.sleep(0.01)  # an uninstaller has nothing else to do
        subtree.remove()


# Leavings of agents at the Docker engine: a container is no unit, and lives on when every service of Hive is gone ----


def engine_socket(conf: Path) -> Path | None:
    """Address of the engine of the Hive with this hive.conf; None where none is there."""
    try:
        found = load(conf, env={}).settings.sandbox.docker_socket if conf.exists() else Sandbox().docker_socket
    except ConfigError:  # a broken file must not keep Hive from being removed
        found = Sandbox().docker_socket
    return Path(found) if Path(found).is_socket() else None


def remove_containers(state: Path, socket: Path) -> list[str]:
    """Removes the containers and networks of the agents of this state directory; names of what is gone.

    Nothing of theirs is kept in a container: its root is read-only, and an agent's home is on the host. Raises
    HiveError where the engine does not answer, or keeps one.
    """
    return asyncio.run(_remove(Engine(socket), filters(f"hive.state={state_label(state)}")))


async def _remove(engine: Engine, ours: dict[str, str]) -> list[str]:
    gone = []
    for container in await engine.ask("GET", "/containers/json", query={"all": "1", **ours}):
        with contextlib.suppress(NotFound):
            query = {"force": "1", "v": "1"}
            await engine.ask("DELETE", f"/containers/{container['Id']}", query=query, timeout_s=REMOVE_S)
        gone.append(str((container.get("Names") or [container["Id"]])[0]).lstrip("/"))
    for network in await engine.ask("GET", "/networks", query=ours):
        with contextlib.suppress(NotFound):
            await engine.ask("DELETE", f"/networks/{network['Id']}", timeout_s=REMOVE_S)
        gone.append(str(network["Name"]))
    return gone


def sweep(state: Path, conf: Path) -> list[str]:
    """The same in sentences, also of what could not be done. Raises nothing."""
    socket = engine_socket(conf)
    if socket is None:
        return []
    try:
        gone = remove_containers(state, socket)
    except HiveError as error:
        return [f"containers of agents may be left: {error.message}"]
    return [f"removed {name}, which an agent had left at the Docker engine" for name in gone]
