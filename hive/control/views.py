"""Agents, backend and health as the API shows them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import tzinfo
from typing import Any, cast

import msgspec

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.restarts import with_restarts
from hive.agents.spec import changed_fields
from hive.agents.tokens import TokenKind
from hive.backends.capacity import LABELS
from hive.backends.described import prefix_cache
from hive.conditions import FoundCondition
from hive.control import schedule_times
from hive.control.backend_candidates import BackendCandidate
from hive.control.counters import Used
from hive.domain import (
    ALIVE,
    Agent,
    AgentSpec,
    AgentStatus,
    BackendInfo,
    BackendKind,
    Band,
    By,
    Cluster,
    FoundCapabilities,
    ModelInfo,
)
from hive.errors import HiveError
from hive.host.memory import MemInfo, Pressure, ZramDevice
from hive.host.nvml import MIB, GpuState, MigDevice, ProcessOnGpu, SeenGpus
from hive.link.helper import Stat
from hive.link.messages import Activity
from hive.link.specs import RuntimeCapabilities
from hive.models.prompts import hash_prompt
from hive.settings.table import Proxy, Settings
from hive.shapes import system
from hive.shapes.agents import AgentShort, AgentView, Change, HeldRam, KeptOfAgent, NotRemoved, OfAgent, Spec, Tokens
from hive.shapes.agents import Capabilities as CapabilitiesView
from hive.shapes.agents import Message as MessageView
from hive.shapes.agents import Schedule as ScheduleView
from hive.shapes.tokens import ApiToken
from hive.shapes.usage import Cost, InferenceStats, Usage, VramGpu
from hive.store.audit import USER, AuditEntry
from hive.store.job_turns import KIND
from hive.store.jobs import StoredJob
from hive.store.messages import StoredMessage
from hive.store.responses import KeptSum
from hive.store.schedules import StoredSchedule
from hive.store.tokens import StoredToken
from hive.store.usage import CostSums, GroupCost, SpentSums, UsageSince, total
from hive.terminal_text import MASK

OF_THE_PROCESS = ("command", "env", "runtime", "port", "model", "egress", "limits", "docker", "firecracker")
"""Fields of a spec that take effect at the next start; all others do at once."""


def condition_view(found: FoundCondition) -> system.Condition:
    return {
        "code": found.code,
        "severity": found.severity,
        "text": found.text,
        "fix": found.fix,
        "facts": found.facts,
    }


def agent_view(
    life: AgentLifecycle,
    *,
    why: str,
    brief: str,
    sentence: str,
    stat: Stat | None,
    seen: Activity,
    used: Used,
    messages_waiting: int | None,
    next_wake_at: float | None,
    can: RuntimeCapabilities | None,
    prewarm_note: str = "",
    budget_percent: int | None = None,
) -> AgentView:
    """The `View` of one agent. `stat` None: the helper could not be asked; `messages_waiting` None: SQLite could not.

    `why`: the verdict of the decider that puts it to sleep; `brief`: without what `status` and `since` say already;
    `sentence`: with what the agent costs now, too.
    `deep_note`: why it does not sleep deep, empty where it does or wants nothing. `limits_not_enforced`: in words,
    empty where all are. `prewarm_note`: why its prompt is not read ahead. `can`: what its runtime can do here, None
    where that is not known yet.
    """
    agent = life.agent
    took_ms, cause = life.last_wake or (None, None)
    spec: Spec = msgspec.to_builtins(agent.spec)
    return {
        **spec,
        "id": agent.id,
        "status": agent.status,
        "depth": agent.depth,
        "depth_goal": agent.depth_goal,
        "generation": agent.generation,
        "since": agent.since,
        "reason": agent.reason,
        "why": why,
        "brief": with_restarts(brief, life.restarts.count, life.recent_ends),
        "sentence": sentence,
        "deep_note": life.deep_note,
        "kept_awake_until": life.kept_awake_until,
        "messages_waiting": messages_waiting,
        "next_wake_at": next_wake_at,
        "restarts": life.restarts.count,
        "restart_reason": life.restarts.reason,
        "next_start_at": life.restarts.next_at,
        "uid": agent.uid,
        "pid": _pid(life, stat),
        "swap_bytes": None if stat is None else stat.swap_bytes,
        "capabilities": None if can is None else capabilities_view(can),
        "limits_not_enforced": None if stat is None else stat.limits,
        "prewarm_note": prewarm_note,
        "template_note": _template_note(life, stat),
        **_held(stat),
        "cpu_us": None if stat is None else stat.cpu_us,
        "processes": None if stat is None else stat.processes,
        "in_flight": seen.in_flight,
        "parked": seen.parked,
        "ingress_open": seen.ingress,
        "requests": used.requests,
        "tokens_in": used.tokens_in,
        "tokens_out": used.tokens_out,
        "last_active_at": used.last_active_at,
        "created_at": agent.created_at,
        "last_wake_ms": took_ms,
        "last_wake_cause": cause,
        "wakes": life.wakes,
        "pauses": life.pauses,
        "budget_percent": budget_percent,
    }


def _held(stat: Stat | None) -> HeldRam:
    """One that is gone holds none. `rss_bytes` is the name by which clients of before know it."""
    stat = stat or Stat(state="")
    held = 0 if stat.state == "gone" else stat.held_bytes
    return {
        "rss_bytes": held,
        "held_bytes": held,
        "held_from": stat.held_from,
        "held_at": stat.held_at,
        "swap_cached_bytes": stat.swap_cached_bytes,
        "pss_bytes": stat.pss_bytes,
        "pss_at": stat.pss_at,
    }


def _template_note(life: AgentLifecycle, stat: Stat | None) -> str:
    if life.agent.spec.template is None or life.status not in ALIVE:
        return ""
    return "nobody knows whether it is used: the helper cannot be asked" if stat is None else stat.template_note


def _pid(life: AgentLifecycle, stat: Stat | None) -> int | None:
    """The pid that the helper saw; of a look before the agent's start, the one the start brought."""
    if stat is None or (stat.pid is None and life.status in ALIVE):
        return life.pid or None  # of one that runs elsewhere it is 0
    return stat.pid


def of_agent(life: AgentLifecycle) -> OfAgent:
    """The agent that an answer is about."""
    return {"agent": life.agent.id, "name": life.agent.name, "status": life.status}


def kept_view(life: AgentLifecycle, kept: KeptSum, proxy: Proxy) -> KeptOfAgent:
    """Number and size of an agent's kept responses, and their bounds."""
    return {
        **of_agent(life),
        "responses": kept.responses,
        "bytes": kept.bytes,
        "oldest_at": kept.oldest_at,
        "most_bytes": proxy.responses_kept_mb * MIB,
        "most_days": proxy.responses_kept_days,
    }


def token_view(token: StoredToken, now: float) -> ApiToken:
    """
    >>> from hive.domain import Role
    >>> token_view(StoredToken(id="t_1", name="ci", digest="d", role=Role.VIEWER, created_by="uid:0", created_at=1), 2)
    {'id': 't_1', 'name': 'ci', 'role': <Role.VIEWER: 'viewer'>, 'state': <TokenState.LIVE: 'live'>, \
'created_by': 'uid:0', 'created_at': 1, 'expires_at': None, 'revoked_at': None, 'last_used_at': None}
    """
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "state": token.state(now),
        "created_by": token.created_by,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "last_used_at": token.last_used_at,
    }


def short_view(agent: Agent) -> AgentShort:
    return {
        "id": agent.id,
        "name": agent.name,
        "tenant": agent.spec.tenant,
        "runtime": agent.spec.runtime,
        "status": agent.status,
        "depth": agent.depth,
        "since": agent.since,
    }


def not_removed_view(ref: str, error: HiveError) -> NotRemoved:
    return {
        "agent": ref,
        "status": error.status,
        "code": error.code,
        "detail": error.message,
        "hint": error.hint,
    }


def masked(view: AgentView) -> AgentView:
    """The same without its prompt and the values of its environment, as `hive config show` masks what may be secret."""
    env = {name: MASK if value else "" for name, value in view["env"].items()}
    return {**without_prompt(view), "env": env}


def without_prompt(view: AgentView) -> AgentView:
    """The same with a mask in place of its system prompt: lists of agents are asked for often, and prompts are long."""
    return view if view.get("system_prompt") is None else {**view, "system_prompt": MASK}


def capabilities_view(can: RuntimeCapabilities) -> CapabilitiesView:
    """An ability of the runtime → why it is missing, or what of it; empty where the runtime has it.

    >>> capabilities_view(RuntimeCapabilities(why_not_page_out="deep sleep: not permitted here"))
    {'start': '', 'pause': '', 'deep_sleep': 'not permitted here', 'limits': '', 'egress': '', 'exec': ''}
    """
    return {
        "start": can.why_not,
        "pause": can.why_not or can.why_not_freeze,
        "deep_sleep": can.why_not or can.why_not_freeze or can.why_not_page_out.removeprefix("deep sleep: "),
        "limits": can.why_not or can.limits,
        "egress": can.why_not or can.why_not_egress,
        "exec": can.why_not or can.why_not_exec,
    }


def restart_needed(life: AgentLifecycle, before: AgentSpec, after: AgentSpec) -> bool:
    """Whether what lives was started with another command, environment, port … than `after` says."""
    running = life.started_spec or before
    return any(getattr(running, field) != getattr(after, field) for field in OF_THE_PROCESS)


def changes(before: AgentSpec | None, after: AgentSpec) -> list[Change]:
    """The effects of applying `after`: `{"field", "from", "to", "at_restart"}`, in the order of the spec.

    `before` None: it would be new, and what is no default is listed. The values of `env` and the text of
    a prompt stay out of it.

    >>> old = AgentSpec(name="a", command=["/bin/x"], env={"KEY": "1"})
    >>> [change["field"] for change in changes(None, old)]
    ['name', 'command', 'env']
    >>> changes(old, AgentSpec(name="a", command=["/bin/x"], env={"KEY": "2"}, idle_s=5.0))
    [{'field': 'env', 'from': ['KEY'], 'to': ['KEY'], 'at_restart': True}, \
{'field': 'idle_s', 'from': None, 'to': 5.0, 'at_restart': False}]
    """
    base = before or AgentSpec(name="")
    return [
        {
            "field": field,
            "from": None if before is None else _told(field, before),
            "to": _told(field, after),
            "at_restart": before is not None and field in OF_THE_PROCESS,
        }
        for field in changed_fields(base, after)
    ]


def _told(field: str, spec: AgentSpec) -> Any:
    value = getattr(spec, field)
    if field == "system_prompt" and value is not None:
        return f"{hash_prompt(value)}, {len(value.encode())} bytes"
    return sorted(value) if field == "env" else msgspec.to_builtins(value)


def message_view(message: StoredMessage) -> MessageView:
    return {
        "id": message.id,
        "state": message.state,
        "text": message.text,
        "from": message.sender,
        "sent_at": message.sent_at,
        "attempts": message.attempts,
        "last_error": message.last_error,
        "delivered_at": message.delivered_at,
        "refused_at": message.refused_at,
    }


def schedule_view(schedule: StoredSchedule, zone: tzinfo) -> ScheduleView:
    """`spoken`: the next time for people, in the host's `zone`."""
    return {
        "id": schedule.id,
        "at": schedule.at,
        "spoken": schedule_times.spoken(schedule.at, zone),
        "every_s": schedule.every_s,
        "clock": schedule.clock,
        "note": schedule.note,
        "actor": schedule.actor,
        "created_at": schedule.created_at,
        "last_at": schedule.last_at,
        "last_outcome": schedule.last_outcome,
    }


def job_view(job: StoredJob, now: float, *, status: system.JobStatus | None = None) -> system.Job:
    """A job as the API shows it. `eta_s`: seconds until it will probably end; `step`: what is being done, in a word.

    `status`: where it is known better than from the state.

    >>> job = StoredJob(id="j", kind="k", plan={"step": "stop"}, eta_s=30.0, actor="a", created_at=100, updated_at=101)
    >>> [job_view(job, 110.0)[key] for key in ("id", "step", "status", "eta_s", "error")]
    ['j', 'stop', 'in_progress', 20.0, None]
    """
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "status": status or system.STATUSES[job.state],
        "step": job.plan.get("step", ""),
        "about": job.plan.get("model", ""),
        "progress": job.progress,
        "completed_bytes": job.plan.get("completed_bytes"),
        "total_bytes": job.plan.get("total_bytes"),
        "eta_s": None if job.eta_s is None or job.ended else max(0.0, job.created_at + job.eta_s - now),
        "task": task_view(job) if job.kind == KIND else None,
        "result": job.result,
        "error": cast(system.JobError | None, job.error),
        "actor": job.actor,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
    }


def task_view(job: StoredJob) -> system.ModelTask:
    """The order of a job of kind task, in short.

    >>> plan = {"name": "n", "released": True}
    >>> job = StoredJob(id="j", kind="task", plan=plan, actor="a", created_at=1, updated_at=1)
    >>> [task_view(job)[key] for key in ("name", "model", "priority", "released")]
    ['n', '', <Band.NORMAL: 'normal'>, True]
    """
    plan = job.plan
    return {
        "name": plan.get("name", ""),
        "model": plan.get("model", ""),
        "tenant": plan.get("tenant", ""),
        "agent": plan.get("agent", ""),
        "agent_name": plan.get("agent_name", ""),
        "priority": Band(plan.get("priority", Band.NORMAL)),
        "form": plan.get("form", "chat"),
        "parent": plan.get("parent", ""),
        "released": bool(plan.get("released", False)),
    }


def memory_view(memory: MemInfo, pressure: Pressure, zrams: list[ZramDevice]) -> system.Memory:
    return {
        "total_bytes": memory.total_bytes,
        "available_bytes": memory.available_bytes,
        "swap_total_bytes": memory.swap_total_bytes,
        "swap_free_bytes": memory.swap_free_bytes,
        "pressure_some_avg10": pressure.some_avg10,
        "zram": [zram_view(zram) for zram in zrams],
    }


def zram_view(zram: ZramDevice) -> system.Zram:
    return {
        "device": zram.device,
        "algorithm": zram.algorithm,
        "disksize_bytes": zram.disksize_bytes,
        "original_bytes": zram.original_bytes,
        "memory_bytes": zram.memory_bytes,
    }


def tokens_view(name: str, tokens: dict[TokenKind, str], *, port: int, ingress_port: int | None, socket: str) -> Tokens:
    model, ingress = tokens[TokenKind.MODEL], tokens[TokenKind.INGRESS]
    return {
        "model": model,
        "ingress": ingress,
        "openai_base_url": f"http://127.0.0.1:{port}/v1",
        "ollama_host": f"http://127.0.0.1:{port}/a/{model}",
        "ingress_url": f"http://127.0.0.1:{ingress_port}/agents/{name}/t/{ingress}/",
        "socket": socket,
    }


def access_view(port: int, token: str) -> system.Access:
    """The way of an operator to the model, past every agent."""
    return {
        "openai_base_url": f"http://127.0.0.1:{port}/v1",
        "ollama_host": f"http://127.0.0.1:{port}/a/{token}",
        "token": token,
    }


def audit_view(entry: AuditEntry) -> system.AuditRow:
    row = entry.row
    return {
        "id": entry.id,
        "at": row.at,
        "actor": row.actor,
        "user": str(row.detail.get(USER, "")),
        "act": row.act,
        "target": row.target,
        "origin": row.origin,
        "outcome": row.outcome,
        "detail": row.detail,
        "hash": entry.hash,
    }


def usage_view(token_tracking: bool, found: UsageSince, removed: Mapping[str, str]) -> Usage:
    """`removed`: ids of removed agents and the names they had."""
    return {
        "token_tracking": token_tracking,
        "by": By.AGENT,
        "agents": [
            {
                "agent_id": cost.agent_id,
                "name": cost.name,
                "removed_name": removed.get(cost.agent_id),
                **_cost_view(cost),
            }
            for cost in found.agents
        ],
        "totals": _cost_view(found.totals),
    }


def grouped_usage_view(token_tracking: bool, by: By, costs: list[GroupCost]) -> Usage:
    """
    >>> shown = grouped_usage_view(True, By.HOUR, [GroupCost(key=3600, requests=2)])
    >>> shown["hours"][0]["hour"], shown["totals"]["requests"]
    (3600, 2)
    """
    shown: Usage = {"token_tracking": token_tracking, "by": by, "totals": _cost_view(total(costs))}
    match by:
        case By.TENANT:
            shown["tenants"] = [{"tenant": str(cost.key), **_cost_view(cost)} for cost in costs]
        case By.MODEL:
            shown["models"] = [{"model": str(cost.key), **_cost_view(cost)} for cost in costs]
        case By.BACKEND:
            shown["backends"] = [{"backend": str(cost.key), **_cost_view(cost)} for cost in costs]
        case By.HOUR:
            shown["hours"] = [{"hour": int(cost.key), **_cost_view(cost)} for cost in costs]
    return shown


def _cost_view(cost: CostSums) -> Cost:
    return {
        "requests": cost.requests,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "cached_tokens": cost.cached_tokens,
        "unknown": cost.unknown,
        "cut": cost.cut,
        "far": cost.far,
        "audio_s": cost.audio_ms / 1000,
        "images": cost.images,
        "pixel_steps": cost.pixel_steps,
    }


def choice_view(choice: BackendCandidate, *, in_use: bool) -> system.Choice:
    """`state`: of a service in systemd's words, else `running` or `silent`; `answers`: whether it does, just now."""
    target = choice.target
    return {
        "backend": BackendKind(target.kind),
        "address": target.address,
        "unit": target.unit,
        "in_use": in_use,
        "state": choice.state,
        "answers": choice.answers,
        "version": choice.version,
    }


def _capabilities(told: FoundCapabilities) -> system.BackendCapabilities:
    return {
        "endpoints": None if told.endpoints is None else list(told.endpoints),
        "fields": None if told.fields is None else list(told.fields),
        "salted": None if told.salted is None else list(told.salted),
        "ordered": None if told.ordered is None else list(told.ordered),
        "found": told.found,
    }


def cluster_view(cluster: Cluster | None) -> system.ClusterView | None:
    """A cluster with its engine's name as people know it.

    >>> cluster_view(Cluster(engine="ray", wanted=2, running=1, slots_each=8))["label"]
    'Ray Serve'
    """
    if cluster is None:
        return None
    return cast(system.ClusterView, {**msgspec.to_builtins(cluster), "label": LABELS[cluster.engine]})


def backend_view(backend: BackendInfo | None) -> system.Backend | None:
    """The inference server in use."""
    if backend is None:
        return None
    return cast(system.Backend, {**msgspec.to_builtins(backend), "cluster": cluster_view(backend.cluster)})


def inference_view(
    backend: BackendInfo | None,
    models: list[ModelInfo],
    settings: Settings,
    switch: system.Job | None,
    speculation: system.Speculation | None = None,
) -> system.Inference:
    """`slots`: requests it works on at once, None for no limit; `slots_from` and `prefix_cache` say things in words.

    `switch`: the job that changes to another server, None without one.
    """
    return {
        "backend": system.kind_of(backend),
        "label": "" if backend is None else backend.label,
        "address": "" if backend is None else backend.address,
        "running": backend is not None and backend.up,
        "version": "" if backend is None else backend.version,
        "slots": None if backend is None else backend.places,
        "slots_from": "" if backend is None else backend.places_from,
        "priority": backend is not None and backend.priority,
        "prefix_cache": "" if backend is None else prefix_cache(backend, settings),
        "warning": "" if backend is None else backend.warning,
        "capabilities": _capabilities(FoundCapabilities() if backend is None else backend.capabilities),
        "cluster": None if backend is None else cluster_view(backend.cluster),
        "models": [msgspec.to_builtins(model) for model in models],
        "switch": switch,
        "speculation": speculation,
    }


def gpus_view(seen: SeenGpus, program_of: Callable[[int], str]) -> system.Gpus:
    """Every GPU as it was seen; None is unknown. `program_of`: the name of a process, empty where it has ended.

    >>> gpus_view(SeenGpus(why_not="no NVIDIA driver is loaded"), lambda pid: "")
    {'why_not': 'no NVIDIA driver is loaded', 'gpus': []}
    """

    def processes(found: tuple[ProcessOnGpu, ...] | None) -> list[system.GpuProcess] | None:
        if found is None:
            return None
        return [{"pid": one.pid, "used_bytes": one.used_bytes, "program": program_of(one.pid)} for one in found]

    def instance_view(instance: MigDevice) -> system.GpuInstance:
        return {
            "number": instance.number,
            "name": instance.name,
            "total_bytes": instance.total_bytes,
            "used_bytes": instance.used_bytes,
            "free_bytes": instance.free_bytes,
            "processes": processes(instance.processes),
        }

    def gpu_view(gpu: GpuState) -> system.Gpu:
        return {
            "number": gpu.number,
            "name": gpu.name,
            "uuid": gpu.uuid,
            "total_bytes": gpu.total_bytes,
            "used_bytes": gpu.used_bytes,
            "free_bytes": gpu.free_bytes,
            "busy_percent": gpu.busy_percent,
            "processes": processes(gpu.processes),
            "instances": [instance_view(instance) for instance in gpu.instances],
            "fault": gpu.fault,
        }

    return {"why_not": seen.why_not, "gpus": [gpu_view(gpu) for gpu in seen.gpus]}


TOP = 10


def inference_stats_view(
    backend: BackendInfo | None,
    hour: SpentSums,
    day: SpentSums,
    agents: list[tuple[Agent, Used]],
    gpus: SeenGpus,
    in_flight: int,
) -> InferenceStats:
    """The shape of the original specification. `topAgents`: by what each used in all, those that are there now.

    Memory in MiB, as nvidia-smi counts; None for what a GPU does not tell, and then it is in no sum.
    """
    used_most = sorted(agents, key=lambda pair: (-(pair[1].tokens_in + pair[1].tokens_out), pair[0].name))[:TOP]
    statuses = [agent.status for agent, _ in agents]
    shown = [_gpu_view(gpu) for gpu in gpus.gpus]
    return {
        "backend": system.kind_of(backend),
        "tokensLastHour": msgspec.to_builtins(hour),
        "tokensLastDay": msgspec.to_builtins(day),
        "topAgents": [
            {
                "id": agent.id,
                "name": agent.name,
                "tokensIn": used.tokens_in,
                "tokensOut": used.tokens_out,
                "tier": agent.spec.tier,
                "status": agent.status,
            }
            for agent, used in used_most
        ],
        "vram": {
            "gpus": shown,
            "totalMB": sum(gpu["totalMB"] or 0 for gpu in shown),
            "usedMB": sum(gpu["usedMB"] or 0 for gpu in shown),
        },
        "activeAgents": statuses.count(AgentStatus.RUNNING) + statuses.count(AgentStatus.PAUSED),
        "concurrentRequests": in_flight,
    }


def _gpu_view(gpu: GpuState) -> VramGpu:
    return {
        "index": gpu.number,
        "name": gpu.name or None,
        "totalMB": _mib(gpu.total_bytes),
        "usedMB": _mib(gpu.used_bytes),
        "freeMB": _mib(gpu.free_bytes),
    }


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else size_bytes // MIB
