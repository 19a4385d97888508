"""`hive doctor`: which checks there are, all of them at once with a limit on each, and mending what can be mended."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar, cast

import msgspec

from hive.conditions import FoundCondition
from hive.doctor.checks import (
    adapters,
    backends,
    cluster,
    comfyui,
    docker,
    files,
    governance,
    host,
    leftovers,
    memory,
    parking,
    pool,
    runner_programs,
    running,
    sandboxes,
    speculation,
    stores,
    templates,
    units,
)
from hive.doctor.checks.check import Check, CheckVerdict, Status, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.doctor.offline_status import conditions_of, look_at
from hive.errors import DependencyDown, HiveError, NotPermitted, UsageError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_S = 0.75
"""Of one check among all: with start-up and a daemon that hangs that is less than 2 s."""
ALONE_S = 60.0
"""Of a check that was named: whoever asks for one wants its answer."""

CHECKS: tuple[Check, ...] = (
    *running.CHECKS,
    *files.CHECKS,
    *units.CHECKS,
    *stores.CHECKS,
    *backends.CHECKS,
    *cluster.CHECKS,
    *pool.CHECKS,
    *comfyui.CHECKS,
    *runner_programs.CHECKS,
    *speculation.CHECKS,
    *adapters.CHECKS,
    *parking.CHECKS,
    *governance.CHECKS,
    *templates.CHECKS,
    *sandboxes.CHECKS,
    *docker.CHECKS,
    *leftovers.CHECKS,
    *memory.CHECKS,
    *host.CHECKS,
)
"""In the order they are shown: Hive first, what is under it last."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check. `fixed`: what `--fix` did before, empty for nothing; `ms`: how long the look took.

    `found`: what is wrong, None where it passed or was skipped. `is_unseen`: it was skipped because this user may not
    look.
    """

    name: str
    status: Status
    reason: str
    fix: str = ""
    fixed: str = ""
    ms: float = 0.0
    found: FoundCondition | None = None
    is_unseen: bool = False


def choose(names: Sequence[str], checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The checks of these names, or of these groups; without any, all that run by default. Raises UsageError.

    >>> [check.name for check in choose(["redis", "disk.space"])]
    ['redis.answers', 'redis.acl', 'disk.space']
    """
    known = {check.name for check in checks} | {check.group for check in checks}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, sorted(known)) or "hive doctor --list"
            raise UsageError(f"there is no check {name}", hint=hint)
    if not names:
        return [check for check in checks if check.by_default]
    return [check for check in checks if check.name in names or (check.group in names and check.by_default)]


def examine(subject: Subject, checks: Sequence[Check]) -> list[Result]:
    """Runs them all at once; each has an answer after `subject.limit_s` at the latest. Raises nothing."""
    return asyncio.run(_examine(subject, checks))


class _Threads(ThreadPoolExecutor):
    """A thread for each call, which the interpreter does not wait for at its end.

    One that hangs (a network disk, a name that is not resolved) holds up neither the others nor the exit.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="hive-doctor", daemon=True).start()
        return future


async def _examine(subject: Subject, checks: Sequence[Check]) -> list[Result]:
    asyncio.get_running_loop().set_default_executor(_Threads())
    subject = await _with_offline(subject)
    return await asyncio.gather(*(_look(subject, check) for check in checks))


async def _with_offline(subject: Subject) -> Subject:
    """The same with what `hive status` says of a Hive that nobody answers for; as it is where that takes too long."""
    if subject.paths is None or subject.socket is not None or subject.health is not None:
        return subject
    try:
        async with asyncio.timeout(subject.limit_s):
            seen = await asyncio.to_thread(look_at, subject)
    except TimeoutError:
        return subject
    return msgspec.structs.replace(subject, offline=conditions_of(seen, DependencyDown.code))


async def _look(subject: Subject, check: Check) -> Result:
    began = time.monotonic()
    try:
        async with asyncio.timeout(subject.limit_s):
            if inspect.iscoroutinefunction(check.look):
                verdict = await cast(Awaitable[CheckVerdict], check.look(subject))
            else:
                blocking = cast(Callable[[Subject], CheckVerdict], check.look)
                verdict = await asyncio.to_thread(blocking, subject)
    except TimeoutError:
        verdict = wrong("check_late", check=check.name, limit_s=subject.limit_s)
    except PermissionError as error:
        verdict = unseen(f"this user may not look: {_of(error)}", check.name)
    except NotPermitted as error:
        verdict = unseen(error.message, check.name)
    except HiveError as error:
        verdict = wrong("check_failed", why=error.message, hint=error.hint)
    except OSError as error:
        verdict = wrong("check_blocked", why=_of(error))
    except Exception as error:
        if os.environ.get("HIVE_DEBUG"):
            traceback.print_exc()
        verdict = wrong("check_broken", check=check.name, why=f"{type(error).__name__}: {error}")
    ms = round((time.monotonic() - began) * 1000, 1)
    found = None if verdict.found is None else verdict.found.at(subject.where)
    fix = subject.where.typed(verdict.fix) if found is None else found.fix
    return Result(
        name=check.name,
        status=verdict.status,
        reason=verdict.reason,
        fix=fix,
        ms=ms,
        found=found,
        is_unseen=verdict.is_unseen,
    )


def _of(error: OSError) -> str:
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why


def mend(subject: Subject, results: Sequence[Result]) -> list[Result]:
    """Repairs what can be repaired of `results` and looks again; a repair that fails is said in its reason."""
    by_name = {check.name: check for check in CHECKS}
    return [
        _mend(subject, by_name[result.name], result)
        if result.status in (Status.WARN, Status.FAIL) and by_name[result.name].repair is not None
        else result
        for result in results
    ]


def _mend(subject: Subject, check: Check, result: Result) -> Result:
    assert check.repair is not None
    try:
        done = check.repair(subject)
    except HiveError as error:
        return msgspec.structs.replace(result, reason=f"{result.reason}; not fixed: {error.message}")
    except OSError as error:
        return msgspec.structs.replace(result, reason=f"{result.reason}; not fixed: {_of(error)}")
    again = examine(subject, [check])[0]
    return msgspec.structs.replace(again, fixed=done)


def is_well(results: Sequence[Result], *, strict: bool) -> bool:
    """Whether nothing failed; with `strict` nor warned.

    >>> warning = Result(name="a.b", status=Status.WARN, reason="")
    >>> is_well([warning], strict=False), is_well([warning], strict=True)
    (True, False)
    """
    bad = {Status.FAIL, Status.WARN} if strict else {Status.FAIL}
    return not any(result.status in bad for result in results)
