"""A job's way to agents, for its tools: the proxy's socket for jobs, and programs inside agents by the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

JOB_FIELD = "X-Hive-Job"
"""Tells an agent which job a call is of."""


class ProgramInside(NamedTuple):
    """A program that runs inside an agent. `form`, `descriptors`: as in `hive.link.execution.Executing`; the
    descriptors are the taker's."""

    run: str
    form: str
    descriptors: list[int]


class Programs(Protocol):
    """Runs the programs of one job inside agents."""

    async def begin(self, agent: str, command: Sequence[str]) -> ProgramInside:
        """Wakes the agent and runs it there; the agent stays awake until its end. Raises HiveError."""
        ...

    async def end(self, run: str) -> None:
        """Ends it with all its processes; one that has ended, too. Raises nothing."""
        ...


class JobAccess(NamedTuple):
    """`socket`: where the proxy takes requests of jobs; `fields`: what shows there which job this is."""

    job: str
    socket: Path
    fields: Mapping[str, str]
    programs: Programs
