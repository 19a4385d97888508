"""Messages about model jobs: between daemon and proxy who may ask, and between daemon and the process of jobs.

Texts of an order and of events are the daemon's and that process's own matter, so they are JSON or plain objects here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hive.domain import Band, JobState
from hive.link.message import LinkMessage


class JobGrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job that may ask at the proxy. `agent`: id of the agent as which it asks; empty: as operator for `tenant`.

    `agents`: ids of those that it may call; only those of its tenant are let through. `is_local_only`: none of its
    requests may leave this box.
    """

    job: str
    agent: str = ""
    tenant: str = ""
    band: Band = Band.NORMAL
    agents: list[str] = []
    is_local_only: bool = False


class JobGrants(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, by the daemon: all grants by the digests of their tokens (SHA-256, hex), in place of those told before. What
    a job that is gone has under way ends. Answer: `Done`."""

    grants: dict[str, JobGrantRow]


# --- daemon → process of jobs ------------------------------------------------------------------------------------


class RunJob(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Run a job. `work`: a `JobWork` as JSON. `entry`: the proxy's socket for it; `token`: what it shows there."""

    job: str
    entry: str
    token: str
    work: bytes


class StopJob(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. End a job: its calls, its request. Answer: `Done` once all that it said has been told; of an unknown one
    too. It tells no `JobEnds`."""

    job: str


# --- process of jobs → daemon ------------------------------------------------------------------------------------


class JobWord(msgspec.Struct, frozen=True):
    """An event of a job, which the daemon numbers. `at`: Unix seconds."""

    at: float
    event: str
    data: dict[str, Any]


class JobSaid(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The next events of a job, in their order. Answer: `Done` once they are kept, or `Failed`: then it ends."""

    job: str
    words: list[JobWord]


class JobEnds(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The job has ended so, and all that it said has been told. Answer: `Done`.

    `reason`: for programs, empty where it completed; `is_incomplete`: there is an answer, or a part, and a bound of the
    order has ended it.
    """

    job: str
    state: JobState
    reason: str = ""
    detail: str = ""
    answer: str = ""
    is_incomplete: bool = False


class AskExecIn(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Run a program of an order inside an agent, where the job may call that. Answer: `ExecIn`."""

    job: str
    agent: str
    command: list[str]


class ExecIn(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Carries the program's descriptors, as `Executing` does. It ends by `EndExecIn`, and with its job."""

    run: str
    form: str


class EndExecIn(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The program and what it started are to end. Answer: `Done` once they have; of an unknown one too."""

    job: str
    run: str
