"""Templates as the daemon knows them: who may use which, what the helper is told of one, and how each is."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.domain import Agent, AgentSpec
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, WrongState, did_you_mean
from hive.exposition import Values
from hive.link.helper import TemplateStat
from hive.link.specs import TemplateSpec
from hive.sandbox.client import SandboxClient
from hive.settings.table import Settings
from hive.settings.templates import TemplateRow, described_env, listed
from hive.shapes.templates import TemplateList, TemplateView
from hive.store import template_uids
from hive.store.database import Database
from hive.store.template_uids import UIDS, UidBlock

log = logging.getLogger("hive.daemon")

LOOK_S = 30.0
"""Between two looks at the templates for what is told once: one that failed, one whose packages changed."""
UNKNOWN, NONE = "unknown", "none"
STATES = ("none", "starting", "ready", "failed", "ended")


def interpreter_of(python: str) -> str:
    """The interpreter that a description names: itself, or that of a virtual environment."""
    return os.path.join(python, "bin", "python") if os.path.isdir(python) else python


class TemplateDesk:
    """`settings`: those at the daemon's start. `has_uids`: agents have users of their own here."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        audit_log: AuditLog,
        helper: SandboxClient,
        has_uids: bool,
    ) -> None:
        self._rows = settings.templates
        self._database = database
        self._audit_log = audit_log
        self._helper = helper
        self._has_uids = has_uids
        self._is_enabled = settings.sandbox.enabled
        self._seen: dict[str, TemplateStat] | None = None
        self._why_unseen = ""
        self._told: dict[str, str] = {}
        """Template → what was told of it last."""
        self.roster: Roster | None = None

    def __repr__(self) -> str:
        return f"<TemplateDesk {', '.join(self._rows) or 'no templates'}>"

    @property
    def described(self) -> set[tuple[str, str]]:
        """Name and owner of each."""
        return {(name, row.owner) for name, row in self._rows.items()}

    # for agents ----------------------------------------------------------------------------------------------------

    def check(self, spec: AgentSpec) -> None:
        """Raises BadRequest where there is no such template, NotPermitted where it is another tenant's."""
        if spec.template is None:
            return
        row = self._rows.get(spec.template)
        if row is None:
            raise BadRequest(f"template: there is none named {spec.template}", hint=self._which(spec.template))
        if row.owner != spec.tenant:
            raise NotPermitted(
                f"template: {spec.template} is for agents of tenant {row.owner}, and {spec.name} is one of "
                f"{spec.tenant}",
                hint=f"[template {spec.template}] owner in hive.conf says whose it is",
            )

    def _which(self, name: str) -> str:
        if not self._rows:
            return "none is described: [template NAME] in hive.conf, or a file of /etc/hive/templates.d"
        return did_you_mean(name, list(self._rows)) or f"there are {', '.join(self._rows)}"

    async def spec_of(self, agent: Agent) -> TemplateSpec | None:
        """The template as the helper is told; None for an agent without one. Raises as `check`, and WrongState where
        the agent's uid is not of the block."""
        name = agent.spec.template
        if name is None:
            return None
        self.check(agent.spec)
        row, block = self._rows[name], None
        if self._has_uids:
            block = await self._block(name, row.owner)
            if block is None or agent.uid not in block.of_agents:
                raise WrongState(
                    f"template: {agent.name} has a uid that is not of {name}'s block",
                    hint="remove the agent and create it anew: it gets one then",
                )
        return TemplateSpec(
            name=name,
            python=interpreter_of(row.python),
            imports=listed(row.imports),
            warm=listed(row.warm),
            script=row.script,
            env=described_env(row.env),
            memory_mb=row.memory_mb or None,
            pin=row.pin,
            first_uid=None if block is None else block.first,
            uids=template_uids.UIDS if block is None else block.size,
        )

    async def _block(self, name: str, owner: str) -> UidBlock | None:
        found: UidBlock | None = await self._database.read(lambda conn: template_uids.block_of(conn, name, owner))
        return found

    # for people ----------------------------------------------------------------------------------------------------

    async def all(self) -> TemplateList:
        """Those that are described, and those that agents were forked from and that no longer are."""
        found = await self._look()
        names = sorted({*self._rows, *(found or ())})
        return {"templates": [await self._view(name, found) for name in names]}

    async def one(self, name: str) -> TemplateView:
        """Raises NotFound."""
        found = await self._look()
        if name not in self._rows and name not in (found or {}):
            raise NotFound(f"there is no template {name[:60]}", hint=self._which(name))
        return await self._view(name, found)

    async def restart(self, name: str, actor: str) -> TemplateView:
        """A new process for the agents that start from now on; those of the old one stay.

        Raises NotFound, WrongState where no agent has asked for it yet, LinkLost.
        """
        before = await self.one(name)
        if before["state"] == NONE:
            raise WrongState(
                f"template {name} has not been started: no agent has asked for it", hint="its first agent starts it"
            )
        stat = await self._helper.restart_template(name)
        self._seen = {**(self._seen or {}), name: stat}
        detail = {"name": name, "state": stat.state, "reason": stat.why, "stay": len(stat.older)}
        self._audit_log.note("template.restarted", actor=actor, detail=detail)
        return await self._view(name, self._seen)

    async def _look(self) -> dict[str, TemplateStat] | None:
        """As the helper sees them; None where it cannot be asked. It is not asked where no template was ever meant."""
        if not self._is_enabled or not (self._rows or any(life.agent.spec.template for life in self.roster or ())):
            return {}
        found = await outcome_of(self._helper.templates())
        self._seen = None if isinstance(found, HiveError) else found
        self._why_unseen = found.message if isinstance(found, HiveError) else ""
        return self._seen

    async def _view(self, name: str, found: Mapping[str, TemplateStat] | None) -> TemplateView:
        row = self._rows.get(name)
        block = await self._block(name, row.owner) if row is not None and self._has_uids else None
        stat = TemplateStat(state=UNKNOWN, why=self._why_unseen) if found is None else found.get(name)
        return template_view(
            name,
            row,
            stat or TemplateStat(state=NONE),
            python="" if row is None else interpreter_of(row.python),
            block=block,
            names={life.agent.id: life.agent.name for life in self.roster or ()},
            named_by=[life.agent.name for life in self.roster or () if life.agent.spec.template == name],
        )

    # what is told once ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks every 30 s where there are templates, until cancelled."""
        while self._rows:
            if (found := await self._look()) is not None:
                self._tell(found)
            await asyncio.sleep(LOOK_S)

    def _tell(self, found: Mapping[str, TemplateStat]) -> None:
        for name, stat in found.items():
            state = "failed" if stat.state == "failed" else "stale" if stat.is_stale else ""
            if state and state != self._told.get(name):
                self._say(name, state, stat)
            self._told[name] = state

    def _say(self, name: str, state: str, stat: TemplateStat) -> None:
        if state == "failed":
            log.warning("template_failed template=%s why=%r: its agents are ordinary programs", name, stat.why)
            self._audit_log.note("template.failed", detail={"name": name, "reason": stat.why})
        else:
            log.warning("template_stale template=%s: hive template restart gives new agents what has changed", name)
            self._audit_log.note("template.stale", detail={"name": name, "agents": len(stat.agents)})

    @property
    def failed(self) -> dict[str, str]:
        """Those that do not start, as they were seen last, with the reason."""
        return {name: stat.why for name, stat in (self._seen or {}).items() if stat.state == "failed"}

    async def metrics(self) -> dict[str, Values | None]:
        """None where there is no template: nothing is asked for it."""
        found = await self._look() if self._rows else None
        if found is None:
            return {}
        states = {name: found[name].state if name in found else NONE for name in self._rows}
        return {
            "templates": {(state,): sum(state == one for one in states.values()) for state in STATES},
            "template_agents": {(name,): len(stat.agents) for name, stat in found.items()},
            "template_held_bytes": {(name,): stat.held_bytes for name, stat in found.items()},
            "template_shared_bytes": {(name,): stat.shared_bytes for name, stat in found.items()},
            "template_stale": {(name,): float(stat.is_stale) for name, stat in found.items()},
        }


# templates as the API shows them --------------------------------------------------------------------------------------


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
