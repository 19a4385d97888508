"""Leavings of agents at the Docker engine, taken away where no daemon can be asked to do it any more.

A container is no unit, so it lives on (or stays paused) when every service of Hive is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from hive.errors import ConfigError, HiveError, NotFound
from hive.host.cgroup import state_label
from hive.host.engine import Engine, filters
from hive.settings.file import load
from hive.settings.table import Sandbox

REMOVE_S = 30.0


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
