"""The desk behind the API, the part about the whole: health, usage, the inference server, the host, the audit table."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

import msgspec

from hive.build import version
from hive.control import shapes, views
from hive.control.feed import Event
from hive.control.jobs import view as job_view
from hive.control.metrics import Scraper
from hive.control.parts import Parts
from hive.control.pull_order import PullOrder
from hive.control.shapes_models import ModelList, ModelView
from hive.control.shapes_prompts import Prompts
from hive.control.steering import Steering
from hive.domain import Caller, CallerKind, Tier
from hive.errors import LinkLost
from hive.host import memory
from hive.host.process import program_of
from hive.models.routing import Explained, models_of
from hive.policy import Act, may
from hive.settings import TenantRow
from hive.store import usage
from hive.store.audit import AuditRow, Filter
from hive.store.usage import By

EVERYBODY = usage.Asked()


class Overview(Steering):
    """See `hive.control.desk.Desk`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._freezer = parts.freezer
        self._version = version()  # read here, and not where somebody waits for it
        self._lacking: dict[str, str] = {}
        """Agent → what of its limits is not enforced, as it was seen last."""

    def health(self) -> shapes.Health:
        parts, problems = self._parts, self._problems()
        backend = parts.world.backend
        return {
            "status": "degraded" if problems else "ok",
            "problems": problems,
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
        """Whether agents' limits hold, in words."""
        lacking = {text for text in self._lacking.values() if text}
        return "; ".join(sorted(lacking)) or "as far as this host enforces them; hive agent show says what is not"

    def _problems(self) -> list[str]:
        """One sentence for each thing that is not as it should be, and what it means."""
        parts, backend = self._parts, self._parts.world.backend
        is_up, not_started = backend is not None and backend.up, parts.switcher.why_none
        loss = parts.database.loss
        found = (
            (parts.database.is_suspect, "the database is damaged: the next start of the daemon begins it anew"),
            (loss is not None and loss.is_told(time.time()), "" if loss is None else loss.sentence),
            (parts.gates.session is None, "the proxy is not connected: no request is served, nobody is put to sleep"),
            (not parts.helper.connected, "the helper is not connected: no agent can be started, paused or woken"),
            (not parts.live.up, _redis_down(str(parts.live.at), parts.live.why_down)),
            (bool(parts.consumer.degraded), f"usage waits, it cannot be written: {parts.consumer.degraded}"),
            (bool(parts.switcher.towards), f"switching to {parts.switcher.towards}: requests for the model wait"),
            (bool(not_started) and not is_up, f"no inference server was started: {not_started}"),
            (backend is not None and not is_up and not parts.switcher.towards, "the backend does not answer"),
        )
        return [sentence for is_so, sentence in found if is_so]

    async def usage(self, since_s: float, by: By = By.AGENT, of: usage.Asked = EVERYBODY) -> shapes.Usage:
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

    def inference(self) -> shapes.Inference:
        shown = views.inference_view(self._parts.world.backend, self._parts.world.models, self._parts.settings)
        job = self._parts.switcher.job
        return {**shown, "switch": None if job is None else job_view(job, time.time())}

    def route(self, model: str, tier: Tier, tenant: str = "") -> shapes.Route:
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

    async def backends(self) -> shapes.Backends:
        active = self._parts.active.target
        found = await self._parts.switcher.listed()
        return {"backends": [views.choice_view(choice, in_use=choice.target == active) for choice in found]}

    async def backend_log(self, kind: str, lines: int) -> str:
        return await self._parts.switcher.log(kind, lines)

    async def switch(self, backend: str, actor: str) -> shapes.Job:
        return job_view(await self._parts.switcher.begin(backend, actor), time.time())

    async def job(self, job_id: str, *, wait_s: float) -> shapes.Job:
        return job_view(await self._parts.jobs.get(job_id, wait_s=wait_s), time.time())

    async def jobs(self, limit: int) -> list[shapes.Job]:
        return [job_view(job, time.time()) for job in await self._parts.jobs.recent(limit)]

    async def cancel_job(self, job_id: str) -> shapes.Job:
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

    async def pull_model(self, order: PullOrder, actor: str) -> shapes.Job:
        return job_view(await self._parts.models.pull(order, actor), time.time())

    async def remove_model(self, model: str, *, force: bool, actor: str) -> shapes.Job:
        return job_view(await self._parts.models.remove(model, force=force, actor=actor), time.time())

    # the host -----------------------------------------------------------------------------------------------------

    def memory(self) -> shapes.Memory:
        return views.memory_view(memory.read_memory(), memory.read_pressure(), memory.read_zrams())

    async def gpus(self) -> shapes.Gpus:
        return views.gpus_view(await self._parts.gpus.seen(), program_of)

    async def inference_stats(self) -> shapes.InferenceStats:
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
        )
        return await scraper.scrape()

    def stats(self) -> shapes.Stats:
        return self._parts.counters.answer(len(self._parts.roster))

    def access(self) -> shapes.Access:
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

    async def ordered(self, row: AuditRow) -> None:
        await self._parts.journal.record(row)

    async def audit(self, asked: Filter, limit: int) -> shapes.AuditPage:
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


def _redis_down(at: str, why: str) -> str:
    """
    >>> _redis_down("redis:6379", "Authentication required.")
    'Redis at redis:6379 is down (Authentication required.): requests are served, their usage waits'
    """
    return f"Redis at {at} is down{f' ({why})' if why else ''}: requests are served, their usage waits"
