"""The process of model jobs: it runs the loops of all of them, and has nothing but what the daemon gives it.

No privileges, no network but unix sockets, no state: what a job says is with the daemon before the job goes on. It ends
with the link to the daemon (docs/decisions/050).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

import msgspec

from hive.errors import ConfigError, HiveError
from hive.host.loop_lag import watched
from hive.host.notify import Notifier
from hive.host.sockets import UNIX, take_sockets
from hive.jobs.access import JobAccess, ProgramsOfJob
from hive.jobs.ending import JobEnding, failed
from hive.jobs.model_run import run_model
from hive.jobs.order import JobForm, JobWork
from hive.jobs.telling import Telling
from hive.link.jobs import JobEnds, JobSaid, JobWord, RunJob, StopJob
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.tasks import spawn

log = logging.getLogger("hive.jobs")

KEPT_S = 120.0
"""The daemon keeps what a job says within this: a disk may be slow."""
FIRST_LINK_S = 30.0
LET_GO_S = 2.0
"""A job that is stopped is waited for so long; what its tools take to end is theirs, and holds up nobody."""


class JobProcess:
    """The jobs of one link. `gone` is set when the daemon is."""

    def __init__(self, sock: socket.socket) -> None:
        self.gone = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[str, Telling] = {}
        self._link = Link(sock, name="daemon", on_message=self._hear, on_lost=self._lost)

    def __repr__(self) -> str:
        return f"<JobProcess {len(self._running)} jobs>"

    def _hear(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:  # noqa: ARG002
        match message:
            case RunJob(job=job) if job not in self._running:
                self._running[job] = spawn(self._run(message), name=f"job {job}")
            case StopJob(job=job) if reply is not None:
                spawn(self._stop(job, reply), name=f"stop {job}")

    def _lost(self, link: Link) -> None:  # noqa: ARG002
        for task in self._running.values():
            task.cancel()
        self.gone.set()

    async def _run(self, told: RunJob) -> None:
        job = told.job

        async def keep(words: list[JobWord]) -> None:
            await self._link.ask(JobSaid(job=job, words=words), Done, timeout_s=KEPT_S)

        telling = self._telling[job] = Telling(keep)
        try:
            ending = await self._ending(told, telling)
            await self._link.ask(_ends(job, ending), Done, timeout_s=KEPT_S)
        except asyncio.CancelledError:
            await _flushed(telling)
            raise
        except HiveError as error:  # the daemon has ended it
            log.info("job_end_not_heard job=%s error=%s", job, error.message)
        finally:
            self._running.pop(job, None)
            self._telling.pop(job, None)

    async def _ending(self, told: RunJob, telling: Telling) -> JobEnding:
        """Its end, once all it said is kept; where that cannot be kept, that is its end."""
        try:
            ending = await self._outcome(told, telling)
            await telling.flush()
        except HiveError as error:
            log.warning("job_not_kept job=%s error=%s", told.job, error.message)
            return failed(error.code, error.message)
        return ending

    async def _outcome(self, told: RunJob, telling: Telling) -> JobEnding:
        """Its end, whatever happens. Raises what kept the daemon from keeping what it said."""
        try:
            work = msgspec.json.decode(told.work, type=JobWork)
            fields = {"Authorization": f"Bearer {told.token}"}
            access = JobAccess(told.job, Path(told.entry), fields, ProgramsOfJob(told.job, self._link))
            if work.order.form is JobForm.RESPONSES:
                from hive.jobs.background_run import run_response

                return await run_response(work, access, telling)
            return await run_model(work, access, telling)
        except (HiveError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("job_broke job=%s", told.job)
            return failed("internal", f"a fault of Hive's own: {type(error).__name__}: {error}")

    async def _stop(self, job: str, reply: LinkReply) -> None:
        """Answers once it has let go of its model and its last words are kept; its tools may end later."""
        task, telling = self._running.get(job), self._telling.get(job)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=LET_GO_S)
            if not task.done() and telling is not None:
                await asyncio.wait({spawn(_flushed(telling), name=f"last words of job {job}")}, timeout=LET_GO_S)
        reply(Done())


async def _flushed(telling: Telling) -> None:
    """The last words of a job that is cancelled."""
    try:
        await telling.flush()
    except HiveError as error:
        log.info("last_words_not_kept error=%s", error.message)


def _ends(job: str, ending: JobEnding) -> JobEnds:
    return JobEnds(
        job=job,
        state=ending.state,
        reason=ending.reason,
        detail=ending.detail,
        answer=ending.answer,
        is_incomplete=ending.is_incomplete,
    )


# The program ----------------------------------------------------------------------------------------------------------


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    notifier = Notifier(os.environ, pid=os.getpid())
    process = JobProcess(sock)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, process.gone.set)
    with watched(notifier, str):  # an empty word: what hangs is the loop or nothing
        notifier.ready("serving")
        await process.gone.wait()
    notifier.stopping()


def first_link(env: dict[str, str]) -> socket.socket | None:
    """The link that a service was started for: the first caller of the socket that systemd handed over; None where it
    was started by hand, and nobody calls. Raises ConfigError where it was handed none."""
    handed = take_sockets(env, {"jobs": UNIX}, pid=os.getpid()).get("jobs", [])
    if not handed:
        raise ConfigError("no socket named jobs was handed over", hint="systemd starts it: hive-jobs.socket")
    listener = handed[0]
    listener.settimeout(FIRST_LINK_S)
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None
    finally:
        listener.close()


def main(link_fd: int | None) -> int:
    """Runs the jobs of one link until it ends: of that descriptor, or the first at the socket that systemd handed over.

    Raises ConfigError where there is neither.
    """
    sock = first_link(dict(os.environ)) if link_fd is None else socket.socket(fileno=link_fd)
    if sock is not None:
        asyncio.run(_serve(sock))
    return 0
