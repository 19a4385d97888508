"""A desk that keeps agents in a dict, and a program that serves the real API on top of it:

python tests/fakes/memory_daemon.py SOCKET [PORT_OF_THE_PROXY]
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from hive.agents.spec import changed_fields
from hive.control.api import serve
from hive.control.feed import Events
from hive.domain import AgentSpec
from hive.errors import NotFound, TimedOut, WrongState

Answer = dict[str, Any]


class MemoryDesk:
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
        self.gate = asyncio.Event()
        self.gate.set()
        self.finished: list[str] = []
        self.pauses: list[tuple[float, bool]] = []

    def health(self) -> Answer:
        return {
            "status": "degraded",
            "problems": ["Redis is down: requests are served, their usage waits"],
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
            "helper": {"connected": True},
            "redis": {"up": False},
            "backend": {"kind": "demo", "label": "demo backend", "address": "/r/demo.sock", "version": "1", "up": True},
        }

    async def views(self) -> list[Answer]:
        return [await self.view(name) for name in sorted(self._specs)]

    async def view(self, ref: str) -> Answer:
        spec = self._known(ref)
        fields = msgspec.to_builtins(spec)
        return {
            **fields,
            "id": f"id-{spec.name}",
            "status": self._status[spec.name],
            "depth": "awake",
            "depth_goal": "awake",
            "generation": 1,
            "since": 1.7e9,
            "reason": "exited with 1" if self._status[spec.name] == "error" else "",
            "why": "busy: 1 request in flight",
            "uid": None,
            "pid": 4711,
            "rss_bytes": 94371840,
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

    async def apply(self, spec: AgentSpec, actor: str) -> Answer:
        old = self._specs.get(spec.name)
        self._specs[spec.name] = spec
        view = await self._become(spec.name, "running", actor)
        changed = [] if old is None else changed_fields(old, spec)
        return {"agent": view, "created": old is None, "changed": changed, "restart_needed": bool(changed)}

    async def start(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def stop(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "stopped", actor)

    async def restart(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def resume(self, ref: str, actor: str) -> Answer:
        return await self._become(ref, "running", actor)

    async def pause(self, ref: str, *, timeout_s: float, now: bool, actor: str) -> Answer:
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
        return await self._become(ref, "paused", actor)

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
            "ingress_url": f"http://127.0.0.1:8480/agents/{name}/t/hi_x/",
            "socket": "/r/a/idalice.sock",
        }

    def log_path(self, ref: str) -> Path:
        return self._logs / f"{self._known(ref).name}.log"

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> Answer:
        return {
            "agentId": f"id-{self._known(ref).name}",
            "period": period,
            "totals": {"tokensIn": 1200, "tokensOut": 34},
            "byModel": [{"model": "m", "totalIn": 1200, "totalOut": 34, "count": 3}],
            "recent": [],
        }

    async def usage(self, since_s: float) -> Answer:
        numbers = {"requests": 3, "tokens_in": 1200, "tokens_out": 34, "cached_tokens": 0, "unknown": 1, "cut": 0}
        agents = [{"agent_id": f"id-{name}", "name": name, **numbers} for name in sorted(self._specs)]
        return {"token_tracking": True, "agents": agents, "totals": numbers}

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
            "models": models,
        }

    def stats(self) -> Answer:
        return {"agents": len(self._specs), "broken": 1 / len(self._specs)}

    def access(self) -> Answer:
        return {
            "openai_base_url": f"http://127.0.0.1:{self._proxy_port}/v1",
            "ollama_host": f"http://127.0.0.1:{self._proxy_port}/a/secret-token",
            "token": "secret-token",
        }

    async def shutdown(self, actor: str) -> Answer:
        names = [name for name, status in self._status.items() if status == "running"]
        for name in names:
            await self._become(name, "stopped", actor)
        return {"stopped": names, "failed": []}

    async def past_events(self, limit: int) -> list[Answer]:
        return self.past[-limit:] if limit else []

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
    desk.log_path("alice").write_text("one\ntwo\n\x1b]0;evil\x07three\n")
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
