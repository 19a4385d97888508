"""The `hive` program: the commands of main.py, and the one that starts with every model without Typer."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from hive.settings.table import Settings

RUN_MODEL = "run-model"
JOBS = "jobs"
OPTIONS = ("--grant", "--socket", "--state-dir", "--hive-state-dir", "--config")
NEEDED = OPTIONS[:3]
COMPILED = Path(__file__).parents[1] / "_compiled.json"
"""As `hive.build.COMPILED`, which is imported only where there is one."""


def run() -> None:
    """The program, with its arguments."""
    words = sys.argv[1:]
    if COMPILED.exists():
        _require_as_compiled(words)
    if words[:1] == [RUN_MODEL] and (options := plain_options(words[1:])) is not None:
        sys.exit(_reported(words[1], options))
    if words == [JOBS] or (words[:2] == [JOBS, "--link-fd"] and len(words) == 3 and words[2].isdigit()):
        sys.exit(run_jobs(words[1:]))
    gc.disable()  # nothing of what is imported is garbage: looking for some took 5 ms; a command turns it on again
    from hive.cli.main import SERVICES, main  # Typer and all that: 50 ms of CPU, a sixth of a supervisor's start

    code = main(words)
    if words and words[0] in SERVICES:
        sys.exit(code)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends this process at once: the interpreter frees every object before it ends, which took 8 ms of a command."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # said by `main`; a closed descriptor has no stream
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


def _reported(slot: str, options: Mapping[str, str]) -> int:
    from hive.errors import HiveError

    try:
        return supervise_slot(slot, options)
    except HiveError as error:
        from hive.cli.call import report

        return report(error, as_json=False)


def run_jobs(words: Sequence[str]) -> int:
    """Does `hive jobs`."""
    from hive.jobs.process import main

    return main(words)


def plain_options(words: Sequence[str]) -> dict[str, str] | None:
    """The options of `hive run-model` as units and helper write them; None for all else, which is Typer's to answer.

    >>> plain_options(["a-1", "--grant", "g", "--socket", "s", "--state-dir", "d"])
    {'--grant': 'g', '--socket': 's', '--state-dir': 'd'}
    >>> plain_options(["a-1", "--grant", "g"]), plain_options(["--help"]), plain_options(["a-1", "--grant=g"])
    (None, None, None)
    """
    if not words or words[0].startswith("-") or len(words) % 2 == 0:
        return None
    options = dict(zip(words[1::2], words[2::2], strict=True))
    return options if options.keys() <= set(OPTIONS) and options.keys() >= set(NEEDED) else None


def supervise_slot(slot: str, options: Mapping[str, str]) -> int:
    """Does `hive run-model`, with options by name; one that is empty is not given. Raises HiveError."""
    from hive.settings.file import load
    from hive.up.run_model import supervised

    paths = {name: Path(value) for name, value in options.items() if value}

    def settings() -> Settings:
        return load(paths.get("--config"), env=os.environ).settings

    return supervised(
        slot,
        settings,
        grant=paths["--grant"],
        socket=paths["--socket"],
        state=paths["--state-dir"],
        hive_state=paths.get("--hive-state-dir"),
    )
