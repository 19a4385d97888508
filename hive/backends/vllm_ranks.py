"""The ranks of vLLM's own data parallelism (0.32), each an `engine` in its metrics, and those that stand still. Pure.

A rank whose host has died keeps its requests for ever, and `/health` stays 200: nobody but its counters tells.
"""

from __future__ import annotations

import re

import msgspec

from hive.backends.capacity import LOOK_S, ClusterLook, shown, slots_of
from hive.backends.conversation import AskedServer, Conversation, get
from hive.errors import BackendDown
from hive.settings.table import InferenceSection

ENGINE = "vllm"
METRICS = "/metrics"
STUCK_AFTER_S = 15.0
MOST = 1e15
"""No count is as high."""
_MOVES = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
)
"""Numbers that change while a rank works. The last one does while a long prompt is read, piece by piece: no token comes
of that, and it is no standstill."""
_RUNS, _WAITS = "vllm:num_requests_running", "vllm:num_requests_waiting"
_QUEUED_S, _QUEUED = "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count"
_ROW = re.compile(rb"^(vllm:[a-z_]+)\{([^}]*)\} +([0-9.e+-]{1,30})", re.MULTILINE)
_RANK = re.compile(rb'(?:^|,)engine="([^"]{1,20})"')
_READ = frozenset({*_MOVES, _RUNS, _WAITS, _QUEUED_S, _QUEUED})


class Rank(msgspec.Struct):
    """One rank at one look, summed over its other labels. `moves`: its numbers that tell of work; `queued_s` and
    `queued`: of requests that left its own queue, the seconds there and their number, since it started."""

    moves: tuple[float, ...] = (0.0,) * len(_MOVES)
    running: float = 0.0
    waiting: float = 0.0
    queued_s: float = 0.0
    queued: float = 0.0


def ranks_in(exposition: bytes) -> dict[str, Rank]:
    """Rank by its number.

    >>> told = b'vllm:num_requests_running{engine="0",model_name="m"} 4.0\\n'
    >>> ranks_in(told + told.replace(b'"0"', b'"1"'))["1"].running, ranks_in(b"x 1")
    (4.0, {})
    """
    sums: dict[tuple[str, str], float] = {}
    for name, labels, value in _ROW.findall(exposition):
        rank, row = _RANK.search(labels), name.decode()
        if rank is None or row not in _READ:
            continue
        key = shown(rank[1].decode(errors="replace")), row
        try:
            number = float(value)
        except ValueError:
            continue
        if abs(number) < MOST:
            sums[key] = sums.get(key, 0.0) + number
    ranks = sorted({rank for rank, _ in sums}, key=lambda rank: (len(rank), rank))
    return {
        rank: Rank(
            moves=tuple(sums.get((rank, row), 0.0) for row in _MOVES),
            running=sums.get((rank, _RUNS), 0.0),
            waiting=sums.get((rank, _WAITS), 0.0),
            queued_s=sums.get((rank, _QUEUED_S), 0.0),
            queued=sums.get((rank, _QUEUED), 0.0),
        )
        for rank in ranks
    }


def asked(server: AskedServer) -> Conversation[dict[str, Rank]]:
    """The ranks now. Raises `BackendDown`, `BackendTimeout`."""
    answer = yield from get(METRICS, within_s=LOOK_S)
    ranks = ranks_in(answer.body) if answer.status == 200 else {}
    if not ranks:
        raise BackendDown(f"{server} tells no rank at GET {METRICS} (status {answer.status})")
    return ranks


class RankWatch:
    """Finds the ranks that have requests at work and no work done for 15 s. `now`: monotonic seconds.

    >>> watch, inference = RankWatch(), InferenceSection(slots_per_replica=8)
    >>> two = {"0": Rank((5.0,), running=4), "1": Rank((7.0,), running=4)}
    >>> watch.see(two, inference, now=0.0).places
    16
    >>> later = watch.see(two | {"0": Rank((9.0,), running=4)}, inference, now=15.0)
    >>> later.places, later.stuck
    (8, ('1',))
    """

    def __init__(self) -> None:
        self._moved: dict[str, tuple[tuple[float, ...], float]] = {}
        """Of each rank with requests: its counters, and when they were first seen so."""
        self._queued: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"<RankWatch {len(self._moved)} busy>"

    def see(self, ranks: dict[str, Rank], inference: InferenceSection, *, now: float) -> ClusterLook:
        stuck = tuple(name for name, rank in ranks.items() if self._stands_still(name, rank, now))
        for name in self._moved.keys() - ranks.keys():
            del self._moved[name]
        each, running = slots_of(0, inference), len(ranks) - len(stuck)
        return ClusterLook(
            engine=ENGINE,
            wanted=len(ranks),
            running=running,
            slots_each=each,
            places=running * each,
            stuck=stuck,
            waiting=int(sum(rank.waiting for rank in ranks.values())),
            waited_s=self._waited_s(ranks),
        )

    def _stands_still(self, name: str, rank: Rank, now: float) -> bool:
        if not rank.running:
            self._moved.pop(name, None)
            return False
        moves, since = self._moved.get(name, ((), now))
        if moves != rank.moves:
            since = now
        self._moved[name] = rank.moves, since
        return now - since >= STUCK_AFTER_S

    def _waited_s(self, ranks: dict[str, Rank]) -> float | None:
        """The mean time in the ranks' queues of those that left them since the last look."""
        now = sum(rank.queued_s for rank in ranks.values()), sum(rank.queued for rank in ranks.values())
        before, self._queued = self._queued, now
        if before is None or now[1] <= before[1]:
            return None
        return max(0.0, round((now[0] - before[0]) / (now[1] - before[1]), 3))
