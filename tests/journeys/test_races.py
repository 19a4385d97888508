"""Pause against request, a thousand times, through the real daemon, proxy, helper and process agents."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import count

import pytest

from hive.errors import HiveError
from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until

ROUNDS = int(os.environ.get("HIVE_RACE_ROUNDS", "1000"))
FAST_S, SLOW_S = 0.04, 1.08
"""Between the requests of one agent; a kept TCP connection bars sleep for 1 s after an answer, so it gets longer."""
AGENTS = [
    ("unix", "keep", FAST_S, 0.27),
    ("unix", "new", FAST_S, 0.27),
    ("tcp", "new", FAST_S, 0.26),
    *[("tcp", "keep", SLOW_S, 0.04)] * 5,
]
"""Listener, connections, period, share of all rounds."""
HUNG_S = 5.0
"""A request that was forgotten at a gate waits longer: until another one opens it, or for all the time it has."""


class Driver(threading.Thread):
    """Pauses one agent around the moments it announced, and resumes it where nothing else would."""

    def __init__(self, hive: Stack, name: str, rounds: int) -> None:
        super().__init__(name=name)
        self._hive = hive
        self.rounds = rounds
        self._chance = random.Random(name)
        self.resumed_at: dict[int, float] = {}
        self.slept = self.busy = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for number in range(2, self.rounds + 2):
                self._race(number)
        except BaseException as error:
            self.failure = error

    def _race(self, number: int) -> None:
        lines = until(lambda: self._about(number), within_s=10, what=f"{self.name} announces round {number}")
        pause_at = lines[0]["at"] + self._chance.uniform(-0.005, 0.020)
        time.sleep(max(0.0, pause_at - time.monotonic()))
        try:
            self._hive.post(f"/api/agents/{self.name}/pause", {"now": True})
            self.slept += 1
        except HiveError as error:
            if error.code != "busy":
                raise
            self.busy += 1
        self._wake_if_nothing_does(number)
        looks = count(1)
        until(lambda: self._has_ended(number, next(looks)), within_s=10, what=f"{self.name} ends round {number}")

    def _wake_if_nothing_does(self, number: int) -> None:
        view = self._hive.get(f"/api/agents/{self.name}")
        if view["status"] == "paused" and not view["parked"] and not view["in_flight"]:
            self._hive.post(f"/api/agents/{self.name}/resume")
            self.resumed_at[number] = time.monotonic()

    def _has_ended(self, number: int, look: int) -> bool:
        """Asks once more each second: what the daemon told first may have been of a request that had just ended."""
        if len(self._about(number)) > 1:
            return True
        if look % 50 == 0:
            self._wake_if_nothing_does(number)
        return False

    def _about(self, number: int) -> list[dict[str, float]]:
        return [
            line
            for line in self._hive.agent_lines_since(self.name)
            if line.get("announced") == number or line.get("number") == number
        ]


@pytest.mark.redis
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_no_request_is_lost_delayed_or_refused_whenever_a_pause_meets_it() -> None:
    with fake_backend("llama", "--slow-head", "0.006") as backend, stack(url=backend.url) as hive:
        drivers = []
        for number, (kind, keep, period_s, share) in enumerate(AGENTS):
            name = f"{kind}-{keep}-{number}"
            hive.create(name, "racer.py", kind, keep, str(period_s), tier="high")
            drivers.append(Driver(hive, name, round(ROUNDS * share)))
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
        assert [driver.failure for driver in drivers] == [None] * len(drivers)
        for driver in drivers:
            _check(hive, driver)
        print({driver.name: f"{driver.slept} slept, {driver.busy} busy" for driver in drivers})
        assert sum(driver.slept for driver in drivers) > ROUNDS // 20, "some pauses came first"
        assert sum(driver.busy for driver in drivers) > ROUNDS // 20, "some requests came first"
        for view in hive.get("/api/agents")["agents"]:
            assert not (view["status"] == "paused" and view["parked"]), view


def _check(hive: Stack, driver: Driver) -> None:
    rounds = [line for line in hive.agent_lines(driver.name) if "number" in line]
    assert len(rounds) >= driver.rounds
    for line in rounds:
        assert (line["status"], line["error"]) == (200, None), (driver.name, line)
        begun = max(line["begun"], driver.resumed_at.get(line["number"], 0.0))
        assert line["ended"] - begun <= HUNG_S, (driver.name, line, begun)
