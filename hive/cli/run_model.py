"""`hive run-model`: what the units of the pool's servers execute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hive.cli import service_starts


def run_model(
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="As `hive pool --json` names it.")],
    grant: Annotated[str, typer.Option(metavar="FILE", help="The memory it is given, as the helper wrote it.")],
    socket: Annotated[str, typer.Option(metavar="PATH", help="Where it listens.")],
    state_dir: Annotated[str, typer.Option(metavar="DIR", help="What it caches.")],
    hive_state_dir: Annotated[str, typer.Option(metavar="DIR", help="Of the `hive up` it belongs to.")] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="Instead of /etc/hive/hive.conf.")] = "",
) -> int:
    """Runs the server of one model of the pool, and ends when that does.

    It is started again by nobody but the pool. Exit code 75 where the server hung and was ended, 5 where its program or
    its model is missing, else the server's own.

    Examples:
      hive run-model qwen3-8b-f9b30c0d --grant /run/hive/pool/qwen3-8b-f9b30c0d.json
        --socket /run/hive-model/qwen3-8b-f9b30c0d/s.sock --state-dir /var/lib/hive/inference
    """
    # Paths are plain text above: Typer loads pydantic for each other type, half of this program's start (lazy.py).
    return service_starts.run_model(
        slot,
        grant=Path(grant),
        socket=Path(socket),
        state_dir=Path(state_dir),
        hive_state_dir=Path(hive_state_dir) if hive_state_dir else None,
        config=Path(config) if config else None,
    )
