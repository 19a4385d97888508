"""`hive run-model`: what the units of the pool's servers execute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hive.settings.file import load


def run_model(
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="As `hive pool --json` names it.")],
    grant: Annotated[Path, typer.Option(metavar="FILE", help="The memory it is given, as the helper wrote it.")],
    socket: Annotated[Path, typer.Option(metavar="PATH", help="Where it listens.")],
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="What it caches.")],
    hive_state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Of the `hive up` it belongs to.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of /etc/hive/hive.conf.")] = None,
) -> int:
    """Runs the server of one model of the pool, and ends when that does.

    It is started again by nobody but the pool. Exit code 75 where the server hung and was ended, 5 where its program or
    its model is missing, else the server's own.

    Examples:
      hive run-model qwen3-8b-f9b30c0d --grant /run/hive/pool/qwen3-8b-f9b30c0d.json
        --socket /run/hive-inference/qwen3-8b-f9b30c0d.sock --state-dir /var/lib/hive/inference
    """
    settings = load(config, env=os.environ).settings
    from hive.up.run_model import supervised

    return supervised(slot, settings, grant=grant, socket=socket, state=state_dir, hive_state=hive_state_dir)
