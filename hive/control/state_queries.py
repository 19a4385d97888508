"""Hive's own state, read with SQL: each question is a process of its own, which the kernel limits and the daemon kills.

What may be read and how it is bounded is in hive/store/query_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.errors import HiveError, Saturated, TimedOut, by_code
from hive.host.process import spawn
from hive.store.query_process import QueryHead, QueryOrder

log = logging.getLogger("hive.daemon")

AT_ONCE = 2
"""Questions; one more is refused, because each may take 256 MiB and a core."""
LOOK_S = 10.0
"""For what is no query: the names of tables, and how large they are."""
START_S = 5.0
"""A process starts within 0.1 s; on a loaded box later."""
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LANG")


class Answered(NamedTuple):
    """`text`: the answer as JSON; `rows`: of a query."""

    text: bytes
    rows: int = 0


class StateQueries:
    """`database`: the file; `responses`: the file of kept responses, open so that it can be read, None without one."""

    def __init__(self, database: Path, responses: Callable[[], Coroutine[Any, Any, Path | None]]) -> None:
        self._database = database
        self._responses = responses
        self._running = 0

    def __repr__(self) -> str:
        return f"<StateQueries {self._running}/{AT_ONCE} running>"

    async def tables(self) -> Answered:
        """Every table. Raises as `query`."""
        return await self._ask(await self._order("tables", timeout_s=LOOK_S))

    async def schema(self, tables: Sequence[str]) -> Answered:
        """The statements that make these tables, or all. Raises NotFound, and as `query`."""
        return await self._ask(await self._order("schema", timeout_s=LOOK_S, tables=[*tables]))

    async def query(
        self,
        sql: str,
        params: dict[str, str | int | float | bool | None],
        *,
        limit: int,
        timeout_s: float,
        secrets: bool,
    ) -> Answered:
        """Answer to one statement. A caller that is cancelled ends it.

        Raises BadRequest, NotPermitted for what does not only read, TooLarge, TimedOut, Saturated.
        """
        order = await self._order("query", sql=sql, params=params, limit=limit, timeout_s=timeout_s, secrets=secrets)
        return await self._ask(order)

    async def _order(self, what: str, **asked: object) -> QueryOrder:
        responses = await outcome_of(self._responses())
        path = "" if responses is None or isinstance(responses, HiveError) else str(responses)
        return msgspec.convert(
            {"what": what, "database": str(self._database), "responses": path, **asked}, type=QueryOrder
        )

    async def _ask(self, order: QueryOrder) -> Answered:
        if self._running >= AT_ONCE:
            raise Saturated(f"{AT_ONCE} questions are put to the database already", retry_after_s=1)
        with contextlib.ExitStack() as undo:
            order_fd = os.memfd_create("hive-query", os.MFD_CLOEXEC)
            undo.callback(os.close, order_fd)
            answer_fd = os.memfd_create("hive-answer", os.MFD_CLOEXEC)
            undo.callback(os.close, answer_fd)
            os.pwrite(order_fd, msgspec.json.encode(order), 0)
            try:
                code = await self._run(order_fd, answer_fd, within_s=order.timeout_s + START_S)
            except TimeoutError:
                raise TimedOut(
                    f"the query did not end within {order.timeout_s:g} s", hint="--timeout, or ask for less of it"
                ) from None
            text = os.pread(answer_fd, os.fstat(answer_fd).st_size, 0)  # 8 MiB at most
        return _answered(text, code)

    async def _run(self, order_fd: int, answer_fd: int, *, within_s: float) -> int:
        """The exit code of the process that reads. Raises TimeoutError; whoever leaves first, it is killed."""
        process = spawn(
            [sys.executable, "-P", "-m", "hive.store.query_process", str(order_fd), str(answer_fd)],
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            keep_fds=[order_fd, answer_fd],
            pdeathsig=signal.SIGKILL,
            no_new_privs=True,
        )
        try:
            ended = self._reaped(process)
        except OSError:
            process.kill()
            process.wait()
            raise
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(ended)
        finally:
            if not ended.done():
                process.kill()

    def _reaped(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """Its exit code, once it has ended. It counts as running until then, killed or not."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._running -= 1
            ended.set_result(process.wait())

        loop.add_reader(pidfd, reap)
        self._running += 1
        return ended


def _answered(text: bytes, code: int) -> Answered:
    """Raises the error that the process told, or HiveError where it ended without a word."""
    line, _, rest = text.partition(b"\n")
    if code != 0 or not line:
        log.warning("query_failed code=%d", code)
        raise HiveError(f"the process that reads the database ended (code {code}); the daemon's log may say why")
    head = msgspec.json.decode(line, type=QueryHead)
    if head.code:
        raise by_code(head.code)(head.message, hint=head.hint)
    return Answered(rest, head.rows)
