"""Looking at a running server: gathers the facts for its judge, and carries out what it says about requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from hive.tasks import spawn
from hive.worker.child import ServerProcess
from hive.worker.judge import FailReason, ServerFacts, burns, has_place, judge, left_owed
from hive.worker.profile import TimeoutProfile
from hive.worker.stream import Clock, Progress

DEATH_S = 0.5
"""A server that dies lets go of its socket before its end is known: so long is waited for that."""
BETWEEN_SAMPLES_S = 0.1
"""Shortest time over which CPU time, counted in ticks of 10 ms, says something."""


class ServerWatch:
    """One running server. `requests()`: those under way, by id; `fail`: ends those that are late.

    While nothing is asked of the server, nothing is looked at.
    """

    def __init__(
        self,
        process: ServerProcess,
        profile: TimeoutProfile,
        *,
        places: int,
        requests: Callable[[], Mapping[int, Progress]],
        fail: Callable[[Mapping[int, FailReason]], None],
        clock: Clock,
    ) -> None:
        self._process = process
        self._profile = profile
        self._places = places
        self._requests = requests
        self._fail = fail
        self._clock = clock
        self._woken = asyncio.Event()
        self._is_refusing = False
        self._owed_since: float | None = None
        self._left_owed_at: float | None = None
        """Time at which a request was failed that is owed still."""
        self._moved_at: float | None = None
        self.burnt_at: float | None = None
        """Last time its process was seen to burn CPU."""
        self._sampled_at: float | None = None
        self._sampled_from: float | None = None
        """Beginning of the last time over which CPU was measured."""
        self._cpu_s = 0.0
        self._is_idle = True
        """True while there is no request at all; one whose tools run is owed nothing, and has its whole time."""
        self._looked_at = clock()

    def __repr__(self) -> str:
        return f"<ServerWatch of {self._process!r}, owed since {self._owed_since}>"

    def wake(self) -> None:
        """Something is asked of the server from now on."""
        self._woken.set()

    def refused(self) -> None:
        """Nobody listened at its socket."""
        self._is_refusing = True
        self._woken.set()

    def moved(self, progress: Progress) -> None:
        """A request, or a turn of one, has ended by itself; it may have come and gone between two looks."""
        at = progress.facts().moved_at
        if at is not None:
            self._moved_at = max(at, self._moved_at or at)

    async def until_over(self) -> FailReason:
        """Returns the reason for which the server is to be ended, or has ended."""
        ended = spawn(self._process.ended.wait(), name="server-ended")
        try:
            while True:
                if (reason := await self._look()) is not None:
                    return reason
                woken = spawn(self._woken.wait(), name="watch-woken")
                try:
                    timeout = None if self._is_idle else self._profile.look_every_s
                    await asyncio.wait({ended, woken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
                self._woken.clear()
        finally:
            ended.cancel()

    async def _look(self) -> FailReason | None:
        if self._is_refusing and self._process.is_alive():
            await self._process.has_ended(within_s=DEATH_S)
        now = self._clock()
        requests = dict(self._requests())
        self._charge_waits(requests, now - self._looked_at)
        self._looked_at = now
        facts = {key: progress.facts() for key, progress in requests.items()}
        self._note_debt(requests)
        self._is_idle = not requests and self._owed_since is None
        self._sample_cpu(now)
        verdict = judge(
            ServerFacts(
                is_alive=self._process.is_alive(),
                requests=facts,
                burnt_at=self.burnt_at,
                owed_since=self._owed_since,
                moved_at=self._moved_at,
                is_refusing=self._is_refusing,
            ),
            self._profile,
            now=now,
        )
        if verdict.failed:
            for key in verdict.failed:
                self.moved(requests[key])
                if left_owed(facts[key], self.burnt_at, still_from=self._sampled_from):
                    self._left_owed_at = now
            self._fail(verdict.failed)
        return verdict.end

    def _charge_waits(self, requests: Mapping[int, Progress], passed_s: float) -> None:
        everyone = [progress.facts() for progress in requests.values()]
        for progress in requests.values():
            if progress.connected_at is None or progress.headed_at is not None:
                continue
            if has_place(progress.asked_at, everyone, places=self._places):
                waited_s = min(passed_s, self._looked_at + passed_s - progress.connected_at)
                progress.waited_for_head_s += max(0.0, waited_s)

    def _note_debt(self, requests: Mapping[int, Progress]) -> None:
        if self._left_owed_at is not None:
            moves = [self._moved_at, *(progress.facts().moved_at for progress in requests.values())]
            if any(at is not None and at > self._left_owed_at for at in moves):
                self._left_owed_at = None
        if owing := [progress.asked_at for progress in requests.values() if not progress.is_answered]:
            if self._owed_since is None:
                self._owed_since = min(owing)
        elif self._left_owed_at is None:
            self._owed_since = None

    def _sample_cpu(self, now: float) -> None:
        """CPU burnt between two looks; after a time in which nothing was looked at, a new beginning."""
        if self._owed_since is None:
            self._sampled_at = self._sampled_from = None
            return
        if self._sampled_at is None:
            self._sampled_at, self._cpu_s = now, self._process.cpu_s()
            return
        over_s = now - self._sampled_at
        every_s = min(self._profile.liveness_probe_interval_s, 4 * self._profile.look_every_s)
        if over_s >= max(BETWEEN_SAMPLES_S, every_s):
            cpu_s = self._process.cpu_s()
            if burns(cpu_s - self._cpu_s, over_s):
                self.burnt_at = now
            self._sampled_from, self._sampled_at, self._cpu_s = self._sampled_at, now, cpu_s
