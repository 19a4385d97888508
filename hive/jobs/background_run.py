"""One job of the form RESPONSES: a request to `/v1/responses` that was asked with `background`."""

from __future__ import annotations

from hive.jobs.access import JobAccess
from hive.jobs.ending import JobEnding, failed
from hive.jobs.order import JobWork
from hive.jobs.telling import Telling


async def run_response(work: JobWork, access: JobAccess, telling: Telling) -> JobEnding:  # noqa: ARG001
    """The job, from its request to its end."""
    return failed("not_supported", "jobs of the form responses are not there yet")
