"""The ways out of a job, all of them through Hive: to the model, to agents' ports, to programs inside agents."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from hive.errors import HiveError
from hive.host.http_call import HttpCall, calling, connected_unix, streams_of
from hive.http_answer import encode_request
from hive.link.jobs import AskExecIn, EndExecIn, ExecIn
from hive.link.link import Link
from hive.link.messages import Done

BEGUN_S = 60.0
"""A program inside an agent is begun within this: the agent may have to be woken."""
ENDED_S = 40.0


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


class ProgramsOfJob:
    """The daemon runs them."""

    def __init__(self, job: str, link: Link) -> None:
        self._job = job
        self._link = link

    def __repr__(self) -> str:
        return f"<ProgramsOfJob {self._job}>"

    async def begin(self, agent: str, command: Sequence[str]) -> ProgramInside:
        taken: list[int] = []
        asked = AskExecIn(job=self._job, agent=agent, command=list(command))
        try:
            got = await self._link.ask_any(asked, timeout_s=BEGUN_S, taken=taken)
            if not isinstance(got, ExecIn):
                raise HiveError(f"asked for a program inside an agent, got {type(got).__name__}")
        except BaseException:
            for descriptor in taken:
                os.close(descriptor)
            raise
        return ProgramInside(got.run, got.form, taken)

    async def end(self, run: str) -> None:
        with suppress(HiveError):
            await self._link.ask(EndExecIn(job=self._job, run=run), Done, timeout_s=ENDED_S)


class JobAccess(NamedTuple):
    """`socket`: where the proxy takes requests of jobs; `fields`: what shows there which job this is."""

    job: str
    socket: Path
    fields: Mapping[str, str]
    programs: Programs

    @asynccontextmanager
    async def asking(
        self, method: str, target: str, body: bytes | None = None, fields: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpCall]:
        """A request at the proxy: a model's path, or `/agents/NAME/…`. Raises OSError, CallFailed; it has no limit of
        time of its own."""
        head = {"Host": "localhost", "Connection": "close", **self.fields, **(fields or {})}
        if body is not None and not any(name.lower() == "content-type" for name in head):
            head["Content-Type"] = "application/json"
        sock = await connected_unix(self.socket)
        async with calling(streams_of(sock), encode_request(method, target, head, body)) as call:
            yield call
