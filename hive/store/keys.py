"""Every Redis key and channel name, built here and nowhere else (design.md §5)."""

from __future__ import annotations

DAY_S = 86400
"""Life of a key about an agent; the daemon refreshes it while the agent lives."""
MODELS_S = 300
"""Life of the list of models."""

USAGE_STREAM = "hive:usage"
USAGE_GROUP = "daemon"
"""Made by a Hive before 0.2, whose proxy sent usage through the stream."""
AGENTS_ACTIVITY = "hive:agents:activity"
MODELS_AVAILABLE = "hive:models:available"
INFERENCE_BACKEND = "hive:inference:backend"
CONFIG_RUNTIME = "hive:config:runtime"
PROMPTS = "hive:prompt:*"
"""Pattern of `prompt` and `prompt_agents`."""
VM_INSTANCES = "hive:vm:instance:*"
"""Pattern of `vm_instance`."""
VM_CIDS = "hive:vm:cid:*"
"""Pattern of `vm_cid`."""
VM = "hive:vm:*"
"""SCAN pattern of both."""

AGENT_STATUS = "hive:agent:status"
AGENT_LOGS = "hive:agent:logs"
SYSTEM_EVENTS = "hive:system:events"


def agent_paused(agent: str) -> str:
    return f"hive:agent:paused:{agent}"


def agent_tier(agent: str) -> str:
    return f"hive:agent:tier:{agent}"


def agent_prompt(agent: str) -> str:
    """Its value is the prompt's hash."""
    return f"hive:agent:prompt:{agent}"


def prompt(hashed: str) -> str:
    """Its value is the text."""
    return f"hive:prompt:{hashed}"


def prompt_agents(hashed: str) -> str:
    """Set of the agents that have it."""
    return f"hive:prompt:agents:{hashed}"


def agent_activity(agent: str) -> str:
    return f"hive:agent:activity:{agent}"


def agent_tokens(agent: str) -> str:
    """Hash `input output requests`, for display only: the truth is in SQLite."""
    return f"hive:agent:tokens:{agent}"


def vm_instance(instance: str) -> str:
    """Its value is the agent's id."""
    return f"hive:vm:instance:{instance}"


def gpu_lease(lease: str) -> str:
    """Its value is JSON: how much memory of which GPUs, and whose. Nobody is granted anything by it."""
    return f"hive:gpu:lease:{lease}"


def vm_cid(cid: int) -> str:
    """Its value is the agent's id."""
    return f"hive:vm:cid:{cid}"


def cid_tier(cid: int | str) -> str:
    """`agent_tier` as the original specification spells it, for guests known by their cid."""
    return f"hive:agent:tier:{cid}"


def keys_of_agent(agent: str) -> list[str]:
    """Every key that has this agent's id in its name.

    >>> keys_of_agent("a1")[:2]
    ['hive:agent:paused:a1', 'hive:agent:tier:a1']
    """
    return [of(agent) for of in (agent_paused, agent_tier, agent_prompt, agent_activity, agent_tokens)]
