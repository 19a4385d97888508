"""Templates as the API shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hive.link.helper import TemplateStat
from hive.settings.templates import TemplateRow, described_env, listed
from hive.shapes.templates import TemplateView
from hive.store.template_uids import UIDS, UidBlock


def saved_of(stat: TemplateStat) -> int:
    """Bytes that agents share with the present process of a template, each of which would be its own, less what that
    process holds. Below 0 where it has too few agents to be worth it.

    >>> saved_of(TemplateStat(state="ready", agents=("a", "b", "c"), older=("c",), held_bytes=50, shared_bytes=40))
    30
    >>> saved_of(TemplateStat(state="ready", held_bytes=50, shared_bytes=40))
    -50
    """
    return stat.shared_bytes * (len(stat.agents) - len(stat.older)) - stat.held_bytes


def stage_of(row: TemplateRow) -> str:
    """
    >>> stage_of(TemplateRow(imports="openai")), stage_of(TemplateRow(script="/srv/agents/alice.py"))
    ('packages', 'ready')
    """
    return "ready" if row.script else "packages"


def template_view(
    name: str,
    row: TemplateRow | None,
    stat: TemplateStat,
    *,
    python: str,
    block: UidBlock | None,
    names: Mapping[str, str],
    named_by: Iterable[str],
) -> TemplateView:
    """`row`: None where it is described no more. `names`: of agents, by id."""
    described = row or TemplateRow()
    return {
        "name": name,
        "owner": described.owner if row is not None else "",
        "python": python,
        "imports": listed(described.imports),
        "warm": listed(described.warm),
        "script": described.script,
        "stage": stage_of(described),
        "env": sorted(described_env(described.env)),
        "memory_mb": described.memory_mb or None,
        "pin": described.pin,
        "first_uid": None if block is None else block.first,
        "uids": UIDS if block is None else block.size,
        "state": stat.state,
        "why": stat.why,
        "pid": stat.pid,
        "since": stat.since or None,
        "agents": sorted(names.get(agent, agent) for agent in stat.agents),
        "older": sorted(names.get(agent, agent) for agent in stat.older),
        "named_by": sorted(named_by),
        "held_bytes": stat.held_bytes,
        "shared_bytes": stat.shared_bytes,
        "saved_bytes": saved_of(stat),
        "packages_at": stat.packages_at or None,
        "is_stale": stat.is_stale,
    }
