"""A server on a port that plays the answers of an engine, as they were recorded; a test may change them meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tests.listening import listening

MODELS = b'{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm"}]}'
Told = bytes | tuple[int, bytes]


class PlayedEngine:
    """`answers`: by path; 404 to all else. With a `token` it is asked for one, as Ray's dashboard does."""

    def __init__(self) -> None:
        self.answers: dict[str, Told] = {}
        self.token = ""
        self.asked: list[str] = []
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:  # it was looked whether somebody listens
            writer.close()
            return
        target = head.split()[1]
        if length := re.search(r"(?i)content-length: (\d+)", head):
            await reader.readexactly(int(length[1]))
        self.asked.append(target)
        if target.startswith("/v1/chat") and target not in self.answers:
            await self.work(writer)
            writer.close()
            return
        told = self.answers.get(target, (404, b'{"detail":"Not Found"}'))
        status, body = told if isinstance(told, tuple) else (200, told)
        if (
            self.token
            and "authentication_mode" not in target
            and f"\r\nauthorization: bearer {self.token}\r\n".lower() not in head.lower()
        ):
            status, body = (403 if "uthorization:" in head else 401), b"Unauthorized: Missing authentication token"
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async def work(self, writer: asyncio.StreamWriter) -> None:
        """Answers a chat, where no answer to it is played."""
        writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")

    def route(self, *healthy: bool, load: int = 0) -> None:
        """Plays vLLM Router before so many workers, each with `load` requests."""
        workers = [
            {"url": f"http://10.0.0.{number}:8000", "worker_type": "regular", "is_healthy": well, "load": load}
            for number, well in enumerate(healthy, 1)
        ]
        count = sum(healthy)
        ready = {"status": "ready", "healthy_workers": count, "total_workers": len(healthy)}
        not_ready = {"status": "not_ready", "reason": "no healthy workers available", "total_workers": len(healthy)}
        self.answers |= {
            "/workers": json.dumps({"workers": workers, "total": len(workers), "stats": {}}).encode(),
            "/readiness": json.dumps(ready).encode() if count else (503, json.dumps(not_ready).encode()),
            "/health": b"All servers healthy" if all(healthy) else (503, b"Unhealthy servers"),
            "/version": b'{"version":"0.32.0"}',
            "/v1/models": MODELS,
        }

    def serve(self, *states: str, ongoing: float = 4, ingress: bool = True) -> None:
        """Plays Ray Serve's HTTP proxy and dashboard in one, with a replica in each of these states."""
        replicas = [{"state": state, "node_ip": f"10.0.0.{number}"} for number, state in enumerate(states, 1)]
        front = {"replicas": [{"state": "RUNNING", "node_ip": "10.0.0.1"}] if ingress else []}
        deployments: dict[str, Any] = {
            "LLMServer:tiny": {
                "target_num_replicas": 2,
                "replicas": replicas,
                "deployment_config": {"max_ongoing_requests": ongoing},
            },
            "OpenAiIngress": front
            | {"target_num_replicas": 2, "deployment_config": {"max_ongoing_requests": 1_000_000_000}},
        }
        app = {"route_prefix": "/", "status": "RUNNING", "deployments": deployments}
        app["deployment_topology"] = {"ingress_deployment": "OpenAiIngress"}
        self.answers |= {
            "/-/routes": b'{"/":"llm"}',
            "/v1/models": MODELS,
            "/api/authentication_mode": b'{"authentication_mode": "%b"}' % (b"token" if self.token else b"disabled"),
            "/api/serve/applications/": json.dumps({"proxies": {}, "applications": {"llm": app}}).encode(),
        }


@asynccontextmanager
async def playing(make: Callable[[], PlayedEngine] = PlayedEngine) -> AsyncIterator[PlayedEngine]:
    engine = make()
    async with listening(engine.answer) as engine.address:
        yield engine


@contextmanager
def playing_in_a_thread(make: Callable[[], PlayedEngine] = PlayedEngine) -> Iterator[PlayedEngine]:
    """The same for a test that waits itself."""
    up: Future[tuple[PlayedEngine, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with playing(make) as engine:
            over = asyncio.Event()
            up.set_result((engine, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    engine, loop, over = up.result(timeout=10)
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
