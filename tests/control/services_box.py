"""A box whose daemon has services: a real daemon, database and proxy; systemd is played.

The services are servers on unix sockets in this process, of which one runs at a time, as `Conflicts=` has it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from hive.backends.switch import Target
from hive.control import backend_candidates, switching, views
from hive.control.backend_candidates import BackendCandidate, ServiceCandidates
from hive.control.switching import CHOSEN, ChosenBackend
from hive.daemon import Daemon
from hive.domain import BackendKind
from hive.errors import HiveError
from hive.settings.table import DaemonSection, InferenceSection, Settings
from hive.store import runtime_settings
from hive.store.database import Database
from tests.control.box import AWAKE, Box
from tests.waiting import until

LLAMA, VLLM, OLLAMA = BackendKind.LLAMA, BackendKind.VLLM, BackendKind.OLLAMA
QUICK = msgspec.structs.replace(
    AWAKE,
    inference=InferenceSection(switch_health_tries=3, switch_health_every_s=0.05, switch_drain_s=5),
    daemon=DaemonSection(backend_check_s=0.2),  # each look at a backend is some 10 ms of CPU time
)
MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}
GETS: dict[str, Any] = {
    "/health": {},
    "/props": {"build_info": "b1", "total_slots": 4},
    "/version": {"version": "0.32"},
    "/v1/models": MODELS,
}


class Server:
    """One service that runs: enough of llama-server and of vLLM."""

    def __init__(self, kind: str, *, generates: bool) -> None:
        self.kind = kind
        self.generates = generates
        self.served = 0
        self.asked: list[str] = []
        """For which model, request by request."""
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = head.split()[1]
                sizes = [
                    int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-len")
                ]
                body = await reader.readexactly(sum(sizes))
                status, answer = self._answer(target, body)
                data = json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, target: str, body: bytes) -> tuple[int, Any]:
        if not body:
            return (200, GETS[target]) if target in GETS else (404, {})
        if not self.generates:
            return 500, {"error": "CUDA out of memory"}
        self.served += target == "/v1/chat/completions"
        self.asked.append(json.loads(body)["model"])
        message = {"role": "assistant", "content": str(self.kind)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}} | {
            "eval_count": 1
        }


class Units(ServiceCandidates):
    """systemd and the helper, played. `broken`: what is wrong with a service: `start`, `token`, `dead` or `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Server] = {}
        self.broken: dict[str, str] = {}
        self.calls: list[str] = []
        self.printed = ""
        """The last line of each service's output."""
        self.found: BackendKind | None = None
        """The kind that is chosen where none is on record."""
        self.may_start = asyncio.Event()
        """Not set: systemd has a start under way."""
        self.may_start.set()

    def target(self, kind: str) -> Target:
        return Target(kind, str(self.folder / f"{kind}.sock"), f"{kind}.service")

    async def find(self, asked: str) -> Target:
        return self.target(backend_candidates.service(asked).kind)

    async def listed(self, active: Target | None) -> list[BackendCandidate]:
        return [BackendCandidate(target=self.target(kind), state="active", answers=True) for kind in self.running]

    async def start(self, target: Target) -> None:
        self.calls.append(f"start {target.kind}")
        await self.may_start.wait()
        if self.broken.get(target.kind) == "start":
            raise HiveError(f"systemd: Job for {target.unit} failed")
        for kind in [kind for kind in self.running if kind != target.kind]:
            self.running.pop(kind).stop()
        if target.kind not in self.running and self.broken.get(target.kind) != "dead":
            server = Server(target.kind, generates=self.broken.get(target.kind) != "token")
            self.running[target.kind] = server
            await server.start(target.address)

    async def stop(self, target: Target) -> None:
        self.calls.append(f"stop {target.kind}")
        if self.broken.get(target.kind) == "stop":
            raise HiveError(f"{target.unit} lives 10 s after SIGKILL")
        if target.kind in self.running:
            self.running.pop(target.kind).stop()

    async def why_dead(self, target: Target) -> str:
        return f"{target.unit} failed (exit-code)" if self.broken.get(target.kind) == "dead" else ""

    async def log(self, kind: str, lines: int, *, last_run: bool = False) -> str:
        return f"the last line of {kind}{self.printed}\n"

    async def first(self, inference: InferenceSection) -> Target | None:
        return None if self.found is None else self.target(self.found)


class ServicesBox(Box):
    """A box whose daemon has services; `active` in SQLite says which one was chosen."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.units = Units(directory)

    async def record(self, kind: BackendKind) -> None:
        target = self.units.target(kind)
        text = msgspec.json.encode(ChosenBackend(kind, target.address, target.unit)).decode()
        database = Database.open(self.paths.database)
        await database.write(lambda conn: runtime_settings.put(conn, CHOSEN, text, actor="t", now=0.0))
        database.close()

    async def recorded(self) -> str | None:
        database = Database.open(self.paths.database)
        found = await database.read(lambda conn: switching.read_chosen(conn, ""))
        database.close()
        return None if found is None else found.kind

    async def start_daemon(self, settings: Settings = QUICK, **options: Any) -> None:
        units = self.units

        class ServicesDaemon(Daemon):
            _has_units = True

            def _choices(self, known: list[str]) -> Units:
                return units

        self.daemon = ServicesDaemon(self.paths, settings, **options)
        await self.daemon.open()
        if self._proxy_process is not None:
            await until(lambda: self.services.proxy_link.session is not None)

    async def begin(self, to: BackendKind) -> str:
        job: str = (await self.switch(to, "uid:0"))["id"]
        return job

    async def ended(self, job: str) -> dict[str, Any]:
        """The job, however often it takes."""
        await until(lambda: self.daemon is not None)
        return await self.job(job, wait_s=20)

    async def ask(self) -> httpx.Response:
        """A request of the operator's, through the proxy."""
        access = views.access_view(self.services.proxy_link.known_port, self.services.internal_token)
        head = {"authorization": f"Bearer {access['token']}"}
        async with httpx.AsyncClient(base_url=access["openai_base_url"], headers=head, trust_env=False) as client:
            return await client.post("/chat/completions", json={"model": "m", "messages": []}, timeout=30)

    async def who_answers(self) -> str:
        answer = await self.ask()
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@asynccontextmanager
async def with_llama(directory: Path) -> AsyncIterator[ServicesBox]:
    """Everything, with llama chosen and started by the daemon."""
    box = ServicesBox(directory)
    box.paths.state.mkdir(mode=0o700)
    box.paths.runtime.mkdir()
    await box.record(LLAMA)
    await box.start_helper()
    await box.start_daemon()
    await box.start_real_proxy()
    await until(lambda: box.inference()["running"])
    yield box
    await box.end()
    for server in box.units.running.values():
        server.stop()
