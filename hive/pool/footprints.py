"""The memory and the time of a model, as they were measured: learnt at each load. Pure."""

from __future__ import annotations

import msgspec

SAMPLES = 20
"""Loads that are remembered: their times give the median and the p95."""
AFTER_OOM = 1.25
"""Factor on a charge that was too small for a load."""


class FootprintKey(msgspec.Struct, frozen=True):
    """All that a model's memory depends on. A draft model and adapters are a part of it, and of the charge."""

    digest: str
    kind: str
    context: int
    parallel: int = 1
    kv_type: str = ""
    draft: str = ""
    adapters: tuple[str, ...] = ()
    gpu: str = ""


class SleepFootprint(msgspec.Struct, frozen=True):
    """Measurements of one level of sleep. `kept_bytes`: the most that stayed in all its accounts together, None if it
    was never measured; `wake_s`: the newest wakes, oldest first.

    `why_banned`: why it is not used any more, a clause; empty if it may be. `banned_version`: of the server for which
    that holds: another one may do better.
    """

    level: str
    kept_bytes: int | None = None
    wake_s: tuple[float, ...] = ()
    why_banned: str = ""
    banned_version: str = ""

    @property
    def wake_p95_s(self) -> float | None:
        """The wake that one in twenty exceeds; None if none was measured."""
        return quantile(self.wake_s, 0.95)


class Footprint(msgspec.Struct, frozen=True):
    """Measurements of one key. `peak_bytes`: the most ever; `steady_bytes`: after the last load; `load_s`, `unload_s`:
    the newest of each, oldest first; `sleeps`: one for each level of sleep that something is known of."""

    key: FootprintKey
    peak_bytes: int = 0
    steady_bytes: int = 0
    load_s: tuple[float, ...] = ()
    sleeps: tuple[SleepFootprint, ...] = ()
    unload_s: tuple[float, ...] = ()

    def after_load(self, steady_bytes: int, peak_bytes: int, load_s: float) -> Footprint:
        """The footprint with one measured load more; the peak never falls.

        >>> key = FootprintKey("sha256:1", "llama", 4096)
        >>> learnt = Footprint(key).after_load(900, 1000, 12.0).after_load(880, 950, 14.0)
        >>> learnt.peak_bytes, learnt.steady_bytes, learnt.load_s
        (1000, 880, (12.0, 14.0))
        """
        return msgspec.structs.replace(
            self,
            peak_bytes=max(self.peak_bytes, peak_bytes, steady_bytes),
            steady_bytes=steady_bytes,
            load_s=(*self.load_s, load_s)[-SAMPLES:],
        )

    def after_peak(self, peak_bytes: int) -> Footprint:
        """The footprint after more memory was seen while it served."""
        return msgspec.structs.replace(self, peak_bytes=max(self.peak_bytes, peak_bytes))

    def sleep(self, level: str) -> SleepFootprint:
        """The measurements of this level; none where it was never used."""
        return next((sleep for sleep in self.sleeps if sleep.level == level), SleepFootprint(level))

    def after_sleep(self, level: str, kept_bytes: int) -> Footprint:
        """The footprint after it fell asleep and so much stayed; the most that stayed counts.

        >>> slept = Footprint(FootprintKey("sha256:1", "vllm", 4096)).after_sleep("1", 900).after_sleep("1", 700)
        >>> slept.sleep("1").kept_bytes, slept.sleep("2").kept_bytes
        (900, None)
        """
        known = self.sleep(level)
        return self._with(msgspec.structs.replace(known, kept_bytes=max(known.kept_bytes or 0, kept_bytes)))

    def after_wake(self, level: str, wake_s: float) -> Footprint:
        """The footprint with one measured wake more."""
        known = self.sleep(level)
        return self._with(msgspec.structs.replace(known, wake_s=(*known.wake_s, wake_s)[-SAMPLES:]))

    def after_ban(self, level: str, why: str, version: str) -> Footprint:
        """The footprint after this level was found not to work with this version of the server."""
        return self._with(msgspec.structs.replace(self.sleep(level), why_banned=why, banned_version=version))

    def _with(self, sleep: SleepFootprint) -> Footprint:
        others = (other for other in self.sleeps if other.level != sleep.level)
        return msgspec.structs.replace(self, sleeps=(*others, sleep))

    def after_unload(self, unload_s: float) -> Footprint:
        """The footprint with one measured unload more: from the order to stop until its memory was back."""
        return msgspec.structs.replace(self, unload_s=(*self.unload_s, unload_s)[-SAMPLES:])

    def after_oom(self, charged_bytes: int) -> Footprint:
        """The footprint after a load that died for memory under this charge: the next try is charged more.

        >>> Footprint(FootprintKey("sha256:1", "llama", 4096)).after_oom(1000).peak_bytes
        1250
        """
        return self.after_peak(int(max(charged_bytes, self.peak_bytes) * AFTER_OOM))

    @property
    def load_p50_s(self) -> float | None:
        """The median load; None if none was measured."""
        return quantile(self.load_s, 0.5)

    @property
    def load_p95_s(self) -> float | None:
        """The load that one in twenty exceeds; of fewer, the longest."""
        return quantile(self.load_s, 0.95)

    @property
    def unload_p95_s(self) -> float | None:
        """The unload that one in twenty exceeds; None if none was measured.

        >>> key = FootprintKey("sha256:1", "llama", 4096)
        >>> Footprint(key).unload_p95_s, Footprint(key).after_unload(0.2).after_unload(0.3).unload_p95_s
        (None, 0.3)
        """
        return quantile(self.unload_s, 0.95)


def quantile(values: tuple[float, ...], part: float) -> float | None:
    """The smallest value that at least `part` of all do not exceed.

    >>> quantile((3.0, 1.0, 2.0), 0.5), quantile((3.0, 1.0, 2.0), 0.95), quantile((), 0.5)
    (2.0, 3.0, None)
    """
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * int(part * 100) // 100) - 1)]
