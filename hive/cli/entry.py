"""The `hive` program: the commands of main.py, and the services, which start without Typer."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SERVICES = ("up", "proxy", "daemon", "sandbox", "sandbox-thaw", "demo-backend", "run-backend", "run-model", "jobs")
"""Nobody can repeat what went wrong in these, so a fault of Hive's own says where it was."""
COMPILED = Path(__file__).parents[1] / "_compiled.json"
"""As `hive.build.COMPILED`, which is imported only where there is one."""


def run() -> None:
    """The program, with its arguments."""
    words = sys.argv[1:]
    if COMPILED.exists():
        _require_as_compiled(words)
    gc.disable()  # nothing of what is imported is garbage: looking for some took 5 ms; a command turns it on again
    if words and words[0] in SERVICES:
        sys.exit(_serve(words))
    try:
        from hive.cli.main import main  # Typer and all that: 50 ms of CPU

        code = main(words)
    except KeyboardInterrupt:  # before there was a command, or once more while it said how it ended
        code = 130
    _leave(code)


def _serve(words: Sequence[str]) -> int:
    """A service, without Typer where units or the supervisor have written its command."""
    from hive.cli.service_starts import plain_start

    if (start := plain_start(words)) is None:
        from hive.cli.main import main

        return main(words)
    try:
        return start()
    except (Exception, KeyboardInterrupt) as error:
        from hive.cli.main import failed

        return failed(error, words)


def _leave(code: int) -> NoReturn:
    """Ends this process at once: the interpreter frees every object before it ends, which took 8 ms of a command."""
    for stream in (sys.stdout, sys.stderr):
        # `main` has said what was wrong; a closed descriptor has no stream; Ctrl-C may be pressed once more.
        with suppress(OSError, ValueError, AttributeError, KeyboardInterrupt):
            stream.flush()
    os._exit(code)


def _require_as_compiled(words: Sequence[str]) -> None:
    """Exits where the code that would run is not the one that is to be read beside it."""
    from hive import build

    if why := build.why_not_as_compiled():
        from hive.cli.call import report, wants_json
        from hive.errors import DependencyDown

        error = DependencyDown(f"this Hive is not as it was compiled: {why}", hint=build.COMPILE_AGAIN)
        sys.exit(report(error, as_json=wants_json(words)))
