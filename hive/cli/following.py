"""A job of the daemon's as the command line follows it: how far it is, and how it ended."""

from __future__ import annotations

import shutil
import sys
import time
from urllib.parse import quote

from hive.cli.call import Answer, CommandCall
from hive.cli.text import one_line, size, span
from hive.errors import DependencyDown, HiveError, by_code

LOOK_S = 0.3
DAEMON_WITHIN_S = 30.0
"""A daemon that ends in the middle of a job is started again, and says what became of it."""
BAR = 24
TENTH = 10
"""Without a terminal a line is said for every tenth of the bytes."""


def followed(call: CommandCall, job: Answer, *, goes_on: str) -> Answer:
    """The job, done. Says on stderr how far it is: a bar on a terminal, else lines. Raises what it ended with.

    Ctrl-C ends the looking; `goes_on` says then what becomes of the job.
    """
    job = waited(call, job, goes_on=goes_on)
    if job["state"] != "done":
        raise error_of(job["error"])
    return job


def waited(call: CommandCall, job: Answer, *, goes_on: str) -> Answer:
    """The same job, ended, whatever with."""
    bar = Bar(call)
    try:
        while job["state"] == "running":
            bar.show(job, time.monotonic())
            time.sleep(LOOK_S)
            job = looked_at(call, job["id"])
    except KeyboardInterrupt:
        bar.end()
        call.say(goes_on)
        raise
    bar.end()
    return job


def looked_at(call: CommandCall, job: str) -> Answer:
    """The job as it is. Raises DependencyDown where no daemon has come back."""
    until = time.monotonic() + DAEMON_WITHIN_S
    while True:
        try:
            return call.client.get(f"/api/jobs/{quote(job)}")
        except DependencyDown:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_S)


def error_of(error: Answer) -> HiveError:
    """The error a job ended with, as its class, with the last lines of a server that failed."""
    lines = [f"  {line}" for line in error["log"]]
    message = "\n".join([error["message"], *(["its last lines:"] if lines else []), *lines])
    found = by_code(error["code"])(message)
    found.code = error["code"]
    found.hint = error["hint"]
    return found


class Bar:
    """The line about a job that runs."""

    def __init__(self, call: CommandCall) -> None:
        self._call = call
        self._on_terminal = sys.stderr.isatty() and not call.as_json
        self._said = ("", -1)
        self._begun: tuple[float, int] | None = None
        self._is_drawn = False

    def show(self, job: Answer, now: float) -> None:
        done, total = job["completed_bytes"] or 0, job["total_bytes"] or 0
        if self._begun is None and total:
            self._begun = now, done
        if self._on_terminal:
            rate = self._rate(done, now)
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[K" + drawn(one_line(job["progress"]), done, total, rate, width))
            sys.stderr.flush()
            self._is_drawn = True
            return
        tenth = done * TENTH // total if total else -1
        if (job["progress"], tenth) != self._said:
            self._said = (job["progress"], tenth)
            self._call.say(job["progress"] + (f": {size(done)} of {size(total)}" if total else ""))

    def _rate(self, done: int, now: float) -> float | None:
        """Bytes a second since the first were seen; None before a second is over."""
        if self._begun is None or now - self._begun[0] < 1:
            return None
        return (done - self._begun[1]) / (now - self._begun[0])

    def end(self) -> None:
        """The line is free again for what is said next."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False


def drawn(says: str, done: int, total: int, rate: float | None, width: int) -> str:
    """One line of at most `width` columns; what is said gives way to the bar.

    >>> drawn("pulling a1", 536870912, 1073741824, 1048576 * 10, 100)
    'pulling a1   50 % [############            ] 512 MiB of 1.0 GiB  10 MiB/s  51s left'
    >>> drawn("pulling manifest", 0, 0, None, 10)
    'pulling ma'
    """
    if not total:
        return says[:width]
    filled = BAR * min(done, total) // total
    bar = f"  {100 * min(done, total) // total:3} % [{'#' * filled:{BAR}}] {size(done)} of {size(total)}"
    if rate:
        bar += f"  {size(rate)}/s  {span(max(0, total - done) / rate)} left"
    return says[: max(0, width - len(bar))] + bar[:width]
