"""The places of a cluster, by what its engine tells of it from look to look. Pure.

Fewer replicas count at the first look that finds them: a request too many waits where its turn is nobody's choice. More
of them count at the second one: a replica that comes and goes is none.
"""

from __future__ import annotations

import msgspec

from hive.domain import Cluster, ClusterNode
from hive.settings.table import InferenceSection

LABELS = {"router": "vLLM Router", "ray": "Ray Serve", "vllm": "vLLM's data parallelism"}
"""The engines, as people know them."""
MOST_NAME = 60
"""Characters of a name that are shown to somebody."""
MOST_COUNT = 10**9
"""Of whatever an engine counts: it travels to the proxy and to clients."""
LOOK_S = 2.0
"""An engine answers a look within it, on whichever host it is."""
KNOWN_FOR_S = 10.0
"""So long what an engine told last is taken for true where it does not answer."""


class ClusterLook(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an engine at one look; the fields that `Cluster` has, too, are the same.

    `places`: requests that all running replicas work on at once. `starts_when_asked`: a replica starts once a request
    comes, so that none runs now is no reason to send none. `why_none`: what there is no place for want of, a clause.
    """

    engine: str
    wanted: int
    running: int
    slots_each: int
    places: int
    nodes: tuple[ClusterNode, ...] = ()
    stuck: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    waiting: int | None = None
    waited_s: float | None = None
    starts_when_asked: bool = False
    why_none: str = ""


class Capacity(msgspec.Struct, frozen=True):
    """The places after a look: None where the setting for one server decides. `places_from` says where the number comes
    from; `warning`: why it is not what the engine tells, empty where it is. `cluster`: None before the first answer."""

    places: int | None = None
    places_from: str = ""
    cluster: Cluster | None = None
    warning: str = ""


def slots_of(told: int, inference: InferenceSection) -> int:
    """Requests that one replica works on at once. `told`: by its engine, 0 for nothing.

    >>> default, set_to_4 = InferenceSection(), InferenceSection(slots_per_replica=4)
    >>> slots_of(8, default), slots_of(0, default), slots_of(8, set_to_4)
    (8, 64, 4)
    """
    return inference.slots_per_replica or told or inference.vllm_max_sequences


def shown(name: str) -> str:
    """A name as its engine has it, fit for a terminal.

    >>> shown("10.0.0.1"), shown("a\\x1b[2J"), len(shown("x" * 300))
    ('10.0.0.1', '?', 60)
    """
    return name[:MOST_NAME] if name.isprintable() else "?"


class CapacityMeter:
    """Makes places of the looks at one cluster. `now` is monotonic, `at` are Unix seconds.

    >>> def look(running):
    ...     return ClusterLook(engine="ray", wanted=2, running=running, slots_each=4, places=running * 4)
    >>> meter = CapacityMeter("ray")
    >>> [meter.see(look(running), now=float(n), at=0.0).places for n, running in enumerate((2, 1, 2, 2))]
    [8, 4, 4, 8]
    >>> meter.see(None, now=9.0, at=0.0).places, meter.see(None, now=14.0, at=0.0).places
    (8, None)
    >>> meter.see(look(0), now=15.0, at=0.0).places, meter.see(look(0), now=16.0, at=0.0, tokens_come=True).places
    (0, 4)
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._taken: ClusterLook | None = None
        """The look whose places are in force."""
        self._before: ClusterLook | None = None
        """The look before, where it found more than that."""
        self._cluster: Cluster | None = None
        self._answered_at = float("-inf")
        self._nodes: dict[str, None] = {}
        """Those that had a replica since all of them ran."""

    def __repr__(self) -> str:
        held = "nothing" if self._taken is None else f"{self._taken.places} places"
        return f"<CapacityMeter {self.engine} {held}>"

    def see(
        self, look: ClusterLook | None, *, now: float, at: float, tokens_come: bool = False, silent: str = ""
    ) -> Capacity:
        """The places after `look`, None where the engine did not answer: `silent` says what was asked in vain.
        `tokens_come`: a byte of an answer came back since the look before."""
        if look is None:
            return self._unanswered(now, silent)
        self._answered_at = now
        if self._taken is None or look.places <= self._taken.places:
            self._taken, self._before = look, None
        elif self._before is None:
            self._before = look
        else:  # both found more: what both found
            self._taken, self._before = min(self._before, look, key=lambda one: one.places), None
        self._cluster = self._cluster_of(look, at)
        return self._capacity(self._taken, self._cluster, tokens_come)

    def _cluster_of(self, look: ClusterLook, at: float) -> Cluster:
        """A node that has gone is shown as one that is down for as long as replicas are missing."""
        if look.running >= look.wanted:
            self._nodes.clear()
        self._nodes |= dict.fromkeys(node.name for node in look.nodes)
        there = {node.name: node for node in look.nodes}
        nodes = tuple(there.get(name, ClusterNode(name, up=False, replicas=0)) for name in sorted(self._nodes))
        return Cluster(
            engine=look.engine,
            wanted=max(0, min(look.wanted, MOST_COUNT)),
            running=look.running,
            slots_each=look.slots_each,
            nodes=nodes,
            stuck=look.stuck,
            asked_at=at,
            notes=look.notes,
            waiting=None if look.waiting is None else max(0, min(look.waiting, MOST_COUNT)),
            waited_s=look.waited_s,
        )

    def _capacity(self, taken: ClusterLook, cluster: Cluster, tokens_come: bool) -> Capacity:
        label, one = LABELS[self.engine], max(1, taken.slots_each)
        told = f"{taken.running} of {taken.wanted} replicas"
        if taken.places:
            each = f" x {taken.slots_each}" if taken.places == taken.running * taken.slots_each else ""
            return Capacity(taken.places, f"{told}{each}, told by {label}", cluster)
        if taken.starts_when_asked:
            return Capacity(one, f"{told}, told by {label}: one x {one} starts when it is asked", cluster)
        if tokens_come:
            return Capacity(one, f"{told}, told by {label}, but tokens come back: as one x {one}", cluster)
        why = f"{label} runs {told}"
        if taken.why_none:
            why += f": {taken.why_none}"
        if taken.stuck:
            why += f"; tokens stand still at rank {', '.join(taken.stuck)}"
        return Capacity(0, f"{told}, told by {label}", msgspec.structs.replace(cluster, why_none=why))

    def _unanswered(self, now: float, silent: str) -> Capacity:
        if self._taken is None:
            return Capacity(warning=self._silence(silent))
        assert self._cluster is not None
        self._before = None
        if now - self._answered_at <= KNOWN_FOR_S:
            return self._capacity(self._taken, self._cluster, tokens_come=False)
        return Capacity(cluster=self._cluster, warning=self._silence(silent))

    def _silence(self, silent: str) -> str:
        asked = f": {silent}" if silent else ""
        return f"{LABELS[self.engine]} does not tell how many replicas run{asked}; Hive sends as to one server"
