"""The proxy's metrics, and their scrape: every metric is one row of TABLE.

Counting is a dict look-up and an addition, because the data path does it for every request; prometheus-client only
writes the exposition format, at a scrape. Labels are bounded: endpoints and codes come from Hive's own tables; all
others, and the 101st tenant, are counted as `other`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from hive import errors, exposition
from hive.domain import WakeCause
from hive.endpoints.endpoints import ENDPOINTS, ONE_MODEL
from hive.exposition import Histogram, MetricKind, MetricRow, Values, pieces

CONTENT_TYPE = exposition.CONTENT_TYPE.encode()
PREFIX = "hive_proxy_"
OTHER = "other"
TENANTS_MAX = 100
STATUSES_MAX = 32
"""Different statuses told apart per endpoint: a backend may answer any number from 200 to 599."""
CANCELLED_IN = ("parked", "uploading", "reading", "queued", "connecting", "waiting", "streaming", "answering")
"""States of a request at the moment its client left."""
GAVE_WAY = ("stranger", "idle")
"""Connections that end for others: those that showed no token, and idle ones of the largest holder."""
TURNED_AWAY = ("connections_max", "agent_connections_max", "unknown_cid")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets of what a request waits for and takes: from a cached answer to `first_byte_s`."""
LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


TABLE: tuple[MetricRow, ...] = (
    MetricRow(
        "requests", MetricKind.COUNTER, ("endpoint", "status"), "Requests that ended, by the status of their answer."
    ),
    MetricRow("cut", MetricKind.COUNTER, ("endpoint",), "Of those, the ones whose client did not get a whole answer."),
    MetricRow("tenant_requests", MetricKind.COUNTER, ("tenant",), "Requests that ended, by whose they were."),
    MetricRow(
        "tokens",
        MetricKind.COUNTER,
        ("direction", "tenant"),
        "Tokens of ended requests, `in` and `out`, as far as known.",
    ),
    MetricRow(
        "work",
        MetricKind.COUNTER,
        ("unit", "tenant"),
        "Work of ended requests that is no tokens: `audio_s`, `images`, and their `pixel_steps`.",
    ),
    MetricRow("refusals", MetricKind.COUNTER, ("code",), "Requests Hive itself answered with an error, by its code."),
    MetricRow("left_box", MetricKind.COUNTER, ("tenant",), "Requests that were sent to a server or model that is far."),
    MetricRow("cancels", MetricKind.COUNTER, ("state",), "Requests whose client left, by where they were then."),
    MetricRow("wakes", MetricKind.COUNTER, ("cause",), "Wakes of agents asked for by the proxy, by cause."),
    MetricRow(
        "task_steps",
        MetricKind.COUNTER,
        ("task", "from", "to", "why"),
        "Requests for a task that went on to another rung, by the rungs and the reason.",
    ),
    MetricRow("fields_dropped", MetricKind.COUNTER, (), "Fields taken out of request bodies."),
    MetricRow(
        "connections_refused", MetricKind.COUNTER, ("reason",), "Connections answered with 503 at once, by the reason."
    ),
    MetricRow(
        "connections_displaced",
        MetricKind.COUNTER,
        ("of",),
        "Connections ended for others, a `stranger` or an `idle` one.",
    ),
    MetricRow("config_reloads", MetricKind.COUNTER, (), "Configurations taken over on SIGHUP."),
    MetricRow("config_reload_failed", MetricKind.COUNTER, (), "Configurations refused on SIGHUP; the old one stayed."),
    MetricRow("usage_lost", MetricKind.COUNTER, (), "Usage events neither disk nor memory could take."),
    MetricRow(
        "responses_not_kept", MetricKind.COUNTER, (), "Responses to be kept that the daemon could not be told of."
    ),
    MetricRow(
        "request_duration_seconds",
        MetricKind.HISTOGRAM,
        ("endpoint",),
        "From a request's first byte to its answer's last.",
    ),
    MetricRow(
        "time_to_first_token_seconds",
        MetricKind.HISTOGRAM,
        ("endpoint",),
        "From a request's first byte to the answer's.",
    ),
    MetricRow("queue_wait_seconds", MetricKind.HISTOGRAM, (), "Waiting for a turn at the backend."),
    MetricRow("loop_lag_seconds", MetricKind.HISTOGRAM, (), "How late the event loop came to a timer."),
    MetricRow("queue_waiting", MetricKind.GAUGE, ("tenant",), "Requests that wait for their turn."),
    MetricRow("queue_running", MetricKind.GAUGE, ("tenant",), "Requests whose turn it is."),
    MetricRow("in_flight", MetricKind.GAUGE, (), "Requests begun and not ended, ingress included."),
    MetricRow("parked", MetricKind.GAUGE, (), "Requests that wait for their agent to wake."),
    MetricRow(
        "backend_closed", MetricKind.GAUGE, (), "Whether requests wait because the inference server is being switched."
    ),
    MetricRow(
        "slot_in_flight", MetricKind.GAUGE, ("slot", "model"), "Requests that have a place at this model's server."
    ),
    MetricRow("slot_waiting", MetricKind.GAUGE, ("slot", "model"), "Requests in line for a place, or for a load."),
    MetricRow(
        "slot_work_per_second",
        MetricKind.GAUGE,
        ("slot", "model", "unit"),
        "Work of this model's server in a second, as measured lately; of `audio_s` it is the real-time factor.",
    ),
    MetricRow("slot_open", MetricKind.GAUGE, ("slot", "model"), "Whether requests go to this model's server."),
    MetricRow(
        "slot_connections",
        MetricKind.GAUGE,
        ("slot", "model", "state"),
        "Connections to this model's server, `idle` and `busy`.",
    ),
    MetricRow("connections", MetricKind.GAUGE, (), "Connections of agents and callers."),
    MetricRow("connections_limit", MetricKind.GAUGE, (), "How many there may be."),
    MetricRow("half_open_heads", MetricKind.GAUGE, (), "Connections that sent a part of a request's head."),
    MetricRow(
        "upstream_connections", MetricKind.GAUGE, ("state",), "Connections to the active backend, `idle` and `busy`."
    ),
    MetricRow("request_body_bytes", MetricKind.GAUGE, (), "Request bodies held now."),
    MetricRow("request_body_bytes_limit", MetricKind.GAUGE, (), "How much of them may be held."),
    MetricRow("cancelling", MetricKind.GAUGE, (), "Requests that were given up and whose servers have not stopped."),
    MetricRow("upload_bytes", MetricKind.GAUGE, (), "Files of requests held on the disk now."),
    MetricRow("upload_bytes_limit", MetricKind.GAUGE, (), "How much of them may be held."),
    MetricRow("usage_backlog", MetricKind.GAUGE, (), "Usage events the daemon has not committed."),
    MetricRow("daemon_up", MetricKind.GAUGE, (), "Whether the daemon is connected."),
    MetricRow("draining", MetricKind.GAUGE, (), "Whether the proxy is on its way out."),
)
TABLE = tuple(row._replace(prefix=PREFIX) for row in TABLE)
ROWS = {row.name: row for row in TABLE}

ByLabel = Mapping[str, float] | Mapping[tuple[str, ...], float]
"""A number for each value of a row's label; of more than one label for the values of all of them."""
Reading = Callable[[], float | ByLabel]
"""The present value of a metric: a number, or for a row with labels one for each of their values."""


class _Endpoint:
    """The counters of one endpoint."""

    __slots__ = ("cut", "duration", "first", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.cut = 0
        self.duration = Histogram(SECONDS)
        self.first = Histogram(SECONDS)


class _Tenant:
    """The counters of one tenant."""

    __slots__ = ("requests", "tokens_in", "tokens_out")

    def __init__(self) -> None:
        self.requests = self.tokens_in = self.tokens_out = 0


class Metrics:
    """Everything the proxy counts. The verbs below never raise and cost about a microsecond.

    >>> metrics = Metrics()
    >>> metrics.refused("queue_full"); metrics
    <Metrics 0 requests of 0 tenants, 1 refusals>
    """

    def __init__(self) -> None:
        self._endpoints = {name: _Endpoint() for name in (*_endpoint_names(), OTHER)}
        self._other_endpoint = self._endpoints[OTHER]
        self._tenants: dict[str, _Tenant] = {}
        self._refusals = _zeros(cls.code for cls in _error_classes())
        self._cancels = _zeros(CANCELLED_IN)
        self._wakes = _zeros(WakeCause)
        self._turned_away = _zeros(TURNED_AWAY)
        self._gave_way = _zeros(GAVE_WAY)
        self._work: dict[tuple[str, ...], float] = {}
        self._steps: dict[tuple[str, ...], int] = {}
        self._fields_dropped = self._reloads = self._reloads_failed = 0
        self._queue_wait = Histogram(SECONDS)
        self._lag = Histogram(LAG_SECONDS)
        self._readings: dict[str, Reading] = {}

    def __repr__(self) -> str:
        requests = sum(tenant.requests for tenant in self._tenants.values())
        refusals = sum(self._refusals.values())
        return f"<Metrics {requests} requests of {len(self._tenants)} tenants, {refusals} refusals>"

    # counting -----------------------------------------------------------------------------------------------------

    def ended(
        self,
        endpoint: str,
        tenant: str,
        status: int,
        *,
        cut: bool,
        duration_s: float,
        ttft_s: float | None,
        tokens_in: int | None,
        tokens_out: int | None,
    ) -> None:
        """A request is over. None is unknown: it is not counted as 0."""
        counts = self._endpoints.get(endpoint, self._other_endpoint)
        try:
            counts.statuses[status] += 1
        except KeyError:
            _count_new(counts.statuses, status)
        if cut:
            counts.cut += 1
        counts.duration.observe(duration_s)
        if ttft_s is not None:
            counts.first.observe(ttft_s)
        counters = self._tenants.get(tenant) or self._tenant(tenant)
        counters.requests += 1
        if tokens_in is not None:
            counters.tokens_in += tokens_in
        if tokens_out is not None:
            counters.tokens_out += tokens_out

    def worked(self, tenant: str, unit: str, amount: float, pixel_steps: float = 0.0) -> None:
        """An ended request has cost so much of a unit that is not tokens."""
        if tenant not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            tenant = OTHER
        self._work[unit, tenant] = self._work.get((unit, tenant), 0.0) + amount
        if pixel_steps:
            self._work["pixel_steps", tenant] = self._work.get(("pixel_steps", tenant), 0.0) + pixel_steps

    def refused(self, code: str) -> None:
        """Hive itself answered with an error of this code (see hive/errors.py)."""
        _count(self._refusals, code)

    def queued(self, wait_s: float) -> None:
        """A request had its turn after so long; 0.0 where it did not have to wait."""
        self._queue_wait.observe(wait_s)

    def cancelled(self, state: str) -> None:
        """The client left while its request was there (one of CANCELLED_IN)."""
        _count(self._cancels, state)

    def dropped(self, count: int) -> None:
        """Counts fields that were taken out of a request's body."""
        self._fields_dropped += count

    def stepped(self, task: str, before: str, after: str, why: str) -> None:
        """A request for a task went from one rung to another; tasks and rungs are those of hive.conf, so few."""
        key = task, before, after, why
        self._steps[key] = self._steps.get(key, 0) + 1

    def woken(self, cause: str) -> None:
        """The daemon was asked to wake an agent."""
        _count(self._wakes, cause)

    def turned_away(self, reason: str) -> None:
        """A connection was not taken (one of TURNED_AWAY)."""
        _count(self._turned_away, reason)

    def gave_way(self, of: str) -> None:
        """A connection ended because another one needed its share of the limit (one of GAVE_WAY)."""
        _count(self._gave_way, of)

    def lag(self, lag_s: float) -> None:
        """A timer of the loop fired so late."""
        self._lag.observe(lag_s)

    def reloaded(self) -> None:
        self._reloads += 1

    def reload_failed(self) -> None:
        self._reloads_failed += 1

    def _tenant(self, name: str) -> _Tenant:
        """The tenant's counts, of the 101st on those of all others together."""
        if len(self._tenants) >= TENANTS_MAX:
            name = OTHER
        return self._tenants.setdefault(name, _Tenant())

    # a scrape -----------------------------------------------------------------------------------------------------

    def read(self, name: str, reading: Reading) -> None:
        """Sets the source of `name`, a row of TABLE that is not counted here: the value of `reading()` at each
        scrape."""
        self._readings[ROWS[name].name] = reading

    def exposition(self) -> Iterator[bytes]:
        """The scrape, piece by piece: its writer can let the loop go on in between (1 ms at most)."""
        counted = self._counted()
        for row in TABLE:
            found = counted.get(row.name)
            if found is None and (reading := self._readings.get(row.name)) is not None:
                found = _read(row, reading())
            if found is not None:
                yield from pieces(row, found)

    def _counted(self) -> dict[str, Values]:
        endpoints, tenants = self._endpoints, self._tenants
        return {
            "requests": {
                (name, str(status) if status else OTHER): count
                for name, counts in endpoints.items()
                for status, count in counts.statuses.items()
            },
            "cut": {(name,): counts.cut for name, counts in endpoints.items()},
            "tenant_requests": {(name,): tenant.requests for name, tenant in tenants.items()},
            "tokens": {
                (direction, name): count
                for name, tenant in tenants.items()
                for direction, count in (("in", tenant.tokens_in), ("out", tenant.tokens_out))
            },
            "work": dict(self._work),
            "refusals": _labelled(self._refusals),
            "cancels": _labelled(self._cancels),
            "wakes": _labelled(self._wakes),
            "connections_refused": _labelled(self._turned_away),
            "connections_displaced": _labelled(self._gave_way),
            "task_steps": dict(self._steps),
            "fields_dropped": {(): self._fields_dropped},
            "config_reloads": {(): self._reloads},
            "config_reload_failed": {(): self._reloads_failed},
            # An endpoint without a request has no histogram: 18 lines each that say nothing.
            "request_duration_seconds": {(n,): c.duration for n, c in endpoints.items() if c.statuses},
            "time_to_first_token_seconds": {(n,): c.first for n, c in endpoints.items() if c.statuses},
            "queue_wait_seconds": {(): self._queue_wait},
            "loop_lag_seconds": {(): self._lag},
        }


def _read(row: MetricRow, found: float | ByLabel) -> Values:
    """The values of a reading by label; tenants beyond TENANTS_MAX are added up."""
    if not isinstance(found, Mapping):
        return {(): found}
    if row.labels != ("tenant",) or len(found) <= TENANTS_MAX:
        return _labelled(found)
    values = _labelled(found)
    named = dict(list(values.items())[:TENANTS_MAX])
    rest = sum(values.values()) - sum(named.values())
    return {**named, (OTHER,): named.get((OTHER,), 0) + rest}


def _labelled(counts: ByLabel) -> dict[tuple[str, ...], float]:
    return {(name,) if isinstance(name, str) else name: count for name, count in counts.items()}


def _zeros(names: Iterable[str]) -> dict[str, int]:
    """Counters that are told from the start: a rate needs to have seen the 0."""
    return {**dict.fromkeys(map(str, names), 0), OTHER: 0}


def _count(counts: dict[str, int], name: str) -> None:
    if name in counts:
        counts[name] += 1
    else:
        counts[OTHER] += 1


def _count_new(statuses: dict[int, int], status: int) -> None:
    """The first of this status; 0 (no status yet, or one too many) stands for `other`."""
    if len(statuses) >= STATUSES_MAX:
        status = 0
    statuses[status] = statuses.get(status, 0) + 1


def _endpoint_names() -> list[str]:
    return list(dict.fromkeys(row.name for row in (*ENDPOINTS, ONE_MODEL)))


def _error_classes() -> list[type[errors.HiveError]]:
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.HiveError)]
