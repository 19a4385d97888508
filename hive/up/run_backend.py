"""Becomes an inference server: looks whether it can be started at all, then is replaced by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hive.backends.launch import RUNTIME, STATE, launch
from hive.errors import DependencyDown
from hive.host.process import replace
from hive.settings.table import InferenceSection
from hive.worker.place import check, free


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
    check(found.needed)
    if found.socket is not None:
        free(found.socket)
    try:
        replace(found.command, env=found.environment)
    except OSError as error:
        raise DependencyDown(f"{found.command[0]} cannot be executed: {error.strerror}") from error
