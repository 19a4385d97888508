"""Programs of the runners that models of sound and pictures are served by: are they there, with their engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hive.backends.entries import entries_of, started_entries
from hive.backends.kinds import spec_of
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject

ENGINES = {"whisper": "faster_whisper", "diffusers": "diffusers"}
"""The kinds with an environment of their own, and the package in it that is their engine."""


class RunnerProgram(NamedTuple):
    """The program that a model of this kind is served by; `why_not`: a clause, empty where it can be started."""

    model: str
    kind: str
    program: str
    why_not: str


def look_at_programs(subject: Subject) -> CheckVerdict:
    entries = started_entries(entries_of(subject.settings)).values()
    found = list[RunnerProgram]()
    for entry in entries:
        program = spec_of(entry.kind).program if entry.kind in ENGINES else None
        if program is not None:
            path = program(subject.settings.inference)
            found.append(RunnerProgram(entry.name, entry.kind, path, why_not(Path(path), ENGINES[entry.kind])))
    return judge_programs(found)


def why_not(program: Path, engine: str) -> str:
    """The reason that a runner cannot be started; empty where it can, or where its packages are not beside it."""
    if not program.is_file():
        return "it is not there"
    if not os.access(program, os.X_OK):
        return "it may not be run"
    packages = list(program.parent.parent.glob("lib*/python3*/site-packages"))
    if packages and not any((path / engine).is_dir() for path in packages):
        return f"its environment has no {engine}"
    return ""


def judge_programs(found: Sequence[RunnerProgram]) -> CheckVerdict:
    """
    >>> judge_programs([]).reason
    'no model is served by a runner with an environment of its own'
    """
    if not found:
        return skipped("no model is served by a runner with an environment of its own")
    missing = [one for one in found if one.why_not]
    if missing:
        first = missing[0]
        return wrong(
            "runner_program_missing",
            model=first.model,
            program=first.program,
            why=first.why_not,
            folder=str(Path(first.program).parent.parent),
            kind=first.kind,
            more=len(missing) - 1,
        )
    return passed(f"{len({one.program for one in found})} there, with what they need")


CHECKS = (
    Check("runners.programs", "Models of sound and pictures have the program that serves them.", look_at_programs),
)
