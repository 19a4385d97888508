"""The desk behind the API, the part about the whole: health, usage, the inference server, the host, the audit table."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager

import msgspec

from hive.build import version
from hive.conditions import DISK_LEAST_BYTES, FoundCondition, condition, where_is
from hive.control import views
from hive.control.feed import Event
from hive.control.jobs import view as job_view
from hive.control.metrics import Scraper
from hive.control.pull_order import PullOrder
from hive.control.services import Services
from hive.control.steering import Steering
from hive.domain import BackendInfo, BackendKind, By, Caller, CallerKind, Tier
from hive.errors import LinkLost
from hive.host import memory
from hive.host.files import free_bytes
from hive.host.process import program_of
from hive.models.routing import Explained, models_of
from hive.paths import default_state_dir
from hive.policy import Act, may
from hive.settings.table import TenantRow
from hive.shapes import system
from hive.shapes.models import ModelList, ModelView
from hive.shapes.prompts import Prompts
from hive.store import usage
from hive.store.anew import Loss
from hive.store.audit import AuditRecord, Filter

EVERYBODY = usage.UsageFilter()


class Overview(Steering):
    """See `hive.control.desk.Desk`."""

    def __init__(self, parts: Services) -> None:
        self._parts = parts
        self._freezer = parts.freezer
        self._version = version()  # read here, and not where somebody waits for it
        state, is_default = parts.paths.state, parts.paths.state == default_state_dir(os.geteuid(), os.environ)
        self._where = where_is(apart=parts.paths.apart, state_dir=None if parts.paths.apart or is_default else state)
        self._lacking: dict[str, str] = {}
        """Agent → what of its limits is not enforced, as it was seen last."""

    def health(self) -> system.Health:
        parts, found = self._parts, self._conditions()
        backend = parts.world.backend
        return {
            "status": "degraded" if found else "ok",
            "problems": [one.text for one in found],
            "conditions": [views.condition_view(one) for one in found],
            "version": self._version,
            "pid": os.getpid(),
            "epoch": parts.epoch,
            "started_at": parts.started_at,
            "state_dir": str(parts.paths.state),
            "runtime_dir": str(parts.paths.runtime),
            "isolation": parts.isolation,
            "freezer": self._freezer,
            "limits": self._limits(),
            "token_tracking": parts.world.settings.inference.token_tracking,
            "proxy": {
                "connected": parts.gates.session is not None,
                "port": parts.gates.port,
                "ingress_port": parts.gates.ingress_port,
            },
            "api": {"listen": parts.api.address, "port": parts.api.port},
            "helper": {"connected": parts.helper.connected, "enabled": parts.settings.sandbox.enabled},
            "redis": {"up": parts.live.up, "at": str(parts.live.at), "why": parts.live.why_down},
            "usage": {"degraded": parts.consumer.degraded, "lost": parts.consumer.lost},
            "backend": None if backend is None else msgspec.to_builtins(backend),
        }

    def _limits(self) -> str:
        """Enforcement of agents' limits, in words."""
        lacking = {text for text in self._lacking.values() if text}
        return "; ".join(sorted(lacking)) or "as far as this host enforces them; hive agent show says what is not"

    def _conditions(self) -> list[FoundCondition]:
        """Conditions now, with commands as they are typed beside this daemon."""
        parts, loss = self._parts, self._parts.database.loss
        found = conditions_of(
            Facts(
                state=str(parts.paths.state),
                free_bytes=free_bytes(parts.paths.state),
                is_suspect=parts.database.is_suspect,
                loss=loss if loss is not None and loss.is_told(time.time()) else None,
                proxy=parts.gates.session is not None,
                helper=parts.helper.connected,
                redis=parts.live.up,
                redis_at=str(parts.live.at),
                redis_why=parts.live.why_down,
                usage_waits=parts.consumer.degraded,
                is_disk_full=parts.consumer.is_disk_full,
                switching_to=parts.switcher.towards,
                not_started=parts.switcher.not_started,
                backend=parts.world.backend,
            )
        )
        return [one.at(self._where) for one in found]

    async def usage(self, since_s: float, by: By = By.AGENT, of: usage.UsageFilter = EVERYBODY) -> system.Usage:
        agent = None if of.agent is None else self.once_known(of.agent)
        asked = msgspec.structs.replace(of, since=time.time() - since_s, agent=agent)
        tracked = self._parts.world.settings.inference.token_tracking
        if by is By.AGENT:
            found: usage.UsageSince = await self._parts.database.read(lambda conn: usage.usage_since(conn, asked))
            return views.usage_view(tracked, found)
        costs: list[usage.GroupCost] = await self._parts.database.read(lambda conn: usage.usage_by(conn, by, asked))
        return views.grouped_usage_view(tracked, by, costs)

    def once_known(self, ref: str) -> str:
        """An agent's id; one that was removed has no name any more. Raises NotFound."""
        return ref if re.fullmatch("[0-9a-f]{32}", ref) else self._parts.roster.find(ref).agent.id

    # the inference server -----------------------------------------------------------------------------------------

    def inference(self) -> system.Inference:
        shown = views.inference_view(self._parts.world.backend, self._parts.world.models, self._parts.settings)
        job = self._parts.switcher.job
        return {**shown, "switch": None if job is None else job_view(job, time.time())}

    def route(self, model: str, tier: Tier, tenant: str = "") -> system.Route:
        """A tenant that has no section has no limits, as at the proxy."""
        limits = self._parts.world.settings.tenants.get(tenant, TenantRow()).models
        found = self._parts.models.catalog.given(model, tier, limits)
        caller = Caller(CallerKind.AGENT, "", tenant, tier, models_of(limits))
        if (reason := may(caller, Act.USE, model)) is not None:  # the proxy asks that first
            found = Explained("", reason, (*found.steps[:1], reason), f"it may use {limits}: [tenant {tenant}] models")
        return {
            "asked": model,
            "tier": tier,
            "model": found.model,
            "why": found.why,
            "hint": found.hint,
            "steps": list(found.steps),
        }

    def prompts(self) -> Prompts:
        return self._parts.prewarmer.view()

    async def backends(self) -> system.Backends:
        active = self._parts.active.target
        found = await self._parts.switcher.listed()
        return {"backends": [views.choice_view(choice, in_use=choice.target == active) for choice in found]}

    async def backend_log(self, kind: str, lines: int) -> str:
        return await self._parts.switcher.log(kind, lines)

    async def switch(self, backend: str, actor: str) -> system.Job:
        return job_view(await self._parts.switcher.begin(backend, actor), time.time())

    async def job(self, job_id: str, *, wait_s: float) -> system.Job:
        return job_view(await self._parts.jobs.get(job_id, wait_s=wait_s), time.time())

    async def jobs(self, limit: int) -> list[system.Job]:
        return [job_view(job, time.time()) for job in await self._parts.jobs.recent(limit)]

    async def cancel_job(self, job_id: str) -> system.Job:
        models = self._parts.models
        cancelled = models.cancel(job_id) if models.has(job_id) else self._parts.switcher.cancel(job_id)
        return job_view(await cancelled, time.time())

    # models -------------------------------------------------------------------------------------------------------

    async def models(self) -> ModelList:
        return await self._parts.models.listed()

    async def model(self, model: str) -> ModelView:
        return await self._parts.models.view(model)

    async def refresh_models(self) -> ModelList:
        return await self._parts.models.refresh()

    async def pull_model(self, order: PullOrder, actor: str) -> system.Job:
        return job_view(await self._parts.models.pull(order, actor), time.time())

    async def remove_model(self, model: str, *, force: bool, actor: str) -> system.Job:
        return job_view(await self._parts.models.remove(model, force=force, actor=actor), time.time())

    # the host -----------------------------------------------------------------------------------------------------

    def memory(self) -> system.Memory:
        return views.memory_view(memory.read_memory(), memory.read_pressure(), memory.read_zrams())

    async def gpus(self) -> system.Gpus:
        return views.gpus_view(await self._parts.gpus.seen(), program_of)

    async def inference_stats(self) -> system.InferenceStats:
        parts, now = self._parts, time.time()
        hour, day, gpus, _ = await asyncio.gather(
            parts.database.read(lambda conn: usage.spent_since(conn, now - 3600)),
            parts.database.read(lambda conn: usage.spent_since(conn, now - 86400)),
            parts.gpus.seen(),
            parts.sleeper.look(),
        )
        agents = [life.agent for life in parts.roster]
        return views.inference_stats_view(
            parts.world.backend,
            hour,
            day,
            [(agent, parts.counters.used(agent.id)) for agent in agents],
            gpus,
            sum(parts.sleeper.activity(agent.id).in_flight for agent in agents),
        )

    async def metrics(self) -> bytes:
        parts = self._parts
        scraper = Scraper(
            started_at=parts.started_at,
            roster=parts.roster,
            counters=parts.counters,
            helper=parts.helper,
            gates=parts.gates,
            world=parts.world,
            live=parts.live,
            database=parts.database,
            consumer=parts.consumer,
            responses=parts.responses,
            gpus=parts.gpus,
            conditions=self._conditions,
        )
        return await scraper.scrape()

    def stats(self) -> system.Stats:
        return self._parts.counters.answer(len(self._parts.roster))

    def access(self) -> system.Access:
        port, token = self._port(), self._parts.internal_token
        return {
            "openai_base_url": f"http://127.0.0.1:{port}/v1",
            "ollama_host": f"http://127.0.0.1:{port}/a/{token}",
            "token": token,
        }

    def _port(self) -> int:
        if self._parts.gates.port is None:
            raise LinkLost("the proxy has not connected yet, so its port is not known")
        return self._parts.gates.port

    # the audit table ----------------------------------------------------------------------------------------------

    def meant(self, ref: str) -> tuple[str, str]:
        life = self._parts.roster.get(ref) or self._parts.roster.named(ref)
        return (ref, "") if life is None else (life.agent.id, life.agent.name)

    async def ordered(self, row: AuditRecord) -> None:
        await self._parts.journal.record(row)

    async def audit(self, asked: Filter, limit: int) -> system.AuditPage:
        agent = tuple({word for ref in asked.agent for word in (ref, *self.meant(ref)) if word})
        found = await self._parts.journal.page(msgspec.structs.replace(asked, agent=agent), limit)
        return {
            "rows": [views.audit_view(entry) for entry in found],
            "next": found[-1].id if len(found) == limit else None,
        }

    async def past_events(self, limit: int, agent: str = "") -> list[Event]:
        return await self._parts.journal.past(limit, agent)

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Event]]:
        return self._parts.journal.subscribe()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the daemon sees of itself. `free_bytes`: of the state's disk, None if unknown. `loss`: one that
    is still to be told. `proxy`, `helper`: connected; `redis`: up. `usage_waits`: why usage cannot be written, else
    empty. `switching_to`: empty if no switch is under way. `not_started`: why no inference server was started."""

    state: str
    free_bytes: int | None = None
    is_suspect: bool = False
    loss: Loss | None = None
    proxy: bool = True
    helper: bool = True
    redis: bool = True
    redis_at: str = ""
    redis_why: str = ""
    usage_waits: str = ""
    is_disk_full: bool = False
    switching_to: str = ""
    not_started: FoundCondition | None = None
    backend: BackendInfo | None = None


def conditions_of(seen: Facts) -> list[FoundCondition]:
    """Conditions by these facts, the worst first.

    >>> [one.code for one in conditions_of(Facts(state="/s", proxy=False, switching_to="vllm"))]
    ['proxy_disconnected', 'backend_switching']
    """
    return list(_conditions_of(seen))


def _conditions_of(seen: Facts) -> Iterator[FoundCondition]:
    if seen.is_suspect:
        yield condition("database_suspect")
    if seen.loss is not None:
        code = "database_rolled_back" if seen.loss.is_rollback else "database_begun_anew"
        yield condition(code, why=seen.loss.why, kept=seen.loss.kept, aside=seen.loss.aside)
    if not seen.proxy:
        yield condition("proxy_disconnected")
    if not seen.helper:
        yield condition("helper_disconnected")
    if not seen.redis:
        # Of that of REDIS_URL Hive knows nothing but that it does not answer.
        code = "redis_down" if seen.redis_at.startswith("/") else "redis_of_url_down"
        yield condition(code, at=seen.redis_at, why=seen.redis_why)
    if seen.free_bytes is not None and seen.free_bytes < DISK_LEAST_BYTES:
        yield condition("disk_nearly_full", path=seen.state, free_bytes=seen.free_bytes)
    if seen.usage_waits:
        code = "usage_waits_for_disk" if seen.is_disk_full else "usage_waits"
        yield condition(code, path=seen.state, why=seen.usage_waits)
    if seen.switching_to:
        yield condition("backend_switching", to=seen.switching_to)
    is_down = seen.backend is None or not seen.backend.up
    if seen.not_started is not None and is_down:
        yield seen.not_started
    if seen.backend is not None and is_down and not seen.switching_to:
        code = "demo_backend_down" if seen.backend.kind is BackendKind.DEMO else "backend_down"
        yield condition(code, at=seen.backend.address)
