"""Outputs of ended model jobs: the oldest go beyond the bound, and files of jobs that are on record no more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from hive.errors import HiveError
from hive.lifecycle import job_output
from hive.store import job_turns
from hive.store.database import Database

log = logging.getLogger("hive.daemon")

MIB = 1024 * 1024


class KeptOutputs:
    """`kept_mb`: the bound of all outputs together. `is_running`: whether the job of this id has not ended."""

    def __init__(
        self, directory: Path, database: Database, kept_mb: Callable[[], int], *, is_running: Callable[[str], bool]
    ) -> None:
        self._directory = directory
        self._database = database
        self._kept_mb = kept_mb
        self._is_running = is_running
        self._alone = asyncio.Lock()
        self._asked = 0

    def __repr__(self) -> str:
        return f"<KeptOutputs in {self._directory}>"

    async def tidy(self) -> None:
        """Takes away what has to go. Of several calls at once the last one does the work."""
        self._asked += 1
        mine = self._asked
        async with self._alone:
            if mine != self._asked:
                return
            try:
                await self._tidy_now()
            except (HiveError, OSError) as error:
                log.warning("jobs_not_pruned error=%s", error)

    async def _tidy_now(self) -> None:
        """Raises what disk and database do. Files are listed before the table is read: what is on disk by then was on
        record before."""
        sizes = await asyncio.to_thread(job_output.sizes, self._directory)
        known, ended = await self._database.read(lambda conn: (job_turns.ids(conn), job_turns.ended_first(conn)))
        left = sum(sizes.values()) - self._kept_mb() * MIB
        goes = [job for job in sizes if job not in known]
        for job in ended:
            if left <= 0:
                break
            if job in sizes and not self._is_running(job):
                goes.append(job)
                left -= sizes[job]
        for job in goes:
            await asyncio.to_thread(job_output.remove, self._directory, job)
