"""Makes and removes the directories of one `hive up`, each with the rights its contents need."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hive.appliance.services import DEMO_SOCKET
from hive.errors import ConfigError, NotPermitted, StoreFull
from hive.places import check_length, make_private
from hive.settings import Paths


def make_state(paths: Paths, *, uid: int) -> None:
    """The state directory, where the lock will be. As root agents of other uids may pass through it.

    Raises NotPermitted, DependencyDown, ConfigError (one that agents could not reach, too long a runtime directory).
    """
    check_length(paths.runtime)
    make_private(paths.state, uid=uid, mode=_through(uid))
    if uid == 0:
        _refuse_unreachable(paths.state)


def make_rest(paths: Paths, *, uid: int) -> None:
    """The runtime directory and what belongs in both; by the holder of the lock only, who may `clear` it again."""
    for open_to_agents in (paths.runtime, paths.runtime / "a", paths.home("x").parent):
        make_private(open_to_agents, uid=uid, mode=_through(uid))
    for private in (paths.redis_dir, paths.spool, paths.log("x").parent):
        make_private(private, uid=uid)


def _through(uid: int) -> int:
    return 0o711 if uid == 0 else 0o700


def write_socket(paths: Paths) -> None:
    """`D/socket`: where the commands find this Hive. Raises NotPermitted, StoreFull."""
    target = paths.state / "socket"
    temporary = target.with_suffix(".new")
    try:
        temporary.write_bytes(os.fsencode(paths.api_socket) + b"\n")
        os.replace(temporary, target)
    except PermissionError as error:
        raise NotPermitted(f"cannot write {target}: {error.strerror}") from None
    except OSError as error:
        raise StoreFull(f"cannot write {target}: {error.strerror}") from None


def clear(paths: Paths) -> None:
    """Removes what an ended Hive leaves that only means something while it runs: sockets and the way to them."""
    named = (paths.api_socket, paths.link_socket, paths.sandbox_socket, paths.redis_socket)
    agents = paths.runtime / "a"
    for path in (*named, paths.runtime / DEMO_SOCKET, paths.state / "socket", *agents.glob("*.sock")):
        with contextlib.suppress(OSError):
            path.unlink()
    for directory in (agents, paths.runtime):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _refuse_unreachable(state: Path) -> None:
    for parent in state.resolve().parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            raise ConfigError(
                f"agents run as users of their own and could not reach {state}: {parent} lets nobody else pass",
                hint=f"choose another --state-dir, or type: chmod o+x {parent}",
            )
