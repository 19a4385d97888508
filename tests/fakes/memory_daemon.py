"""Services that keep agents in a dict, and a program that serves the real API on top of them:

python tests/fakes/memory_daemon.py SOCKET [PORT_OF_THE_PROXY]
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import time
from collections.abc import Collection, Mapping
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from hive.agents.spec import changed_fields
from hive.agents.tokens import TokenKind
from hive.api.server import serve
from hive.backends.switch import Target
from hive.conditions import condition
from hive.control import request_views, schedule_times, views
from hive.control.api_tokens import LiveTokens
from hive.control.backend_candidates import BackendCandidate
from hive.control.feed import Events
from hive.control.pull_order import PullOrder
from hive.control.state_queries import StateQueries
from hive.control.tail import Output
from hive.domain import Agent, AgentSpec, BackendInfo, By, JobState, ModelInfo, Tier
from hive.errors import BadRequest, DependencyDown, NotFound, TimedOut, WrongState
from hive.host import memory
from hive.host.nvml import SeenGpus
from hive.link.requests import QueueIs, QueueView, TenantView, UnderWay
from hive.models.routing import explain, offers_of, preferences
from hive.settings import runtime
from hive.settings.file import parse
from hive.settings.table import Proxy, Settings
from hive.shapes.system import RequestView
from hive.store.audit import AuditEntry, AuditRecord, Filter
from hive.store.jobs import StoredJob
from hive.store.messages import StoredMessage
from hive.store.migrations import migrate
from hive.store.responses import KeptSum
from hive.store.schedules import StoredSchedule
from hive.store.usage import EndedRequest, SpentSums, UsageFilter

REDIS_DOWN = condition("redis_of_url_down", at="redis:6379", why="WRONGPASS")

Answer = dict[str, Any]
WHOSE = {"agent": "id-alice", "name": "alice", "tenant": "acme", "endpoint": "/v1/chat/completions"}
ENDED = EndedRequest(
    id="p1-0",
    agent="id-gone",
    tenant="acme",
    model="tiny",
    backend="vllm",
    endpoint="/v1/chat/completions",
    unit="tokens",
    tokens_in=1200,
    tokens_out=8,
    cached_tokens=None,
    estimated=True,
    cut=True,
    queue_ms=3.0,
    ttft_ms=40.0,
    duration_ms=900.0,
    status=200,
    client_request_id="mine\x1b[2J",
    created_at=1.7e9,
)


DEMO = BackendInfo(
    kind="demo",
    label="demo backend (canned text)",
    address="/r/demo.sock",
    up=True,
    version="1",
    slots=4,
    slots_from="/props total_slots",
    warning="the backend queues 3 requests itself",
)


class MemoryDatabase:
    """A real one, in memory: what is asked of `hive.store.database.Database` here."""

    def __init__(self) -> None:
        self._conn = sqlite3.connect(":memory:", isolation_level=None)
        self._conn.row_factory = sqlite3.Row
        migrate(self._conn)

    async def read(self, work: Any) -> Any:
        return work(self._conn)

    write = read


def write_database(path: Path) -> None:
    """A real one in a file, with a token and a message in it."""
    if path.exists():
        return
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("PRAGMA synchronous = OFF")
    conn.execute("PRAGMA journal_mode = WAL")
    migrate(conn)
    conn.execute(
        "INSERT INTO api_tokens (id, name, digest, role, created_by, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        ("t_1", "ci", "d" * 64, "viewer", "uid:0", 1.7e9),
    )
    conn.execute(
        "INSERT INTO messages (id, agent_id, text, sender, sent_at) VALUES (?, ?, ?, ?, ?)",
        ("m1", "id-alice", "the report is due", "uid:0\x1b[2J", 1.7e9),
    )
    conn.close()


class MemoryLife:
    """An agent, as the handlers of hive/api steer one."""

    def __init__(self, services: MemoryServices, spec: AgentSpec) -> None:
        self._services = services
        self.agent = Agent(id=f"id-{spec.name}", spec=spec)

    @property
    def status(self) -> str:
        return self._services.status[self.agent.name]

    async def start(self, actor: str) -> None:
        self._services.become(self.agent.name, "running")

    restart = resume = start

    async def stop(self, actor: str) -> None:
        self._services.become(self.agent.name, "stopped")

    async def pause(self, *, timeout_s: float, now: bool, deep: bool, actor: str) -> None:
        name, services = self.agent.name, self._services
        if self.status == "stopped":
            raise WrongState(f"{name} is stopped")
        if name in services.busy and now:
            busy = WrongState(f"{name} is busy: 1 request in flight")
            busy.code = "busy"
            raise busy
        if name in services.busy:
            raise TimedOut(f"{name} stayed busy for {timeout_s:g} s", hint="it is awake")
        services.become(name, "paused")
        services.depth[name] = "deep" if deep else "light"

    async def keep_awake(self, until: float | None, actor: str) -> None:
        self._services.kept_until[self.agent.name] = until


class MemoryServices:
    """The services of a daemon, without one. An agent named `crasher` fails when it is started.

    `busy`: names that never become quiet.
    """

    def __init__(self, logs: Path, *, proxy_port: int = 1) -> None:
        self._logs = logs
        self._specs: dict[str, AgentSpec] = {}
        self.status: dict[str, str] = {}
        self.depth: dict[str, str] = {}
        self.kept_until: dict[str, float | None] = {}
        self.busy: set[str] = set()
        self._messages: dict[str, StoredMessage] = {}
        self._schedules: dict[int, StoredSchedule] = {}
        self._jobs: dict[str, Answer] = {}
        self._requests = [
            UnderWay(id="p1-1", state="streaming", age_ms=1234.0, queue_ms=2.5, model="x\x1b[2J", **WHOSE),
            UnderWay(id="p1-2", state="queued", age_ms=90.0, queue_ms=80.0, model="tiny", **WHOSE),
        ]
        self._runtime_settings: dict[str, Any] = {}
        self._orders: list[AuditRecord] = []
        self.past: list[Answer] = []
        self.internal_token = "secret-token"
        self.settings = Settings()
        self.paths = SimpleNamespace(agent_socket=lambda _: "/r/a/idalice.sock")
        self.keyring = LiveTokens(MemoryDatabase(), internal="secret-token-of-this-fake")  # type: ignore[arg-type]
        self.state_queries = StateQueries(logs / "hive.db", self._no_responses)
        self.world = SimpleNamespace(
            settings=Settings(proxy=Proxy(responses_kept_mb=1, responses_kept_days=30)),
            backend=DEMO,
            models=[ModelInfo(name="demo", size_bytes=2_000_000_000, owned_by="hive", created=0)],
            token=lambda _, kind: "hm_x" if kind is TokenKind.MODEL else "hi_x",
        )
        self.roster = self
        self.agents = self
        self.agent_views = SimpleNamespace(
            of=self._view, all=self._views, page=self._page, shorts=self._shorts, changes=self._changes
        )
        self.gates = SimpleNamespace(
            known_port=proxy_port, ingress_port=1, queue=self._queue, cancel=self._cancel_request
        )
        self.runtimes = SimpleNamespace(output_of=lambda agent, _: Output(logs / f"{agent.name}.log"))
        self.courier = SimpleNamespace(
            send=self._send, undelivered=self._undelivered, get=self._message, drop=self._drop_message
        )
        self.scheduler = SimpleNamespace(
            zone=lambda: UTC, add=self._schedule, of=self._schedules_of, cancel=self._cancel_schedule
        )
        self.responses = SimpleNamespace(summed=self._responses)
        self.prewarmer = SimpleNamespace(view=self._prompts)
        self.active = SimpleNamespace(target=None)
        self.jobs = SimpleNamespace(get=self._job, recent=self._recent_jobs)
        self.models = SimpleNamespace(
            listed=self._models,
            view=self._model,
            route=self._route,
            refresh=self._refresh_models,
            pull=self._pull_model,
            remove=self._remove_model,
            has=lambda _: True,
            cancel=self._cancel_job,
        )
        self.gpus = SimpleNamespace(seen=self._gpus)
        self.config = SimpleNamespace(view=self._config, change=self._change_config)
        self.journal = SimpleNamespace(
            record=self._record, page=self._audit, past=self._past_events, subscribe=Events().subscribe
        )
        self.counters = SimpleNamespace(answer=lambda agents: {"agents": agents})
        self.usage = SimpleNamespace(
            spent=self._usage, of_agent=self._agent_usage, request=self._request, inference=self._inference_stats
        )
        self.health = SimpleNamespace(view=self._health)
        self.scraper = SimpleNamespace(scrape=self._metrics)

    @property
    def switcher(self) -> SimpleNamespace:
        running = next((job for job in self._jobs.values() if job["state"] == "running"), None)
        return SimpleNamespace(
            job=None if running is None else stored(running),
            begin=self._switch,
            listed=self._backends,
            log=self._backend_log,
        )

    def __len__(self) -> int:
        return len(self._specs)

    def find(self, ref: str) -> MemoryLife:
        return MemoryLife(self, self._known(ref))

    def once_known(self, ref: str) -> str:
        return f"id-{self._known(ref).name}"

    def identified(self, ref: str) -> tuple[str, str]:
        name = ref.removeprefix("id-")
        return (f"id-{name}", name) if name in self._specs else (ref, "")

    async def _no_responses(self) -> None:
        """There is no file of them. It is asked before each question, so the database is made when it is needed."""
        write_database(self._logs / "hive.db")

    def _health(self) -> Answer:
        return {
            "status": "degraded",
            "problems": [REDIS_DOWN.text],
            "conditions": [msgspec.to_builtins(REDIS_DOWN)],
            "version": "0.1.0",
            "pid": 1,
            "epoch": "e1",
            "started_at": 1.7e9,
            "state_dir": "/s",
            "runtime_dir": "/r",
            "isolation": "none",
            "freezer": "signal",
            "limits": "not enforced",
            "token_tracking": True,
            "proxy": {"connected": True, "port": 11435, "ingress_port": 8480},
            "api": {"listen": "127.0.0.1", "port": 3000},
            "helper": {"connected": True, "enabled": True},
            "redis": {"up": False, "at": "redis:6379", "why": "WRONGPASS"},
            "usage": {"degraded": "", "lost": 0},
            "backend": msgspec.to_builtins(DEMO),
        }

    async def _views(self) -> list[Answer]:
        return [await self._view(self.find(name)) for name in sorted(self._specs)]

    async def _page(self, after: str, limit: int) -> Answer:
        names = sorted(name for name in self._specs if name > after)
        following = names[limit - 1] if len(names) > limit else None
        agents = [await self._view(self.find(name)) for name in names[:limit]]
        return {"agents": agents, "next": following, "total": len(self._specs)}

    def _shorts(self, after: str, limit: int) -> Answer:
        names = sorted(name for name in self._specs if name > after)
        following = names[limit - 1] if len(names) > limit else None
        short = [
            {
                "id": f"id-{name}",
                "name": name,
                "tenant": self._specs[name].tenant,
                "runtime": self._specs[name].runtime,
                "status": self.status[name],
                "depth": self.depth.get(name, "awake"),
                "since": 1.7e9,
            }
            for name in names[:limit]
        ]
        return {"agents": short, "next": following, "total": len(self._specs)}

    async def remove_many(self, refs: Collection[str], actor: str) -> Answer:
        told: Answer = {"removed": [], "failed": []}
        for ref in refs:
            try:
                told["removed"].append(await self.remove(ref, actor))
            except NotFound as error:
                told["failed"].append(views.not_removed_view(ref, error))
        return told

    async def _changes(self, since: str, fresh: Collection[str]) -> Answer:
        """Everybody, always: it remembers no cursor."""
        return {"agents": await self._views(), "gone": [], "cursor": "", "is_whole": True}

    async def _view(self, life: MemoryLife) -> Answer:
        spec = life.agent.spec
        fields = msgspec.to_builtins(spec)
        return {
            **fields,
            "id": f"id-{spec.name}",
            "status": self.status[spec.name],
            "depth": self.depth.get(spec.name, "awake"),
            "depth_goal": self.depth.get(spec.name, "awake"),
            "deep_note": "",
            "kept_awake_until": self.kept_until.get(spec.name),
            "messages_waiting": sum(found.agent_id == life.agent.id for found in self._messages.values()),
            "restarts": 0,
            "restart_reason": "",
            "next_start_at": None,
            "next_wake_at": min((one.at for one in self._schedules_of(life.agent.id)), default=None),
            "capabilities": {
                "start": "",
                "pause": "",
                "deep_sleep": "",
                "limits": "",
                "egress": "it takes root",
                "exec": "",
            },
            "limits_not_enforced": "no memory controller" if spec.limits.memory_mb else "",
            "prewarm_note": "no model is named for it" if spec.prewarm_on_start and not spec.model else "",
            "generation": 1,
            "since": 1.7e9,
            "reason": "exited with 1" if self.status[spec.name] == "error" else "",
            "why": "awake: 1 request in flight",
            "brief": "1 request in flight",
            "sentence": "awake: 1 request in flight; costs 90 MiB of RAM",
            "uid": None,
            "pid": 4711,
            "rss_bytes": 9437184 if self.depth.get(spec.name) == "deep" else 94371840,
            "swap_bytes": 84934656 if self.depth.get(spec.name) == "deep" else 0,
            "cpu_us": 1500000,
            "processes": 1,
            "in_flight": 1,
            "parked": 0,
            "ingress_open": 0,
            "requests": 3,
            "tokens_in": 1200,
            "tokens_out": 34,
            "last_active_at": None,
            "created_at": 1.7e9,
            "last_wake_ms": 2.5,
            "last_wake_cause": "ingress",
            "wakes": 2,
            "pauses": 2,
        }

    async def create(self, spec: AgentSpec, actor: str) -> Answer:
        if spec.name in self._specs:
            raise WrongState(f"there is already an agent {spec.name}", hint="hive agent apply changes it")
        self._specs[spec.name] = spec
        self.become(spec.name, "running")
        return await self._view(self.find(spec.name))

    async def apply(self, spec: AgentSpec, actor: str, *, dry_run: bool = False) -> Answer:
        old = self._specs.get(spec.name)
        found = {
            "created": old is None,
            "changed": [] if old is None else changed_fields(old, spec),
            "changes": views.changes(old, spec),
            "restart_needed": old is not None and old != spec,
            "dry_run": dry_run,
        }
        if dry_run:
            return {"agent": None if old is None else await self._view(self.find(spec.name)), **found}
        self._specs[spec.name] = spec
        self.become(spec.name, "running")
        return {"agent": await self._view(self.find(spec.name)), **found}

    async def _send(self, life: MemoryLife, text: str, actor: str) -> StoredMessage:
        """`later` waits for ever, `refuse` is refused, all else is accepted as soon as somebody asks for it."""
        if life.agent.spec.port is None:
            name = life.agent.name
            raise BadRequest(f"{name} has no port; messages are posted to the inbox of an agent that listens")
        message = StoredMessage(
            id=f"m{len(self._messages)}", agent_id=life.agent.id, text=text, sender=actor, sent_at=1.7e9
        )
        self._messages[message.id] = message
        return message

    async def _undelivered(self, life: MemoryLife) -> tuple[list[StoredMessage], str]:
        return [message for message in self._messages.values() if message.agent_id == life.agent.id], ""

    async def _message(self, life: MemoryLife, message_id: str, *, within_s: float) -> StoredMessage:
        message = self._messages.get(message_id)
        if message is None or message.agent_id != life.agent.id:
            raise NotFound(f"there is no message {message_id!r} for {life.agent.name}")
        if message.text == "later":
            await asyncio.sleep(within_s)
            return message
        changes: Answer = {"attempts": 1, "delivered_at": 1.7e9, "text": ""}
        if message.text == "refuse":
            changes = {"attempts": 5, "last_error": "its inbox answered 404", "refused_at": 1.7e9}
        else:
            del self._messages[message_id]
        return msgspec.structs.replace(message, **changes)

    async def _drop_message(self, life: MemoryLife, message_id: str, actor: str) -> StoredMessage:
        found = await self._message(life, message_id, within_s=0)
        self._messages.pop(message_id, None)
        return found

    async def _responses(self, agent: str) -> KeptSum:
        return KeptSum(responses=2, bytes=4096, oldest_at=1.7e9)

    async def delete_responses(self, life: MemoryLife, actor: str) -> Answer:
        return {"deleted": 2, "name": life.agent.name}

    async def _schedule(self, life: MemoryLife, when: str, every: str | None, note: str, actor: str) -> StoredSchedule:
        now = time.time()
        first = schedule_times.parse_when(when, now=now, zone=UTC)
        every_s = None if every is None else schedule_times.seconds_of(every, field="every")
        schedule = StoredSchedule(
            id=len(self._schedules) + 1,
            agent_id=life.agent.id,
            at=first.at,
            every_s=every_s,
            clock=first.clock,
            note=note,
            actor=actor,
            created_at=now,
        )
        self._schedules[schedule.id] = schedule
        return schedule

    def _schedules_of(self, agent: str) -> list[StoredSchedule]:
        return [schedule for schedule in self._schedules.values() if schedule.agent_id == agent]

    async def _cancel_schedule(self, life: MemoryLife, schedule_id: int, actor: str) -> StoredSchedule:
        if (found := self._schedules.pop(schedule_id, None)) is None:
            raise NotFound(f"{life.agent.name} has no schedule {schedule_id}")
        return found

    async def _record(self, row: AuditRecord) -> None:
        self._orders.append(row)

    async def _audit(self, asked: Filter, limit: int) -> list[AuditEntry]:
        """Its orders, without any filter but `before`."""
        rows = [AuditEntry(id=n, hash=f"{n:064}", row=row) for n, row in enumerate(self._orders, 1)]
        return [row for row in reversed(rows) if asked.before is None or row.id < asked.before][:limit]

    async def remove(self, ref: str, actor: str) -> Answer:
        spec = self._known(ref)
        del self._specs[spec.name]
        return {"removed": f"id-{spec.name}", "name": spec.name}

    async def _agent_usage(self, agent: str, period_s: float, period: str, limit: int) -> Answer:
        return {
            "agentId": agent,
            "period": period,
            "totals": {"tokensIn": 1200, "tokensOut": 34},
            "byModel": [{"model": "m", "totalIn": 1200, "totalOut": 34, "count": 3}],
            "recent": [],
        }

    async def _usage(self, since_s: float, by: By, of: UsageFilter) -> Answer:
        numbers = {"requests": 3, "tokens_in": 1200, "tokens_out": 34, "cached_tokens": 0, "unknown": 1, "cut": 0}
        told: Answer = {"token_tracking": True, "by": str(by), "totals": numbers}
        if by is By.AGENT:
            return told | {
                "agents": [{"agent_id": f"id-{name}", "name": name, **numbers} for name in sorted(self._specs)]
            }
        keys = [3600, 7200] if by is By.HOUR else [f"=a {by}\x1b[2J", f"of {of.agent} {of.tenant} {of.model}"]
        small = {**numbers, "tokens_in": 10, "tokens_out": 0}
        return told | {f"{by}s": [{str(by): key, **cost} for key, cost in zip(keys, (numbers, small), strict=True)]}

    async def _backends(self) -> list[BackendCandidate]:
        return [
            BackendCandidate(
                target=Target("vllm", "127.0.0.1:8000"), state="running", answers=True, version="0.32\x1b[2J"
            )
        ]

    async def _backend_log(self, kind: str, lines: int) -> str:
        if kind not in ("", "vllm"):
            raise NotFound(f"there is no inference server {kind!r}")
        return "".join(f"line {number}\x1b[2J\n" for number in range(lines))

    async def _switch(self, backend: str, actor: str) -> StoredJob:
        """Ends when it was looked at twice: `llama` rolled back, `demo` in use already, `http://…` never."""
        if any(job["state"] == "running" for job in self._jobs.values()):
            raise WrongState("a switch is under way", hint="`hive backend status` shows how far it is")
        job_id, now = f"j{len(self._jobs)}", time.time()
        job = {"id": job_id, "kind": "backend.switch", "state": "running", "step": "close", "eta_s": 20.9}
        job |= {"progress": "closing the gate", "result": None, "error": None, "actor": actor}
        self._jobs[job_id] = job = {**job, "created_at": now, "updated_at": now, "to": backend, "looks": 0}
        if backend == "demo":
            job |= {"state": "done", "result": {"backend": "demo", "from": "demo", "changed": False}}
        return stored(job)

    async def _job(self, job_id: str, *, wait_s: float) -> StoredJob:
        job = self._known_job(job_id)
        job["looks"] += 1
        if job["kind"] != "backend.switch":
            self._look_at_model_job(job)
            return stored(job)
        if job["looks"] == 2 and job["to"] == "vllm":
            result = {"backend": "vllm", "from": "demo", "changed": True, "cut": 1, "took_s": 31.0}
            job |= {"state": "done", "result": result}
        elif job["looks"] == 2 and job["to"] == "llama":
            error = {"code": "rolled_back", "message": "llama: it failed; demo is active again", "hint": "look there"}
            job |= {"state": "failed", "error": {**error, "log": ["out of memory\x1b[2J"]}}
        return stored(job)

    def _look_at_model_job(self, job: Answer) -> None:
        job |= {"completed_bytes": 2_000_000, "total_bytes": 4_000_000}
        if job["looks"] < 2 or job["about"].startswith("slow"):
            return
        error = {"code": "not_found", "message": "Ollama: file does not exist", "hint": "look there", "log": []}
        fails = job["about"].startswith("broken")
        job |= {"state": "failed", "error": error} if fails else {"state": "done", "result": job["then"]}

    def _known_job(self, job_id: str) -> Answer:
        if job_id not in self._jobs:
            raise NotFound(f"there is no job {job_id}")
        return self._jobs[job_id]

    async def _recent_jobs(self, limit: int) -> list[StoredJob]:
        return [stored(job) for job in self._jobs.values()][:limit]

    async def _cancel_job(self, job_id: str) -> StoredJob:
        job = self._known_job(job_id)
        message = "vllm: it was cancelled; demo is active again" if job["to"] else "it was cancelled"
        error = {"code": "cancelled", "message": message, "hint": "", "log": []}
        job |= {"state": "cancelled", "error": error}
        return stored(job)

    async def _inference_stats(self) -> Answer:
        spent = SpentSums()
        return dict(views.inference_stats_view(DEMO, spent, spent, [], SeenGpus(), in_flight=2))

    async def _gpus(self) -> SeenGpus:
        return SeenGpus(why_not="no NVIDIA driver is loaded")

    async def _metrics(self) -> bytes:
        return b"hive_agents 1\n"

    def _route(self, model: str, tier: Tier, tenant: str = "") -> Answer:
        """The tenant `acme` is limited to what is q4_0."""
        there = ["llama3.2:q4_0"] if tenant == "acme" else ["llama3.2:q4_0", "llama3.2:q8_0"]
        found = explain(model, tier, offers_of(there), preferences(routing=True))
        told = {name: value for name, value in msgspec.to_builtins(found).items() if name != "is_far"}
        return {"asked": model, "tier": tier, **told}

    def _prompts(self) -> Answer:
        about = {"bytes": 1200, "tenants": ["default"], "model": "tiny", "prewarm": True, "tokens_reused": 4800}
        about["shared_by"] = 5
        warm = {**about, "hash": "0123456789abcdef", "agents": list("abcde"), "warm_since": 1.0, "tokens": 300}
        cold = {**about, "hash": "fedcba9876543210", "agents": ["f"], "warm_since": None, "tokens": None}
        return {"prompts": [{**warm, "why": "kept by the backend"}, {**cold, "why": "nobody\x1b answers"}]}

    async def _models(self) -> Answer:
        """As `route` knows them."""
        listed = {"seen_at": 1.7e9, "stale": "demo does not answer: this is what it offered last", "backend": "demo"}
        listed |= {"label": "demo", "up": False, "routing": True, "aliases": {"fast": ["llama3.2:q4_0"]}}
        small = {"name": "llama3.2:q4_0", "size_bytes": 1_900_000_000, "parameters": 3_210_000_000, "parent": ""}
        small |= {"quantization": "Q4_0", "loaded": True, "aliases": ["fast"], "tiers": ["low"], "owned_by": "library"}
        small |= {"created": 1_700_000_000, "leaves": ""}
        large = {**small, "name": "llama3.2:q8_0\x1b[2J", "size_bytes": None, "parameters": None, "quantization": ""}
        large |= {"loaded": None, "aliases": [], "tiers": ["medium", "high"], "created": 0}
        listed |= {"directory": "/var/lib/hive/models/pulled", "files": {"qwen3-8b\x1b[2J": 15 << 30}}
        return {**listed, "models": [small, large]}

    async def _model(self, model: str) -> Answer:
        listed = await self._models()
        if model not in ("llama3.2:q4_0", "fast", "meta/x"):
            raise NotFound(f"there is no model {model!r}", hint="did you mean `llama3.2:q4_0`?")
        user = {"id": "id-alice", "name": "alice", "status": "running", "tier": "low", "tenant": "acme", "asks": "fast"}
        more = {"backend": "demo", "up": False, "seen_at": 1.7e9, "stale": listed["stale"], "base": "llama-3.2"}
        more |= {"variants": ["llama3.2:q8_0"], "adapters": [], "agents": [user], "file": ""}
        return {**listed["models"][0], **more} | ({"name": model} if "/" in model else {})

    async def _refresh_models(self) -> Answer:
        raise DependencyDown("demo is silent", hint="`hive backend status` says more")

    async def _pull_model(self, order: PullOrder, actor: str) -> StoredJob:
        """Half of it is there at the first look, all at the second; `slow…` never ends, `broken…` fails."""
        about = order.model.rpartition("/")[2]
        result = {"model": about, "file": f"/m/{about}", "size_bytes": 4_000_000, "next": "switch to it", "took_s": 3.0}
        return self._model_job("model.pull", about, actor, {**result, "left_out": ["run.py\x1b[2J"]})

    async def _remove_model(self, model: str, *, force: bool, actor: str) -> StoredJob:
        if model == "llama3.2:q4_0" and not force:
            raise WrongState(f"{model} is in the inference server's memory", hint="--force removes it all the same")
        result = {"model": model, "file": "", "freed_bytes": 4_000_000, "took_s": 0.1}
        return self._model_job("model.remove", model, actor, result)

    def _model_job(self, kind: str, about: str, actor: str, then: Answer) -> StoredJob:
        job_id, now = f"j{len(self._jobs)}", time.time()
        job: Answer = {"id": job_id, "kind": kind, "state": "running", "step": kind.partition(".")[2], "eta_s": None}
        job |= {"progress": f"pulling {about}\x1b[2J", "completed_bytes": None, "total_bytes": None, "about": about}
        job |= {"result": None, "error": None, "actor": actor, "created_at": now, "updated_at": now}
        self._jobs[job_id] = job = {**job, "to": "", "looks": 0, "then": then}
        return stored(job)

    async def _queue(self) -> QueueIs:
        tenants = [TenantView("acme", 2.0, 1, 1, 1234.5), TenantView("idle", 1.0, 0, 0, 0.0)]
        queue = QueueView(running=1, waiting=1, slots=4, drain_per_s=0.25, tenants=tenants)
        return QueueIs(queue=queue, requests=self._requests, left_out=3)

    async def _request(self, request_id: str) -> RequestView:
        if request_id == ENDED.id:
            return request_views.ended_request_view(ENDED, None)
        for told in self._requests:
            if told.id == request_id:
                return request_views.request_view(told)
        raise NotFound(f"there is no request {request_id!r}")

    async def _cancel_request(self, request_id: str) -> None:
        await self._request(request_id)
        self._requests = [told for told in self._requests if told.id != request_id]

    def _config(self) -> list[Answer]:
        return [
            {
                "name": name,
                "value": self._runtime_settings.get(name, row.default),
                "default": row.default,
                "unit": row.unit,
                "source": "runtime" if name in self._runtime_settings else "default",
                "where": "",
                "at_runtime": True,
                "expected": row.expected,
                "sentence": row.sentence,
            }
            for name, row in runtime.rows().items()
        ]

    async def _change_config(self, changes: Mapping[str, Any], actor: str) -> None:
        for name, text in runtime.checked(changes, {}).items():
            self._runtime_settings.pop(name, None)
            if text is not None:
                self._runtime_settings[name] = parse(runtime.rows()[name], text)

    async def shutdown(self, actor: str) -> Answer:
        names = [name for name, status in self.status.items() if status == "running"]
        for name in names:
            self.become(name, "stopped")
        return {"stopped": names, "failed": []}

    async def _past_events(self, limit: int, agent: str = "") -> list[Answer]:
        found = [event for event in self.past if not agent or event["agent"] == agent]
        return found[-limit:] if limit else []

    def _known(self, ref: str) -> AgentSpec:
        for name, spec in self._specs.items():
            if ref in (name, f"id-{name}"):
                return spec
        raise NotFound(f"there is no agent {ref!r}", hint="hive agent list shows all")

    def become(self, name: str, status: str) -> None:
        self.depth.pop(name, None)
        self.status[name] = "error" if (name, status) == ("crasher", "running") else status


def stored(job: Answer) -> StoredJob:
    plan = {"step": job["step"], "model": job.get("about", "")}
    plan |= {"completed_bytes": job.get("completed_bytes"), "total_bytes": job.get("total_bytes")}
    fields = ("id", "kind", "progress", "eta_s", "result", "error", "actor", "created_at", "updated_at")
    return StoredJob(state=JobState(job["state"]), plan=plan, **{name: job[name] for name in fields})


async def main(socket: Path, proxy_port: int) -> None:
    """Until SIGTERM. Two agents: `alice`, who can be paused, and `busy-bob`, who cannot."""
    services: Any = MemoryServices(socket.parent, proxy_port=proxy_port)
    for name in ("alice", "busy-bob"):
        await services.create(AgentSpec(name=name, command=["/bin/sleep", "1000"], port=9000), "uid:0")
    services.busy.add("busy-bob")
    (socket.parent / "alice.log").write_text("one\ntwo\n\x1b]0;evil\x07three\n")
    services.past = [
        {"at": 1.7e9, "kind": "agent.paused", "agent": "id-alice", "name": "alice", "from": "running", "to": "paused"}
        | {"reason": "idle for 312 s", "actor": "daemon", "outcome": "ok"}
    ]
    used = (1 << 30) - 84934656
    memory.read_memory = lambda: memory.MemInfo(1 << 33, 1 << 32, 1 << 30, used)
    memory.read_pressure = lambda: memory.Pressure(0.0, 0.0)
    memory.read_zrams = lambda: [memory.ZramDevice("/dev/zram0", "lz4", 1 << 30, 84934656, 21233664)]
    server = await serve(services, socket)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print("ready", flush=True)
    await ended.wait()
    await server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
