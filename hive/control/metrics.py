"""The metrics for Prometheus at `GET /metrics` of the daemon: every metric is one row of TABLE.

Nothing is counted for it: a scrape tells what the daemon knows anyway, and the answers of helper, proxy, Redis, SQLite
and the GPUs' driver at that moment. A figure that cannot be asked is left out, so that it is not taken for a 0. The
proxy's own metrics stand behind those of TABLE, as the proxy wrote them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.build import compiled, version
from hive.conditions import FoundCondition
from hive.control import runner_counts as aliases
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.control.external_agents import WithElsewhere
from hive.control.kept_responses import KeptResponses
from hive.control.usage import UsageConsumer
from hive.domain import AgentStatus, Cluster, SleepDepth
from hive.errors import HiveError
from hive.exposition import MetricKind, MetricRow, Values, written
from hive.host import files, memory
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.memory import MemInfo, ZramDevice
from hive.host.nvml import GpuState, SeenGpus
from hive.link.messages import Activity
from hive.link.proxy_link import ProxyGates
from hive.pooling.leases import PoolLeases
from hive.pooling.pool_counts import PoolCounts, pool_values
from hive.shapes.pool import PoolView
from hive.store.database import Database
from hive.store.live import Live

TABLE = (
    MetricRow(
        "build_info",
        MetricKind.GAUGE,
        ("version", "compiled"),
        "1, for the version of this daemon; `compiled`: yes or no.",
    ),
    MetricRow("start_time_seconds", MetricKind.GAUGE, (), "When this daemon started, Unix seconds."),
    MetricRow("agents", MetricKind.GAUGE, ("status", "depth"), "Agents by status and by how deep they sleep."),
    MetricRow("requests", MetricKind.COUNTER, (), "Requests that ended, of all time."),
    MetricRow("tokens", MetricKind.COUNTER, ("direction",), "Their tokens, `in` and `out`, as far as known."),
    MetricRow(
        "work", MetricKind.COUNTER, ("unit",), "Their work that is no tokens: `audio_s`, `images`, and `pixel_steps`."
    ),
    MetricRow("requests_in_flight", MetricKind.GAUGE, (), "Requests of agents that began and have not ended."),
    MetricRow("requests_parked", MetricKind.GAUGE, (), "Requests that wait for their agent to wake."),
    MetricRow("queue_waiting", MetricKind.GAUGE, (), "Requests that wait for their turn at the inference server."),
    MetricRow("queue_running", MetricKind.GAUGE, (), "Requests whose turn it is."),
    MetricRow(
        "wakes", MetricKind.COUNTER, ("cause", "depth"), "Wakes by what caused them and by where the agent slept."
    ),
    MetricRow("wake_duration_seconds", MetricKind.HISTOGRAM, ("cause",), "From the first ask to the open gate."),
    MetricRow("pauses", MetricKind.COUNTER, (), "Times an agent was put to sleep."),
    MetricRow("deep_sleeps", MetricKind.COUNTER, (), "Times an agent's memory was paged out."),
    MetricRow("agent_errors", MetricKind.COUNTER, (), "Ends of agents nobody asked for, and failed starts."),
    MetricRow(
        "agents_memory_bytes",
        MetricKind.GAUGE,
        ("status",),
        "RAM charged to agents, where there is no controller their last PSS.",
    ),
    MetricRow("agents_swapped_bytes", MetricKind.GAUGE, (), "Memory of paused agents that is in swap."),
    MetricRow("sleep_saved_bytes", MetricKind.GAUGE, (), "Of that, what takes no RAM: less what zram keeps it in."),
    MetricRow("host_memory_total_bytes", MetricKind.GAUGE, (), "RAM of the host."),
    MetricRow(
        "host_memory_available_bytes",
        MetricKind.GAUGE,
        (),
        "Of that, what may be taken before the host begins to swap.",
    ),
    MetricRow("state_disk_total_bytes", MetricKind.GAUGE, (), "Size of the disk that has the state directory."),
    MetricRow("state_disk_free_bytes", MetricKind.GAUGE, (), "Of that, what the daemon may still write."),
    MetricRow("gpu_up", MetricKind.GAUGE, ("gpu", "name"), "Whether the GPU answers everything it is asked."),
    MetricRow("gpu_memory_total_bytes", MetricKind.GAUGE, ("gpu",), "Its memory."),
    MetricRow(
        "gpu_memory_used_bytes",
        MetricKind.GAUGE,
        ("gpu",),
        "Of that in use, what the driver keeps for itself included.",
    ),
    MetricRow("gpu_utilization_ratio", MetricKind.GAUGE, ("gpu",), "Share of the last second in which it computed."),
    MetricRow("gpu_process_memory_bytes", MetricKind.GAUGE, ("gpu", "pid"), "Its memory that a process holds."),
    MetricRow(
        "gpu_instance_memory_used_bytes", MetricKind.GAUGE, ("gpu", "instance"), "Memory in use of a MIG device."
    ),
    MetricRow("backend_up", MetricKind.GAUGE, ("backend",), "Whether the inference server answers."),
    MetricRow("backend_slots", MetricKind.GAUGE, ("backend",), "Requests it works on at once, where it has a limit."),
    MetricRow(
        "backend_cluster_replicas_wanted",
        MetricKind.GAUGE,
        ("engine",),
        "Replicas that are meant to run; without a cluster none of these is told.",
    ),
    MetricRow("backend_cluster_replicas_running", MetricKind.GAUGE, ("engine",), "Those that do."),
    MetricRow("backend_cluster_nodes", MetricKind.GAUGE, ("engine",), "Its machines, as far as it tells them."),
    MetricRow("backend_cluster_nodes_up", MetricKind.GAUGE, ("engine",), "Those on which something answers."),
    MetricRow("backend_cluster_stuck", MetricKind.GAUGE, ("engine",), "Ranks whose tokens stand still."),
    MetricRow("backend_cluster_waiting", MetricKind.GAUGE, ("engine",), "Requests in its own queue, where it tells."),
    MetricRow(
        "backend_cluster_waited_seconds",
        MetricKind.GAUGE,
        ("engine",),
        "How long requests stood there of late, where it tells.",
    ),
    MetricRow("backend_cluster_asked_seconds", MetricKind.GAUGE, ("engine",), "Its last answer, Unix seconds."),
    MetricRow("pool_slots", MetricKind.GAUGE, ("state",), "Models of the pool by their state."),
    MetricRow("pool_charged_bytes", MetricKind.GAUGE, ("gpu", "kind"), "Memory booked for models, by kind of server."),
    MetricRow("pool_measured_bytes", MetricKind.GAUGE, ("gpu",), "Memory that their servers were seen to hold."),
    MetricRow("pool_foreign_bytes", MetricKind.GAUGE, ("gpu",), "The most seen of processes that are not the pool's."),
    MetricRow(
        "pool_free_bytes", MetricKind.GAUGE, ("gpu",), "Memory left for one more load; below 0: too much is used."
    ),
    MetricRow("pool_loads", MetricKind.COUNTER, ("model", "why"), "Loads of models that ended well."),
    MetricRow("pool_load_seconds", MetricKind.HISTOGRAM, (), "How long they took."),
    MetricRow("pool_evictions", MetricKind.COUNTER, ("why",), "Models that were unloaded or put to sleep."),
    MetricRow("pool_sleeps", MetricKind.COUNTER, ("level",), "Models that fell asleep, their memory measured back."),
    MetricRow("pool_wake_seconds", MetricKind.HISTOGRAM, (), "How long wakes took, with one generated token."),
    MetricRow(
        "pool_sleep_failures", MetricKind.COUNTER, ("level",), "Sleeps and wakes that failed: a level is banned."
    ),
    MetricRow("pool_wait_seconds", MetricKind.HISTOGRAM, ("band",), "Waits of requests for their model to be loaded."),
    MetricRow("pool_thrash", MetricKind.COUNTER, (), "Models asked for again within the turn they had just lost."),
    MetricRow("pool_turn_cut", MetricKind.COUNTER, (), "Requests cut because their model's turn was over."),
    MetricRow(
        "speculation_drafted_tokens",
        MetricKind.COUNTER,
        ("model",),
        "Tokens that a server guessed ahead since it started.",
    ),
    MetricRow("speculation_accepted_tokens", MetricKind.COUNTER, ("model",), "Of those, accepted by its model."),
    MetricRow(
        "transcription_audio_seconds", MetricKind.COUNTER, ("model",), "Sound that a model heard since it was loaded."
    ),
    MetricRow("transcription_work_seconds", MetricKind.COUNTER, ("model",), "The time that took."),
    MetricRow(
        "transcription_real_time_factor",
        MetricKind.GAUGE,
        ("model",),
        "Its work for each second of sound; below 1 it is faster than one speaks.",
    ),
    MetricRow("transcription_load_seconds", MetricKind.GAUGE, ("model",), "How long its last load took."),
    MetricRow("adapters_loaded", MetricKind.GAUGE, ("base",), "Adapters that are served, by their model."),
    MetricRow("adapter_loads", MetricKind.COUNTER, ("outcome",), "Orders to load one: loaded, failed or refused."),
    MetricRow("adapter_load_seconds", MetricKind.HISTOGRAM, (), "From such an order until it was served."),
    MetricRow("jobs_running", MetricKind.GAUGE, ("status",), "Model jobs that run, or wait for their turn."),
    MetricRow("jobs", MetricKind.COUNTER, ("outcome",), "Model jobs that ended, by how they did."),
    MetricRow("leases", MetricKind.GAUGE, ("state",), "Leases by their state."),
    MetricRow("lease_charged_bytes", MetricKind.GAUGE, ("gpu",), "Memory booked for leases."),
    MetricRow("lease_grants", MetricKind.COUNTER, ("kind",), "Leases that were given their memory."),
    MetricRow("lease_wait_seconds", MetricKind.HISTOGRAM, (), "Their waits in line."),
    MetricRow("lease_ends", MetricKind.COUNTER, ("why",), "Leases that are over: ok, or the code of an error."),
    MetricRow("lease_preemptions", MetricKind.COUNTER, (), "Leases told to end because their memory was wanted."),
    MetricRow("lease_overdue", MetricKind.COUNTER, (), "Leases that were not renewed in time."),
    MetricRow("lease_overruns", MetricKind.COUNTER, (), "Leases seen with more memory than they asked for."),
    MetricRow(
        "up",
        MetricKind.GAUGE,
        ("part",),
        "Whether a part does its work: `daemon`, `proxy`, `helper`, `redis`, `database`.",
    ),
    MetricRow("problem", MetricKind.GAUGE, ("code", "severity"), "1 for each thing that is wrong now (conditions.md)."),
    MetricRow(
        "budget_limit_tokens", MetricKind.GAUGE, ("scope", "name", "budget"), "Tokens that an agent or tenant may use."
    ),
    MetricRow(
        "budget_used_tokens", MetricKind.GAUGE, ("scope", "name", "budget"), "Of those, used by requests that ended."
    ),
    MetricRow(
        "cache_prompt_tokens",
        MetricKind.COUNTER,
        ("model",),
        "Prompt tokens of requests whose server told what it reused.",
    ),
    MetricRow("cache_prompt_tokens_reused", MetricKind.COUNTER, ("model",), "Of those, kept from earlier prompts."),
    MetricRow("cache_hit_rate", MetricKind.GAUGE, ("model",), "The share of the second in the first."),
    MetricRow("cache_flushes", MetricKind.COUNTER, ("scope",), "Flushes of the prompt cache that were done."),
    MetricRow("parked_sleeps", MetricKind.COUNTER, (), "Sleeps of agents that had a slot of a llama-server."),
    MetricRow("parked_slots_saved", MetricKind.COUNTER, (), "Of those, with the slot kept on the disk."),
    MetricRow("parked_slots_found", MetricKind.COUNTER, ("found",), "Of those, what the agent found afterwards."),
    MetricRow("parked_first_tokens", MetricKind.COUNTER, ("found",), "Tokens of first prompts after such a sleep."),
    MetricRow("parked_first_tokens_reused", MetricKind.COUNTER, ("found",), "Of those, kept from before it."),
    MetricRow("templates", MetricKind.GAUGE, ("state",), "Templates that are described, by their state."),
    MetricRow("template_agents", MetricKind.GAUGE, ("template",), "Running agents that were forked from it."),
    MetricRow("template_held_bytes", MetricKind.GAUGE, ("template",), "RAM of the template itself."),
    MetricRow("template_shared_bytes", MetricKind.GAUGE, ("template",), "Of that, what its agents share."),
    MetricRow(
        "template_stale",
        MetricKind.GAUGE,
        ("template",),
        "Whether its packages or its script changed since it started.",
    ),
    MetricRow("usage_waiting", MetricKind.GAUGE, (), "Usage events from the proxy that are not in SQLite yet."),
    MetricRow("usage_lag_seconds", MetricKind.GAUGE, (), "How long the oldest of them has waited, 0 without any."),
    MetricRow("usage_lost", MetricKind.COUNTER, (), "Usage events that are known to be lost."),
    MetricRow("responses_kept", MetricKind.GAUGE, (), "Responses that are kept for agents."),
    MetricRow("responses_kept_bytes", MetricKind.GAUGE, (), "What they are counted as."),
    MetricRow("responses_not_kept", MetricKind.COUNTER, (), "Responses that were to be kept, and could not be."),
)
ROWS = {row.name: row for row in TABLE}
ANSWER_S = 4.0
"""Prometheus waits 10 s for a scrape (scrape_timeout): one part that hangs must not take away all the rest."""
PROXY_S = 1.0
"""The proxy is asked for three things at once, and answers within milliseconds: one that does not is stuck."""
WRITTEN_S = 2.0
"""A database that takes no write within this is of no use."""
ALWAYS_TOLD = (
    *((status, SleepDepth.AWAKE) for status in AgentStatus if status is not AgentStatus.PAUSED),
    (AgentStatus.PAUSED, SleepDepth.LIGHT),
    (AgentStatus.PAUSED, SleepDepth.DEEP),
)
"""Told as 0 where no agent is so: a series that comes and goes cannot be added up."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Scraper:
    """The figures of the daemon's parts, in one scrape."""

    started_at: float
    state_dir: Path
    roster: Roster
    counters: Counters
    helper: WithElsewhere
    proxy_link: ProxyGates
    effects: DaemonEffects
    live: Live
    database: Database
    consumer: UsageConsumer
    responses: KeptResponses
    gpus: GpuMemoryReader
    conditions: Callable[[], list[FoundCondition]]
    pool_counts: PoolCounts
    leases: PoolLeases
    pool_view: Callable[[], PoolView]
    budgets: Callable[[], Mapping[str, Values]]
    cache: Callable[[], Mapping[str, Values | None]]
    runner_counts: aliases.RunnerCounts
    memory_split: Callable[[], Awaitable[Mapping[str, Values | None]]]
    speculation: Callable[[], Mapping[str, Values | None]]
    transcriptions: Callable[[], Mapping[str, Values | None]]
    adapters: Callable[[], Mapping[str, Values | None]]
    jobs: Callable[[], Mapping[str, Values | None]]
    templates: Callable[[], Awaitable[Mapping[str, Values | None]]]

    async def scrape(self) -> bytes:
        """The exposition: tens of milliseconds, seconds where a part hangs."""
        paused = [life.agent.id for life in self.roster if life.status is AgentStatus.PAUSED]
        (gpus, stats), (queue, activity, proxy), (is_sound, kept), (memory_split, templates) = await asyncio.gather(
            asyncio.gather(self.gpus.seen(), _told(self.helper.stat([]), ANSWER_S)),
            asyncio.gather(
                _told(self.proxy_link.queue(), PROXY_S),
                _told(self.proxy_link.activity(), PROXY_S),
                _told(self.proxy_link.metrics(), PROXY_S),
            ),
            asyncio.gather(self._is_database_sound(), _told(self.responses.total(), ANSWER_S)),
            asyncio.gather(self.memory_split(), _told(self._templates(), ANSWER_S)),
        )
        swapped = None if stats is None else sum(stats[agent].swap_bytes for agent in paused if agent in stats)
        values: dict[str, Values | None] = {
            "agents": self._agents(),
            **self._requests(activity),
            **self.counters.metrics(),
            **self.pool_counts.metrics(),
            **self.leases.counts.metrics(self.leases),
            **pool_values(self.pool_view()),
            **self.budgets(),
            **self.cache(),
            **self.speculation(),
            **self.transcriptions(),
            **self.adapters(),
            **self.jobs(),
            **(templates or {}),
            **self._parts(),
            "up": {
                ("daemon",): 1.0,
                ("proxy",): float(proxy is not None),
                ("helper",): float(stats is not None and self.helper.connected),
                ("redis",): float(self.live.up),
                ("database",): float(is_sound),
            },
            "problem": {(one.code, str(one.severity)): 1 for one in self.conditions()},
            **gpu_values(gpus),
            "agents_memory_bytes": None
            if stats is None
            else self._memory({a: s.held_bytes or 0 for a, s in stats.items()}),
            "agents_swapped_bytes": _just(swapped),
            "sleep_saved_bytes": _just(None if swapped is None else saved_bytes(swapped, memory.read_zrams())),
            "queue_waiting": _just(None if queue is None else queue.queue.waiting),
            "queue_running": _just(None if queue is None else queue.queue.running),
            "responses_kept": _just(None if kept is None else kept.responses),
            "responses_kept_bytes": _just(None if kept is None else kept.bytes),
            "usage_waiting": _just(self.consumer.waiting),
            "usage_lag_seconds": _just(self.consumer.lag_s),
        }
        told: dict[str, Values | None] = {
            **self.runner_counts.metrics(),
            **memory_split,
            "queue_depth": values["queue_waiting"],
            "gpu_memory_used": values.get("gpu_memory_used_bytes"),
        }
        second_names = b"".join(written(row, at) for row in aliases.TABLE if (at := told.get(row.name)))
        return exposition(values) + (proxy or b"") + second_names

    async def _templates(self) -> Mapping[str, Values | None]:
        return await self.templates()

    def _agents(self) -> Values:
        found: Counter[tuple[str, ...]] = Counter((str(life.status), str(life.agent.depth)) for life in self.roster)
        return {**{(str(status), str(depth)): 0 for status, depth in ALWAYS_TOLD}, **found}

    def _requests(self, activity: dict[str, Activity] | None) -> dict[str, Values | None]:
        """`activity`: what the proxy sees, None where it cannot be asked."""
        if activity is None:
            return {"requests_in_flight": None, "requests_parked": None}
        seen = [activity.get(life.agent.id, Activity()) for life in self.roster]
        return {
            "requests_in_flight": _just(sum(one.in_flight for one in seen)),
            "requests_parked": _just(sum(one.parked for one in seen)),
        }

    def _memory(self, held_bytes: dict[str, int]) -> Values:
        held: Counter[tuple[str, ...]] = Counter(
            {(str(status),): 0 for status in (AgentStatus.RUNNING, AgentStatus.PAUSED)}
        )
        for life in self.roster:
            held[(str(life.status),)] += held_bytes.get(life.agent.id, 0)
        return held

    async def _is_database_sound(self) -> bool:
        """Whether it can be read, and written: a transaction without a change, which touches no disk."""
        try:
            async with asyncio.timeout(WRITTEN_S):
                await self.database.read(lambda conn: conn.execute("SELECT 1").fetchone())
                await self.database.write(lambda _: None)
        except (HiveError, TimeoutError):
            return False
        return not self.consumer.degraded

    def _parts(self) -> dict[str, Values | None]:
        backend = self.effects.backend
        kind = "" if backend is None else str(backend.kind)
        return {
            "build_info": {(version(), compiled()): 1},
            "start_time_seconds": _just(self.started_at),
            **host_values(memory.read_memory(), files.size_bytes(self.state_dir), files.free_bytes(self.state_dir)),
            "backend_up": {(kind,): float(backend is not None and backend.up)},
            "backend_slots": None if backend is None or backend.places is None else {(kind,): backend.places},
            **cluster_values(None if backend is None else backend.cluster),
            "usage_lost": _just(self.consumer.lost),
            "responses_not_kept": _just(self.responses.dropped),
        }


def exposition(values: dict[str, Values | None]) -> bytes:
    """The lines of all rows that have values, in the order of TABLE. KeyError for a name that has no row."""
    for name in values:
        ROWS[name]
    return b"".join(written(row, found) for row in TABLE if (found := values.get(row.name)))


def saved_bytes(swapped_bytes: int, zrams: list[ZramDevice]) -> int:
    """RAM saved by memory in swap: zram keeps it compressed, swap on a disk takes none.

    Where there is any zram all is taken to be there, at the ratio of what is in it now.

    >>> saved_bytes(900, []), saved_bytes(900, [ZramDevice("zram0", "zstd", 4000, 3000, 1000)])
    (900, 600)
    """
    original = sum(zram.original_bytes for zram in zrams)
    taken = sum(zram.memory_bytes for zram in zrams)
    return swapped_bytes if not original else max(0, round(swapped_bytes * (1 - taken / original)))


def host_values(seen: MemInfo, disk_bytes: int | None, free_bytes: int | None) -> dict[str, Values | None]:
    """The figures of the host's memory, and of the disk of the state directory; what nobody knows is None.

    >>> told = host_values(MemInfo(8, 4, None, None), 100, None)
    >>> told["host_memory_available_bytes"], told["state_disk_free_bytes"]
    ({(): 4}, None)
    """
    return {
        "host_memory_total_bytes": _just(seen.total_bytes),
        "host_memory_available_bytes": _just(seen.available_bytes),
        "state_disk_total_bytes": _just(disk_bytes),
        "state_disk_free_bytes": _just(free_bytes),
    }


def gpu_values(seen: SeenGpus) -> dict[str, Values | None]:
    """The figures that each GPU tells; none where it tells none.

    >>> told = gpu_values(SeenGpus((GpuState(0, name="H200", total_bytes=5), GpuState(1, fault="GPU is lost"))))
    >>> told["gpu_up"], told["gpu_memory_total_bytes"], told["gpu_memory_used_bytes"]
    ({('0', 'H200'): 1.0, ('1', ''): 0.0}, {('0',): 5}, {})
    """

    def of(attribute: str) -> Values:
        told = {(str(gpu.number),): getattr(gpu, attribute) for gpu in seen.gpus}
        return {labels: value for labels, value in told.items() if value is not None}

    return {
        "gpu_up": {(str(gpu.number), gpu.name): float(not gpu.fault) for gpu in seen.gpus},
        "gpu_memory_total_bytes": of("total_bytes"),
        "gpu_memory_used_bytes": of("used_bytes"),
        "gpu_utilization_ratio": {
            (str(gpu.number),): gpu.busy_percent / 100 for gpu in seen.gpus if gpu.busy_percent is not None
        },
        "gpu_process_memory_bytes": _of_processes(seen.gpus),
        "gpu_instance_memory_used_bytes": {
            (str(gpu.number), str(part.number)): part.used_bytes
            for gpu in seen.gpus
            for part in gpu.instances
            if part.used_bytes is not None
        },
    }


def cluster_values(cluster: Cluster | None) -> dict[str, Values | None]:
    """The figures of a cluster; none where there is none.

    >>> told = cluster_values(Cluster(engine="ray", wanted=3, running=2, slots_each=8, asked_at=5.0))
    >>> told["backend_cluster_replicas_running"], told["backend_cluster_waiting"], cluster_values(None)
    ({('ray',): 2}, None, {})
    """
    if cluster is None:
        return {}
    told = {
        "replicas_wanted": cluster.wanted,
        "replicas_running": cluster.running,
        "nodes": len(cluster.nodes),
        "nodes_up": sum(node.up for node in cluster.nodes),
        "stuck": len(cluster.stuck),
        "waiting": cluster.waiting,
        "waited_seconds": cluster.waited_s,
        "asked_seconds": cluster.asked_at,
    }
    return {
        f"backend_cluster_{name}": None if value is None else {(cluster.engine,): value} for name, value in told.items()
    }


def _of_processes(gpus: tuple[GpuState, ...]) -> Values:
    """A process with several contexts on one GPU (several MIG devices) is told once."""
    held: Counter[tuple[str, ...]] = Counter()
    for gpu in gpus:
        for process in gpu.processes or ():
            if process.used_bytes is not None:
                held[(str(gpu.number), str(process.pid))] += process.used_bytes
    return held


def _just(value: float | None) -> Values | None:
    return None if value is None else {(): value}


async def _told(asked: Coroutine[Any, Any, Found], within_s: float) -> Found | None:
    """The answer; None where its source cannot be asked, or does not answer in time."""
    try:
        async with asyncio.timeout(within_s):
            found = await outcome_of(asked)
    except TimeoutError:
        return None
    return None if isinstance(found, HiveError) else found
