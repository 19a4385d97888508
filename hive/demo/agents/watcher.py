"""The watcher looks at its series every few seconds by itself, and reports when asked."""

from __future__ import annotations

import hashlib
import threading
import time

SENSORS = 900
SAMPLES = 2_600
EVERY_S = 5.0


class Watcher:
    """About 90 MiB: a series of float samples per sensor, the sum of each kept beside it.

    Its own thread checks a few series every `EVERY_S` seconds while awake: well under a thousandth of a core, so it
    keeps nobody from finding it idle, and asleep it does not tick.
    """

    name = "watcher"

    def __init__(self) -> None:
        self._series = [series(sensor) for sensor in range(SENSORS)]
        self._sums = [sum(samples) for samples in self._series]
        self._ticks = 0
        self._broken = 0
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def size(self) -> int:
        return SENSORS * SAMPLES

    def prompt(self, say: str) -> str:
        sensor = (len(say) * 13 + self._ticks) % SENSORS
        mean = self._sums[sensor] / SAMPLES
        return f"Sensor {sensor} has a mean of {mean:.4f} after {self._ticks} looks. The operator says: {say}"

    def learn(self, say: str) -> None:
        """The watcher remembers nothing but its series."""

    def spot_check(self, turn: int) -> bool:
        """Whether 8 series, other ones each turn, are unchanged, and no look by itself found one that was not."""
        places = [(turn * 101 + step * 7) % SENSORS for step in range(8)]
        return self._broken == 0 and all(self._series[place] == series(place) for place in places)

    def _watch(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self._ticks += 1
            for step in range(4):
                place = (self._ticks * 4 + step) % SENSORS
                if sum(self._series[place]) != self._sums[place]:
                    self._broken += 1


def series(sensor: int) -> list[float]:
    """The samples of one sensor, the same each time."""
    seed = int.from_bytes(hashlib.sha256(b"sensor %d" % sensor).digest()[:8], "big")
    samples = []
    for _ in range(SAMPLES):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        samples.append(seed / 2**64)
    return samples
