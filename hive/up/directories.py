"""Makes and removes the directories of one `hive up`, each with the rights its contents need."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hive.errors import ConfigError, NotPermitted, StoreFull
from hive.paths import check_length, make_private
from hive.settings.table import Paths
from hive.up.services import DEMO_SOCKET

OTHER_STATE = "choose another directory, new or empty, with --state-dir"
IN_THE_WAY = "move it away, or choose another --state-dir"
HIVES = frozenset({"up.lock", "hive.db", "hive.db.lock"})
"""One of these in it makes a directory a Hive's."""
NOT_HIVES = frozenset({"lost+found"})
"""May be in an empty one."""


def make_state(paths: Paths, *, uid: int) -> None:
    """The state directory, where the lock will be. As root agents of other uids may pass through it.

    Refused before anything is made. Raises NotPermitted, DependencyDown, ConfigError (a directory of something else,
    one that agents could not reach, too long a runtime directory).
    """
    check_length(paths.runtime)
    _refuse_foreign(paths.state)
    if uid == 0:
        _refuse_unreachable(paths.state)
    make_private(paths.state, uid=uid, mode=_through(uid), hint=OTHER_STATE)


def make_rest(paths: Paths, *, uid: int) -> None:
    """Makes the runtime directory and those in both; only for the holder of the lock, who may `clear` it again."""
    for in_runtime in (paths.runtime, paths.runtime / "a"):
        make_private(in_runtime, uid=uid, mode=_through(uid))
    make_private(paths.home("x").parent, uid=uid, mode=_through(uid), hint=IN_THE_WAY)
    for private in (paths.redis_dir, paths.spool, paths.log("x").parent):
        make_private(private, uid=uid, hint=IN_THE_WAY)


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
    named = (paths.api_socket, paths.link_socket, paths.sandbox_socket, paths.redis_socket, paths.admin_socket)
    agents = paths.runtime / "a"
    for path in (*named, paths.runtime / DEMO_SOCKET, paths.state / "socket", *agents.glob("*.sock")):
        with contextlib.suppress(OSError):
            path.unlink()
    # Those of models are empty, or of models that live on.
    of_slots = [path for path in paths.slot_sockets.glob("*") if path.is_dir()]
    for directory in (agents, *of_slots, paths.slot_sockets, paths.slot_grants, paths.runtime):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _refuse_foreign(state: Path) -> None:
    """A directory that something else uses is not taken: its mode would be changed and its files mixed with Hive's."""
    try:
        found = {entry.name for entry in state.iterdir()}
    except OSError:
        return  # not there, or what is wrong with it is told when it is made
    if found - NOT_HIVES and found.isdisjoint(HIVES):
        raise ConfigError(f"{state} is in use, and not by a Hive", hint=OTHER_STATE)


def _refuse_unreachable(state: Path) -> None:
    for parent in state.resolve().parents:
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            raise ConfigError(
                f"agents run as users of their own and could not reach {state}: {parent} lets nobody else pass",
                hint=f"choose another --state-dir, or type: chmod o+x {parent}",
            )
