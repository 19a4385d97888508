"""Place of a server's start: its program, its model, and a socket nobody listens at."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from hive.backends.command_line import Needed
from hive.errors import DependencyDown, WrongState


def check(needed: Iterable[Needed]) -> None:
    """Raises DependencyDown, with what to do, for the first path that is missing or of no use to this user."""
    for one in needed:
        _check(one)


def _check(needed: Needed) -> None:
    path, setting = needed.path, f"inference.{needed.key}"
    if not path.exists():
        raise DependencyDown(f"{setting}: there is no {path}", hint=needed.hint)
    if needed.is_program and not (path.is_file() and os.access(path, os.X_OK)):
        raise DependencyDown(f"{setting}: {path} is no program this user may execute", hint=needed.hint)
    if not os.access(path, os.R_OK):
        raise DependencyDown(
            f"{setting}: this user (uid {os.geteuid()}) may not read {path}",
            hint="it and every directory above it have to let the group hive-inference in",
        )


def free(path: Path) -> None:
    """Removes the socket a killed server left: no server binds over one. Raises WrongState where a server listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        outcome = probe.connect_ex(str(path))
    if outcome == 0:
        raise WrongState(f"a server listens at {path} already", hint="stop it first")
    if outcome == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
