"""Has the backend read agents' system prompts before they ask: at their start, their wake, and when a backend began.

It listens to what the journal tells, so no start and no wake waits for it, and nothing that goes wrong here reaches
them. What is sent, and when, models/prompts.py decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.audit.feed import DROPPED, Event
from hive.backends.kinds import whereabouts
from hive.control.effects import DaemonEffects
from hive.domain import ALIVE, AgentSpec, AgentStatus, ModelInfo, UsageEvent
from hive.errors import HiveError, NotSupported
from hive.link.proxy_link import ProxyGates
from hive.models.names import spelled
from hive.models.prompts import Prefix, PromptHolder, Warmth, share_counts, sharers
from hive.models.routing import explain_for, models_of, offers_of, preferences_of
from hive.models.salts import cache_group
from hive.models.task_names import task_names
from hive.pool.ladder import LadderCaller, NoRung, RungFacts, RungState, Task, choose_rung, task_of
from hive.settings.table import InferenceSection, Settings, TenantRow
from hive.shapes.prompts import Prompt, Prompts
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

AT_ONCE = 4
"""Prompts the proxy is asked for at a time; it lets one of each tenant through."""
BEYOND_PROXY_S = 10.0
KEPT_MAX = 10_000
"""Prompts with their standing kept; beyond that only prompts that a living agent has."""
_NO_ROW = TenantRow()
_NO_MODEL = (
    "no model is named for it, so nobody can tell which one is to read it: give the agent a `model`, "
    "or set `default_model` in [inference]"
)
_COLD = "its model is not loaded, and no model is loaded to read a prompt ahead"


class Prewarmer:
    """One per daemon; the owner spawns `run`."""

    def __init__(
        self,
        roster: Roster,
        effects: DaemonEffects,
        proxy_link: ProxyGates,
        audit_log: AuditLog,
        *,
        pooled: Callable[[], Mapping[str, tuple[ModelInfo, bool]]] = dict,
    ) -> None:
        """`pooled`: the models of the pool, each with whether it is loaded (`ModelPool.offered`)."""
        self._pooled = pooled
        self._pool_models: Mapping[str, tuple[ModelInfo, bool]] = {}
        self._roster = roster
        self._effects = effects
        self._proxy_link = proxy_link
        self._audit_log = audit_log
        self._warmth = Warmth()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._sending: set[asyncio.Task[None]] = set()
        self._routes: dict[tuple[str, str, str], str] = {}
        self._routed_by: tuple[list[ModelInfo], InferenceSection, tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        return f"<Prewarmer {self._warmth}, {len(self._sending)} under way>"

    async def run(self) -> None:
        """Until cancelled."""
        with self._audit_log.subscribe() as feed:
            async for event in feed:
                self._hear(event)

    def close(self) -> None:
        for task in list(self._sending):
            task.cancel()

    def proxy_here(self) -> None:
        """Tries prompts again that had no way to the backend before."""
        self._warmth.forgive()
        self._consider(self._roster)

    def used(self, events: Iterable[UsageEvent]) -> None:
        """Requests ended, and what they reused shows what is kept."""
        for event in events:
            life = self._roster.get(event.agent_id) if event.cached_tokens else None
            text = None if life is None else life.agent.spec.system_prompt
            if life is not None and text is not None and event.cached_tokens:
                prefix = self._holder(life, text)._replace(model=event.model).prefix
                length = len(text.encode())
                self._warmth.saw(prefix, cached_tokens=event.cached_tokens, text_bytes=length, at=event.created_at)

    def view(self) -> Prompts:
        """`GET /api/prompts`: of agents that live, the one most agents share first; never the text."""
        self._pool_models = self._pooled()
        shared = sharers(self._holders())
        counts = share_counts(shared)
        rows = [self._row(prefix, holders, counts[prefix.prompt]) for prefix, holders in shared.items()]
        return {"prompts": sorted(rows, key=lambda row: (-len(row["agents"]), row["hash"], row["tenants"]))}

    def _row(self, prefix: Prefix, holders: list[PromptHolder], shared_by: int) -> Prompt:
        standing, now = self._warmth.standing(prefix), asyncio.get_running_loop().time()
        lives = [life for one in holders if (life := self._roster.get(one.agent)) is not None]
        is_wanted = any(map(self._is_wanted, lives))
        note = next(filter(None, map(self.note, lives)), "")
        return {
            "hash": prefix.prompt,
            "bytes": len(holders[0].text.encode()),
            "agents": sorted(holder.name for holder in holders),
            "shared_by": shared_by,
            "tenants": sorted({holder.tenant for holder in holders}),
            "model": prefix.model,
            "prewarm": is_wanted,
            "warm_since": standing.warm_at,
            "tokens": standing.tokens,
            "tokens_reused": standing.reused,
            "why": self._why_cold(prefix.model) or standing.why or note or self._warmth.choose(prefix, now).why,
        }

    def note(self, life: AgentLifecycle) -> str:
        """The reason that one agent's prompt is not read ahead; empty where it is, or where it shall not be."""
        spec, effects = life.agent.spec, self._effects
        if not self._is_wanted(life) or spec.system_prompt is None:
            return ""
        asked = self._asked(life)
        if not asked:
            return _NO_MODEL
        has_server = bool(self._pool_models) or (effects.backend is not None and effects.backend.up)
        if not has_server or self._routed(life):
            return ""
        return f"{asked} is none of the models it may use here now; it is read at the next start or wake at which it is"

    # what happens -------------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        match event["kind"]:
            case "agent.running":
                life = self._roster.get(event["agent"])
                self._consider([] if life is None else [life])
            case "backend.up" | "cache.flushed":
                self._warmth.backend_began()
                self._consider(self._roster)
            case "model.loaded":
                self._warmth.model_began(str(event.get("name", "")))
                self._consider(self._roster)
            case "job.ended":  # perhaps a switch: until now the proxy let no request through to the backend
                self._warmth.forgive()
                self._consider(self._roster)
            case kind if kind == DROPPED:  # one of them may have been among those
                self._warmth.backend_began()
                self._consider(self._roster)

    def _consider(self, lives: Iterable[AgentLifecycle]) -> None:
        backend, now = self._effects.backend, asyncio.get_running_loop().time()
        self._pool_models = self._pooled()
        is_up = backend is not None and backend.up
        if not is_up and not self._pool_models:
            return  # that it is up again will be told
        for life in lives:
            text = life.agent.spec.system_prompt
            if text is None or not self._is_wanted(life) or life.status is not AgentStatus.RUNNING:
                continue
            holder = self._holder(life, text)
            if not holder.model or not self._warmth.choose(holder.prefix, now).send:
                continue
            if self._why_cold(holder.model) or not (is_up or self._is_pooled(holder.model)):
                continue  # that it is loaded, or up, will be told
            if len(self._warmth) >= KEPT_MAX:
                self._warmth.forget_all_but(sharers(self._holders()))
            epoch = self._warmth.begin(holder.prefix)
            task = spawn(self._send(holder, self._asked(life), epoch), name=f"prewarm {life.agent.name}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, holder: PromptHolder, model: str, epoch: int) -> None:
        prefix = holder.prefix
        async with self._at_once:
            within_s = self._longest_s()
            found = await outcome_of(self._proxy_link.prewarm(holder.agent, model, holder.text, within_s=within_s))
        about = (holder.name, prefix.prompt, prefix.model)
        if isinstance(found, HiveError):
            if self._warmth.standing(prefix).why != found.message:
                level = logging.INFO if isinstance(found, NotSupported) else logging.WARNING
                log.log(level, "prompt_not_read agent=%s prompt=%s model=%s error=%s", *about, found.message)
            self._warmth.failed(prefix, epoch, found.message, asyncio.get_running_loop().time())
            return
        told = (found.tokens_in, found.cached_tokens, found.took_ms)
        log.info("prompt_read agent=%s prompt=%s model=%s tokens=%s cached=%s ms=%.0f", *about, *told)
        self._warmth.read(prefix, epoch, tokens=found.tokens_in, at=time.time())

    def _longest_s(self) -> float:
        """The proxy itself gives up sooner: in the line, or at the backend."""
        settings = self._effects.settings
        proxy, models = settings.proxy, settings.models.values()
        own_s = (settings.inference.first_byte_s, *(row.first_byte_s for row in models))
        return proxy.queue_wait_s + proxy.connect_s + max(proxy.first_byte_s, *own_s) + BEYOND_PROXY_S

    # prompts and their holders -----------------------------------------------------------------------------------

    def _holders(self) -> Iterator[PromptHolder]:
        for life in self._roster:
            text = life.agent.spec.system_prompt
            if text is not None and life.status in ALIVE:
                yield self._holder(life, text)

    def _holder(self, life: AgentLifecycle, text: str) -> PromptHolder:
        agent, settings = life.agent, self._effects.settings
        tenant = agent.spec.tenant
        group = cache_group(tenant, self._row_of(tenant).cache_group) if settings.proxy.cache_isolation else ""
        return PromptHolder(agent.id, agent.name, tenant, group, self._routed(life), text)

    def _row_of(self, tenant: str) -> TenantRow:
        return self._effects.settings.tenants.get(tenant, _NO_ROW)

    def _is_pooled(self, model: str) -> bool:
        """Whether a server of the pool has it: a model that two offer is the active backend's."""
        return model in self._pool_models and all(known.name != model for known in self._effects.models)

    def _why_cold(self, model: str) -> str:
        """The reason that a prompt of it is not read now; empty where its server is there, or is none of the pool's."""
        is_cold = self._is_pooled(model) and not self._pool_models[model][1]
        return _COLD if is_cold else ""

    @staticmethod
    def _is_wanted(life: AgentLifecycle) -> bool:
        return life.agent.spec.prewarm_on_start

    def _asked(self, life: AgentLifecycle) -> str:
        """The name that its requests are answered by: of a task, the rung that one of them would be given now."""
        spec, settings = life.agent.spec, self._effects.settings
        asked = spec.model or settings.inference.default_model
        task = task_named(settings, asked) if asked else None
        if task is None:
            return asked
        return rung_for(task, lambda rung: self._given(rung, spec), lambda model: bool(self._why_cold(model))) or asked

    def _routed(self, life: AgentLifecycle) -> str:
        """The model its requests are given; empty where it names none, or none that is there."""
        return self._given(self._asked(life), life.agent.spec)

    def _given(self, asked: str, spec: AgentSpec) -> str:
        """The model that an agent of these settings is given for a name; empty where there is none."""
        inference, own = self._effects.settings.inference, self._effects.models
        names, before = tuple(self._pool_models), self._routed_by
        if before is None or before[0] is not own or before[1] is not inference or before[2] != names:
            self._routed_by = own, inference, names
            self._routes.clear()
        if not asked:
            return ""
        limited = self._row_of(spec.tenant).models
        key = (asked, str(spec.tier), limited)
        if key not in self._routes:
            backend, prefs = self._effects.backend, preferences_of(inference)
            models = [*own, *(model for name, (model, _) in self._pool_models.items() if self._is_pooled(name))]
            where = whereabouts(None if backend is None else backend.kind, models)
            asks = (models_of(limited), asked, spec.tier)
            self._routes[key] = explain_for(*asks, offers_of(models), prefs, where).model
        return self._routes[key]


# the model of a task for an agent that has not asked yet --------------------------------------------------------------


UNKNOWN_THERE = "there is none for it"


def task_named(settings: Settings, asked: str) -> Task | None:
    """The task that a name leads to, its own or an alias of `[inference]`; None where it leads to none.

    >>> from hive.settings.table import InferenceSection
    >>> from hive.settings.tasks import TaskRow
    >>> aliases = InferenceSection(aliases="gpt-4 = task:plan")
    >>> settings = Settings(tasks={"Plan": TaskRow(models="large | small")}, inference=aliases)
    >>> [task and task.rungs for task in (task_named(settings, name) for name in ("task:plan", "GPT-4", "large"))]
    [('large', 'small'), ('large', 'small'), None]
    """
    name = task_names(settings).get(spelled(asked))
    return None if name is None else task_of(name, settings.tasks[name])


def rung_for(task: Task, given: Callable[[str], str], is_cold: Callable[[str], bool]) -> str:
    """The rung, as the ladder names it: the one that is chosen now, the first that it may use where a request would
    wait or be refused, empty where it may use none. `given`: the model that a name gives this agent, empty for none.

    >>> task = Task("plan", ("none", "large", "small"))
    >>> models = {"large": "large", "small": "small"}
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: False)
    'large'
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: model == "large")
    'small'
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: True)
    'large'
    >>> rung_for(task, lambda name: "", lambda model: False)
    ''
    """
    facts = [_rung_facts(rung, given(rung), is_cold) for rung in task.rungs]
    choice = choose_rung(task, LadderCaller(), facts, 0.0)
    if not isinstance(choice, NoRung):
        return task.rungs[choice.index]
    return "" if choice.index is None else task.rungs[choice.index]


def _rung_facts(rung: str, model: str, is_cold: Callable[[str], bool]) -> RungFacts:
    if not model:
        return RungFacts(rung, refused=UNKNOWN_THERE, expected_s=None)
    return RungFacts(rung, RungState.COLD if is_cold(model) else RungState.READY, expected_s=None)
