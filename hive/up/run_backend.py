"""Becomes an inference server: looks whether it can be started at all, then is replaced by it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hive.backends.command_line import Needed
from hive.backends.launch import RUNTIME, STATE, launch
from hive.errors import DependencyDown, WrongState
from hive.host.process import replace
from hive.settings.table import InferenceSection


def become(
    kind: str,
    inference: InferenceSection,
    environment: Mapping[str, str],
    *,
    runtime: Path | None = None,
    state: Path | None = None,
) -> NoReturn:
    """This process goes on as the server of `kind`, with its socket in `runtime` and its caches in `state`.

    Raises DependencyDown with what to do where program or model is missing, WrongState where one serves already.
    """
    found = launch(kind, inference, environment, runtime=runtime or RUNTIME, state=state or STATE)
    for needed in found.needed:
        _check(needed)
    if found.socket is not None:
        free(found.socket)
    try:
        replace(found.command, env=found.environment)
    except OSError as error:
        raise DependencyDown(f"{found.command[0]} cannot be executed: {error.strerror}") from error


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
