"""A desk that keeps agents in a dict, and a program that serves the real API on top of it:

python tests/fakes/memory_daemon.py SOCKET [PORT_OF_THE_PROXY]
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from hive.agents.spec import changed_fields
from hive.api.server import serve
from hive.conditions import condition
from hive.control import request_views, schedule_times, views
from hive.control.api_tokens import LiveTokens
from hive.control.feed import Events
from hive.control.pull_order import PullOrder
from hive.control.state_queries import StateQueries
from hive.control.tail import Output
from hive.control.token_desk import TokenDesk
from hive.domain import AgentSpec, By, Tier
from hive.errors import BadRequest, DependencyDown, NotFound, Saturated, TimedOut, WrongState
from hive.host.nvml import SeenGpus
from hive.host.process import program_of
from hive.link.requests import QueueIs, QueueView, TenantView, UnderWay
from hive.models.routing import explain, offers_of, preferences
from hive.settings import runtime
from hive.settings.file import parse
from hive.store.audit import AuditEntry, AuditRecord, Filter
from hive.store.migrations import migrate
from hive.store.usage import EndedRequest, UsageFilter

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


class MemoryDesk(TokenDesk):
    """What the daemon answers, without one. An agent named `crasher` fails when it is started.

    `busy`: names that never become quiet; `gate` holds transitions up.
    """

    def __init__(self, logs: Path, *, proxy_port: int = 1) -> None:
        self._logs = logs
        self._proxy_port = proxy_port
        self._specs: dict[str, AgentSpec] = {}
        self._status: dict[str, str] = {}
        self.feed = Events()
        self.past: list[Answer] = []
        self.busy: set[str] = set()
        self.actors: list[str] = []
        self.orders: list[AuditRecord] = []
        self.asked: list[Filter] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.finished: list[str] = []
        self.pauses: list[tuple[float, bool]] = []
        self._depth: dict[str, str] = {}
        self._kept_until: dict[str, float | None] = {}
        self._messages: dict[str, Answer] = {}
        self._schedules: dict[int, Answer] = {}
        self._jobs: dict[str, Answer] = {}
        self.requests = [
            UnderWay(id="p1-1", state="streaming", age_ms=1234.0, queue_ms=2.5, model="x\x1b[2J", **WHOSE),
            UnderWay(id="p1-2", state="queued", age_ms=90.0, queue_ms=80.0, model="tiny", **WHOSE),
        ]
        self.keyring = LiveTokens(MemoryDatabase(), internal="secret-token-of-this-fake")  # type: ignore[arg-type]
        self._parts: Any = SimpleNamespace(keyring=self.keyring)
        self.state_queries = StateQueries(logs / "hive.db", self._no_responses)
        self.runtime_settings: dict[str, Any] = {}
        self.no_swap = False
        """Else memory can be paged out."""

    async def _no_responses(self) -> None:
        """There is no file of them. It is asked before each question, so the database is made when it is needed."""
        write_database(self._logs / "hive.db")

    def health(self) -> Answer:
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
            "backend": {"kind": "demo", "label": "demo backend", "address": "/r/demo.sock", "version": "1", "up": True},
        }

    async def views(self) -> list[Answer]:
        return [await self.view(name) for name in sorted(self._specs)]

    async def page(self, after: str, limit: int) -> Answer:
        names = sorted(name for name in self._specs if name > after)
        following = names[limit - 1] if len(names) > limit else None
        agents = [await self.view(name) for name in names[:limit]]
        return {"agents": agents, "next": following, "total": len(self._specs)}

    def shorts(self, after: str, limit: int) -> Answer:
        names = sorted(name for name in self._specs if name > after)
        following = names[limit - 1] if len(names) > limit else None
        short = [
            {"id": f"id-{name}", "name": name, "status": self._status[name], "tenant": self._specs[name].tenant}
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

    async def changes(self, since: str, fresh: Collection[str]) -> Answer:
        """Everybody, always: it remembers no cursor."""
        return {"agents": await self.views(), "gone": [], "cursor": "", "is_whole": True}

    async def view(self, ref: str) -> Answer:
        spec = self._known(ref)
        fields = msgspec.to_builtins(spec)
        return {
            **fields,
            "id": f"id-{spec.name}",
            "status": self._status[spec.name],
            "depth": self._depth.get(spec.name, "awake"),
            "depth_goal": self._depth.get(spec.name, "awake"),
            "deep_note": "swap is full" if self.no_swap and self._status[spec.name] == "paused" else "",
            "kept_awake_until": self._kept_until.get(spec.name),
            "messages_waiting": sum(found["name"] == spec.name for found in self._messages.values()),
            "restarts": 0,
            "restart_reason": "",
            "next_start_at": None,
            "next_wake_at": min((s["at"] for s in self._schedules.values() if s["name"] == spec.name), default=None),
            "capabilities": {
                "start": "",
                "pause": "",
                "deep_sleep": "this host has no swap" if self.no_swap else "",
                "limits": "",
                "egress": "it takes root",
                "exec": "",
            },
            "limits_not_enforced": "no memory controller" if spec.limits.memory_mb else "",
            "prewarm_note": "no model is named for it" if spec.prewarm_on_start and not spec.model else "",
            "generation": 1,
            "since": 1.7e9,
            "reason": "exited with 1" if self._status[spec.name] == "error" else "",
            "why": "awake: 1 request in flight",
            "brief": "1 request in flight",
            "sentence": "awake: 1 request in flight; costs 90 MiB of RAM",
            "uid": None,
            "pid": 4711,
            "rss_bytes": 9437184 if self._depth.get(spec.name) == "deep" else 94371840,
            "swap_bytes": 84934656 if self._depth.get(spec.name) == "deep" else 0,
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
        return await self._become(spec.name, "running", actor)

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
            return {"agent": None if old is None else await self.view(spec.name), **found}
        self._specs[spec.name] = spec
        return {"agent": await self._become(spec.name, "running", actor), **found}

    async def start(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def stop(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "stopped", actor)

    async def restart(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def resume(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def pause(self, ref: str, *, timeout_s: float, now: bool, deep: bool, actor: str) -> Answer:
        spec = self._known(ref)
        self.pauses.append((timeout_s, now))
        if self._status[spec.name] == "stopped":
            raise WrongState(f"{spec.name} is stopped")
        if spec.name in self.busy and now:
            busy = WrongState(f"{spec.name} is busy: 1 request in flight")
            busy.code = "busy"
            raise busy
        if spec.name in self.busy:
            raise TimedOut(f"{spec.name} stayed busy for {timeout_s:g} s", hint="it is awake")
        await self._become(ref, "paused", actor)
        self._depth[spec.name] = "deep" if deep and not self.no_swap else "light"
        if deep and self.no_swap:
            raise Saturated(f"{spec.name} sleeps, but not deep: swap is full")
        return await self.view(ref)

    async def keep_awake(self, ref: str, for_s: float, actor: str) -> Answer:
        self._kept_until[self._known(ref).name] = time.time() + for_s if for_s else None
        return await self.view(ref)

    async def send(self, ref: str, text: str, actor: str) -> Answer:
        """`later` waits for ever, `refuse` is refused, all else is accepted as soon as somebody asks for it."""
        spec = self._known(ref)
        if spec.port is None:
            raise BadRequest(f"{spec.name} has no port; messages are posted to the inbox of an agent that listens")
        message = {"id": f"m{len(self._messages)}", "state": "waiting", "text": text, "from": actor, "sent_at": 1.7e9}
        message |= {"attempts": 0, "last_error": "", "delivered_at": None, "refused_at": None, "name": spec.name}
        self._messages[message["id"]] = message
        return {**message, "status": self._status[spec.name]}

    async def messages(self, ref: str) -> Answer:
        name = self._known(ref).name
        found = [message for message in self._messages.values() if message["name"] == name]
        return {"agent": f"id-{name}", "name": name, "status": self._status[name], "why": "", "messages": found}

    async def message(self, ref: str, message_id: str, *, wait_s: float) -> Answer:
        name = self._known(ref).name
        message = self._messages.get(message_id)
        if message is None or message["name"] != name:
            raise NotFound(f"there is no message {message_id!r} for {name}")
        if message["text"] == "later":
            await asyncio.sleep(wait_s)
        elif message["text"] == "refuse":
            message |= {"state": "refused", "attempts": 5, "last_error": "its inbox answered 404", "refused_at": 1.7e9}
        else:
            del self._messages[message_id]
            message = {**message, "state": "delivered", "attempts": 1, "delivered_at": 1.7e9, "text": ""}
        return {**message, "status": self._status[name]}

    async def drop_message(self, ref: str, message_id: str, actor: str) -> Answer:
        found = await self.message(ref, message_id, wait_s=0)
        self._messages.pop(message_id, None)
        return {"dropped": message_id, "name": found["name"]}

    async def responses(self, ref: str) -> Answer:
        name = self._known(ref).name
        return {
            "agent": f"id-{name}",
            "name": name,
            "status": self._status[name],
            "responses": 2,
            "bytes": 4096,
            "oldest_at": 1.7e9,
            "most_bytes": 1048576,
            "most_days": 30,
        }

    async def delete_responses(self, ref: str, actor: str) -> Answer:
        return {"deleted": 2, "name": self._known(ref).name}

    async def schedule(self, ref: str, when: str, every: str | None, note: str, actor: str) -> Answer:
        spec, now = self._known(ref), time.time()
        first = schedule_times.parse_when(when, now=now, zone=UTC)
        every_s = None if every is None else schedule_times.seconds_of(every, field="every")
        number = len(self._schedules) + 1
        self._schedules[number] = {
            "id": number,
            "name": spec.name,
            "status": self._status[spec.name],
            "at": first.at,
            "spoken": schedule_times.spoken(first.at, UTC),
            "every_s": every_s,
            "clock": first.clock,
            "note": note,
            "actor": actor,
            "created_at": now,
            "last_at": None,
            "last_outcome": "",
        }
        return self._schedules[number]

    def schedules(self, ref: str) -> Answer:
        name = self._known(ref).name
        found = [schedule for schedule in self._schedules.values() if schedule["name"] == name]
        return {"agent": f"id-{name}", "name": name, "status": self._status[name], "schedules": found}

    async def cancel_schedule(self, ref: str, schedule_id: int, actor: str) -> Answer:
        name = self._known(ref).name
        if self._schedules.pop(schedule_id, None) is None:
            raise NotFound(f"{name} has no schedule {schedule_id}")
        return {"cancelled": schedule_id, "name": name}

    def meant(self, ref: str) -> tuple[str, str]:
        name = ref.removeprefix("id-")
        return (f"id-{name}", name) if name in self._specs else (ref, "")

    async def ordered(self, row: AuditRecord) -> None:
        self.orders.append(row)

    async def audit(self, asked: Filter, limit: int) -> Answer:
        """Its orders, without any filter but `before`."""
        rows = [views.audit_view(AuditEntry(id=n, hash=f"{n:064}", row=row)) for n, row in enumerate(self.orders, 1)]
        found = [row for row in reversed(rows) if asked.before is None or row["id"] < asked.before][:limit]
        self.asked.append(asked)
        return {"rows": found, "next": found[-1]["id"] if len(found) == limit else None}

    def memory(self) -> Answer:
        zram = {"device": "/dev/zram0", "algorithm": "lz4", "disksize_bytes": 1 << 30}
        return {
            "total_bytes": 1 << 33,
            "available_bytes": 1 << 32,
            "swap_total_bytes": 1 << 30,
            "swap_free_bytes": (1 << 30) - 84934656,
            "pressure_some_avg10": 0.0,
            "zram": [zram | {"original_bytes": 84934656, "memory_bytes": 21233664}],
        }

    async def remove(self, ref: str, actor: str) -> Answer:
        spec = self._known(ref)
        del self._specs[spec.name]
        return {"removed": f"id-{spec.name}", "name": spec.name}

    def tokens(self, ref: str) -> Answer:
        name = self._known(ref).name
        return {
            "model": "hm_x",
            "ingress": "hi_x",
            "openai_base_url": "http://127.0.0.1:11435/v1",
            "ollama_host": "http://127.0.0.1:11435/a/hm_x",
            "ingress_url": f"http://127.0.0.1:1/agents/{name}/t/hi_x/",
            "socket": "/r/a/idalice.sock",
        }

    def output(self, ref: str) -> Output:
        return Output(self._logs / f"{self._known(ref).name}.log")

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> Answer:
        return {
            "agentId": f"id-{self._known(ref).name}",
            "period": period,
            "totals": {"tokensIn": 1200, "tokensOut": 34},
            "byModel": [{"model": "m", "totalIn": 1200, "totalOut": 34, "count": 3}],
            "recent": [],
        }

    async def usage(self, since_s: float, by: By, of: UsageFilter) -> Answer:
        numbers = {"requests": 3, "tokens_in": 1200, "tokens_out": 34, "cached_tokens": 0, "unknown": 1, "cut": 0}
        told: Answer = {"token_tracking": True, "by": str(by), "totals": numbers}
        if by is By.AGENT:
            return told | {
                "agents": [{"agent_id": f"id-{name}", "name": name, **numbers} for name in sorted(self._specs)]
            }
        keys = [3600, 7200] if by is By.HOUR else [f"=a {by}\x1b[2J", f"of {of.agent} {of.tenant} {of.model}"]
        small = {**numbers, "tokens_in": 10, "tokens_out": 0}
        return told | {f"{by}s": [{str(by): key, **cost} for key, cost in zip(keys, (numbers, small), strict=True)]}

    def inference(self) -> Answer:
        models = [{"name": "demo", "size_bytes": 2_000_000_000, "owned_by": "hive", "created": 0}]
        return {
            "backend": "demo",
            "label": "demo backend (canned text)",
            "address": "/r/demo.sock",
            "running": True,
            "version": "1",
            "slots": 4,
            "slots_from": "/props total_slots",
            "priority": False,
            "prefix_cache": "none",
            "warning": "the backend queues 3 requests itself",
            "capabilities": {"endpoints": None, "fields": None, "found": ""},
            "models": models,
            "switch": next((job for job in self._jobs.values() if job["state"] == "running"), None),
        }

    async def backends(self) -> Answer:
        row = {"backend": "vllm", "address": "127.0.0.1:8000", "unit": "", "in_use": False}
        return {"backends": [{**row, "state": "running", "answers": True, "version": "0.32\x1b[2J"}]}

    async def backend_log(self, kind: str, lines: int) -> str:
        if kind not in ("", "vllm"):
            raise NotFound(f"there is no inference server {kind!r}")
        return "".join(f"line {number}\x1b[2J\n" for number in range(lines))

    async def switch(self, backend: str, actor: str) -> Answer:
        """Ends when it was looked at twice: `llama` rolled back, `demo` in use already, `http://…` never."""
        if any(job["state"] == "running" for job in self._jobs.values()):
            raise WrongState("a switch is under way", hint="`hive backend status` shows how far it is")
        self.actors.append(actor)
        job_id = f"j{len(self._jobs)}"
        job = {"id": job_id, "kind": "backend.switch", "state": "running", "step": "close", "eta_s": 20.0}
        job |= {"progress": "closing the gate", "result": None, "error": None, "actor": actor}
        self._jobs[job_id] = job = {**job, "created_at": 1.7e9, "updated_at": 1.7e9, "to": backend, "looks": 0}
        if backend == "demo":
            job |= {"state": "done", "result": {"backend": "demo", "from": "demo", "changed": False}}
        return job

    async def job(self, job_id: str, *, wait_s: float) -> Answer:
        job = self._job(job_id)
        job["looks"] += 1
        if job["kind"] != "backend.switch":
            self._look_at_model_job(job)
            return job
        if job["looks"] == 2 and job["to"] == "vllm":
            result = {"backend": "vllm", "from": "demo", "changed": True, "cut": 1, "took_s": 31.0}
            job |= {"state": "done", "result": result}
        elif job["looks"] == 2 and job["to"] == "llama":
            error = {"code": "rolled_back", "message": "llama: it failed; demo is active again", "hint": "look there"}
            job |= {"state": "failed", "error": {**error, "log": ["out of memory\x1b[2J"]}}
        return job

    def _look_at_model_job(self, job: Answer) -> None:
        job |= {"completed_bytes": 2_000_000, "total_bytes": 4_000_000}
        if job["looks"] < 2 or job["about"].startswith("slow"):
            return
        error = {"code": "not_found", "message": "Ollama: file does not exist", "hint": "look there", "log": []}
        fails = job["about"].startswith("broken")
        job |= {"state": "failed", "error": error} if fails else {"state": "done", "result": job["then"]}

    def _job(self, job_id: str) -> Answer:
        if job_id not in self._jobs:
            raise NotFound(f"there is no job {job_id}")
        return self._jobs[job_id]

    async def jobs(self, limit: int) -> list[Answer]:
        return list(self._jobs.values())[:limit]

    async def cancel_job(self, job_id: str) -> Answer:
        job = self._job(job_id)
        message = "vllm: it was cancelled; demo is active again" if job["to"] else "it was cancelled"
        error = {"code": "cancelled", "message": message, "hint": "", "log": []}
        job |= {"state": "cancelled", "error": error}
        return job

    async def inference_stats(self) -> Answer:
        return {"backend": "demo", "concurrentRequests": 2}

    async def gpus(self) -> Answer:
        return views.gpus_view(SeenGpus(why_not="no NVIDIA driver is loaded"), program_of)

    async def metrics(self) -> bytes:
        return b"hive_agents 1\n"

    def stats(self) -> Answer:
        return {"agents": len(self._specs), "broken": 1 / len(self._specs)}

    def access(self) -> Answer:
        return {
            "openai_base_url": f"http://127.0.0.1:{self._proxy_port}/v1",
            "ollama_host": f"http://127.0.0.1:{self._proxy_port}/a/secret-token",
            "token": "secret-token",
        }

    def route(self, model: str, tier: Tier, tenant: str = "") -> Answer:
        """The tenant `acme` is limited to what is q4_0."""
        there = ["llama3.2:q4_0"] if tenant == "acme" else ["llama3.2:q4_0", "llama3.2:q8_0"]
        found = explain(model, tier, offers_of(there), preferences(routing=True))
        told = {name: value for name, value in msgspec.to_builtins(found).items() if name != "is_far"}
        return {"asked": model, "tier": tier, **told}

    def prompts(self) -> Answer:
        about = {"bytes": 1200, "tenants": ["default"], "model": "tiny", "prewarm": True, "tokens_reused": 4800}
        about["shared_by"] = 5
        warm = {**about, "hash": "0123456789abcdef", "agents": list("abcde"), "warm_since": 1.0, "tokens": 300}
        cold = {**about, "hash": "fedcba9876543210", "agents": ["f"], "warm_since": None, "tokens": None}
        return {"prompts": [{**warm, "why": "kept by the backend"}, {**cold, "why": "nobody\x1b answers"}]}

    async def models(self) -> Answer:
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

    async def model(self, model: str) -> Answer:
        listed = await self.models()
        if model not in ("llama3.2:q4_0", "fast", "meta/x"):
            raise NotFound(f"there is no model {model!r}", hint="did you mean `llama3.2:q4_0`?")
        user = {"id": "id-alice", "name": "alice", "status": "running", "tier": "low", "tenant": "acme", "asks": "fast"}
        more = {"backend": "demo", "up": False, "seen_at": 1.7e9, "stale": listed["stale"], "base": "llama-3.2"}
        more |= {"variants": ["llama3.2:q8_0"], "adapters": [], "agents": [user], "file": "", "asked": model}
        return {**listed["models"][0], **more}

    async def refresh_models(self) -> Answer:
        raise DependencyDown("demo is silent", hint="`hive backend status` says more")

    async def pull_model(self, order: PullOrder, actor: str) -> Answer:
        """Half of it is there at the first look, all at the second; `slow…` never ends, `broken…` fails."""
        about = order.model.rpartition("/")[2]
        result = {"model": about, "file": f"/m/{about}", "size_bytes": 4_000_000, "next": "switch to it", "took_s": 3.0}
        return self._model_job("model.pull", about, actor, {**result, "left_out": ["run.py\x1b[2J"]})

    async def remove_model(self, model: str, *, force: bool, actor: str) -> Answer:
        if model == "llama3.2:q4_0" and not force:
            raise WrongState(f"{model} is in the inference server's memory", hint="--force removes it all the same")
        result = {"model": model, "file": "", "freed_bytes": 4_000_000, "took_s": 0.1}
        return self._model_job("model.remove", model, actor, result)

    def _model_job(self, kind: str, about: str, actor: str, then: Answer) -> Answer:
        job_id = f"j{len(self._jobs)}"
        job = {"id": job_id, "kind": kind, "state": "running", "step": kind.partition(".")[2], "eta_s": None}
        job |= {"progress": f"pulling {about}\x1b[2J", "completed_bytes": None, "total_bytes": None, "about": about}
        job |= {"result": None, "error": None, "actor": actor, "created_at": 1.7e9, "updated_at": 1.7e9}
        self.actors.append(actor)
        self._jobs[job_id] = job = {**job, "to": "", "looks": 0, "then": then}
        return job

    async def queue(self) -> Answer:
        tenants = [TenantView("acme", 2.0, 1, 1, 1234.5), TenantView("idle", 1.0, 0, 0, 0.0)]
        queue = QueueView(running=1, waiting=1, slots=4, drain_per_s=0.25, tenants=tenants)
        return request_views.queue_view(QueueIs(queue=queue, requests=self.requests, left_out=3))

    async def request(self, request_id: str) -> Answer:
        if request_id == ENDED.id:
            return request_views.ended_request_view(ENDED, None)
        for told in self.requests:
            if told.id == request_id:
                return request_views.request_view(told)
        raise NotFound(f"there is no request {request_id!r}")

    async def cancel_request(self, request_id: str) -> Answer:
        await self.request(request_id)
        self.requests = [told for told in self.requests if told.id != request_id]
        return {"cancelled": request_id}

    def config(self) -> Answer:
        return {
            "settings": [
                {
                    "name": name,
                    "value": self.runtime_settings.get(name, row.default),
                    "default": row.default,
                    "unit": row.unit,
                    "source": "runtime" if name in self.runtime_settings else "default",
                    "where": "",
                    "at_runtime": True,
                    "expected": row.expected,
                    "sentence": row.sentence,
                }
                for name, row in runtime.rows().items()
            ]
        }

    async def change_config(self, changes: Mapping[str, Any], actor: str) -> Answer:
        for name, text in runtime.checked(changes, {}).items():
            self.actors.append(actor)
            self.runtime_settings.pop(name, None)
            if text is not None:
                self.runtime_settings[name] = parse(runtime.rows()[name], text)
        return self.config()

    async def shutdown(self, actor: str) -> Answer:
        names = [name for name, status in self._status.items() if status == "running"]
        for name in names:
            await self._become(name, "stopped", actor)
        return {"stopped": names, "failed": []}

    def once_known(self, ref: str) -> str:
        return f"id-{self._known(ref).name}"

    async def past_events(self, limit: int, agent: str = "") -> list[Answer]:
        found = [event for event in self.past if not agent or event["agent"] == agent]
        return found[-limit:] if limit else []

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Answer]]:
        return self.feed.subscribe()

    def _known(self, ref: str) -> AgentSpec:
        for name, spec in self._specs.items():
            if ref in (name, f"id-{name}"):
                return spec
        raise NotFound(f"there is no agent {ref!r}", hint="hive agent list shows all")

    async def _become(self, ref: str, status: str, actor: str) -> Answer:
        name = self._known(ref).name
        await self.gate.wait()
        self._depth.pop(name, None)
        self._status[name] = "error" if (name, status) == ("crasher", "running") else status
        self.actors.append(actor)
        self.finished.append(f"{name} {status}")
        return await self.view(name)


async def main(socket: Path, proxy_port: int) -> None:
    """Until SIGTERM. Two agents: `alice`, who can be paused, and `busy-bob`, who cannot."""
    desk = MemoryDesk(socket.parent, proxy_port=proxy_port)
    for name in ("alice", "busy-bob"):
        await desk.create(AgentSpec(name=name, command=["/bin/sleep", "1000"], port=9000), "uid:0")
    desk.busy.add("busy-bob")
    desk.output("alice").path.write_text("one\ntwo\n\x1b]0;evil\x07three\n")
    desk.past = [
        {"at": 1.7e9, "kind": "agent.paused", "agent": "id-alice", "name": "alice", "from": "running", "to": "paused"}
        | {"reason": "idle for 312 s", "actor": "daemon", "outcome": "ok"}
    ]
    server = await serve(desk, socket)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print("ready", flush=True)
    await ended.wait()
    await server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
