"""The line of model jobs that wait for a place: which one is next. Pure.

The proxy queues requests fairly, and a job that has no place asks nothing: so places are given fairly, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hive.domain import Band
from hive.lifecycle.job_runs import JobRun

BANDS = tuple(Band)
OF_ONE_AGENT = 0.5
"""Share of the places that what one agent has begun for itself may take."""


def next_of(waiting: Iterable[JobRun], started: Sequence[JobRun], places: int) -> JobRun | None:
    """The job that is given a place now; None where there is none for any.

    Of those that may have one it is that of the tenant with the fewest, then of the agent with the fewest, then of the
    higher band, then the earliest. Jobs below others have as many places of their own: the call that they answer waits
    for them, and its job holds a place.
    """
    tops = [run for run in started if run.parent is None]
    has_place = {False: len(tops) < places, True: len(started) - len(tops) < places}
    tenants = Counter(run.tenant for run in started)
    agents = Counter(run.begun_by for run in started if run.begun_by)
    most = max(1, int(places * OF_ONE_AGENT))
    may = [
        run
        for run in waiting
        if has_place[run.parent is not None] and (run.parent is not None or agents[run.begun_by] < most)
    ]
    return min(
        may, key=lambda run: (tenants[run.tenant], agents[run.begun_by], BANDS.index(run.order.priority)), default=None
    )
