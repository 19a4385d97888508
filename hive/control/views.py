"""Agents, backend and health as the API shows them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from hive.agents.lifecycle import Life
from hive.agents.tokens import TokenKind
from hive.control.stats import Used
from hive.domain import AgentSpec, BackendInfo, ModelInfo
from hive.inference.concurrency import prefix_cache
from hive.link.messages import Activity, Stat
from hive.settings import Settings

Answer = dict[str, Any]

OF_THE_PROCESS = ("command", "env", "runtime", "port", "model", "egress", "limits", "docker", "firecracker")
"""Fields of a spec that take effect at the next start; all others do at once."""


def agent_view(life: Life, *, why: str, stat: Stat | None, seen: Activity, used: Used) -> Answer:
    """The `View` of one agent. `stat` None: the helper could not be asked."""
    agent = life.agent
    took_ms, cause = life.last_wake or (None, None)
    return {
        **msgspec.to_builtins(agent.spec),
        "id": agent.id,
        "status": str(agent.status),
        "depth": str(agent.depth),
        "depth_goal": str(agent.depth_goal),
        "generation": agent.generation,
        "since": agent.since,
        "reason": agent.reason,
        "why": why,
        "uid": agent.uid,
        "pid": stat.pid if stat is not None else life.pid,
        "swap_bytes": None if stat is None else stat.swap_bytes,
        "limits_not_enforced": None if stat is None else stat.limits,
        "rss_bytes": None if stat is None else stat.rss_bytes,
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
        "last_wake_cause": None if cause is None else str(cause),
        "wakes": life.wakes,
        "pauses": life.pauses,
    }


def restart_needed(life: Life, before: AgentSpec, after: AgentSpec) -> bool:
    """Whether what lives was started with another command, environment, port … than `after` says."""
    running = life.started_spec or before
    return any(getattr(running, field) != getattr(after, field) for field in OF_THE_PROCESS)


def tokens_view(name: str, tokens: dict[TokenKind, str], *, port: int, ingress_port: int | None, socket: str) -> Answer:
    model, ingress = tokens[TokenKind.MODEL], tokens[TokenKind.INGRESS]
    return {
        "model": model,
        "ingress": ingress,
        "openai_base_url": f"http://127.0.0.1:{port}/v1",
        "ollama_host": f"http://127.0.0.1:{port}/a/{model}",
        "ingress_url": f"http://127.0.0.1:{ingress_port}/agents/{name}/t/{ingress}/",
        "socket": socket,
    }


def inference_view(backend: BackendInfo | None, models: list[ModelInfo], settings: Settings) -> Answer:
    """`slots`: requests it works on at once, None for no limit; `slots_from` and `prefix_cache` say things in words."""
    return {
        "backend": None if backend is None else str(backend.kind),
        "label": "" if backend is None else backend.label,
        "address": "" if backend is None else backend.address,
        "running": backend is not None and backend.up,
        "version": "" if backend is None else backend.version,
        "slots": None if backend is None else backend.slots,
        "slots_from": "" if backend is None else backend.slots_from,
        "priority": backend is not None and backend.priority,
        "prefix_cache": "" if backend is None else prefix_cache(backend.kind, settings),
        "warning": "" if backend is None else backend.warning,
        "models": [msgspec.to_builtins(model) for model in models],
    }
