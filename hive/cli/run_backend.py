"""`hive run-backend`: what the units of the inference servers execute."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hive.settings.file import load


class StartedKind(StrEnum):
    """The kinds that can be started; the demo backend is a command of its own."""

    OLLAMA = "ollama"
    VLLM = "vllm"
    LLAMA = "llama"


def run_backend(
    kind: Annotated[StartedKind, typer.Argument(help="Which inference server.")],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of /etc/hive/hive.conf.")] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where its socket is, instead of /run/hive-inference.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What it caches, instead of /var/lib/hive/inference.")
    ] = None,
) -> None:
    """Becomes the inference server that hive.conf describes.

    Ends with exit code 5, and says what to do, where its program or its model is missing.

    Examples:
      hive run-backend llama
      hive run-backend vllm --config ./hive.conf --runtime-dir /tmp/try --state-dir /tmp/try
    """
    settings = load(config, env=os.environ).settings
    from hive.up.run_backend import become, for_pool

    environment = for_pool(kind, settings, os.environ)
    become(kind, settings, environment, runtime=runtime_dir, state=state_dir)
