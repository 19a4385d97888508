"""A real daemon with much in its database, to be asked from outside: `python populated.py DIRECTORY [PORT]`.

Says in one line of JSON where it is (`url`, `token` of an admin, `socket`), and lives until its standard input ends.
Redis is whatever answers at DIRECTORY/r/redis.sock. Its caller may be a fuzzer, so that nothing it is told can
reach beyond DIRECTORY:

- the helper's policy permits one program, `sleep`, and no container, machine, mount or network;
- messages go to an inbox here, whatever port or path their agent names;
- the only inference servers that are ever asked are the two demo ones here; models of the pool have no files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from hive.adapters.base_model import BaseModel
from hive.api.failures import Failures
from hive.api.server import Tcp
from hive.backends.switch import Target
from hive.control.backend_candidates import Choices, RunningCandidates
from hive.control.listening import WantedAddress
from hive.daemon import Daemon
from hive.demo import server
from hive.domain import AgentSpec, BackendKind, JobState, Role, RuntimeKind, UsageEvent
from hive.errors import DependencyDown, HiveError, NotFound
from hive.lifecycle.job_output import JobOutput
from hive.link.jobs import JobWord
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import CloseBackend, Done, Drained, Hello, ProxyTable
from hive.link.requests import AskQueue, CancelRequest, QueueIs, QueueView, TenantView, UnderWay
from hive.link.tasks import RungRow, TaskRoute
from hive.runtimes.process import ProcessRuntime, log_pipes_of
from hive.sandbox.allowed import Allowed
from hive.sandbox.server import HelperServer
from hive.sandbox.slot_sessions import SlotSessions
from hive.settings.adapters import AdaptersSection
from hive.settings.pool import ModelRow
from hive.settings.table import Settings
from hive.settings.tasks import TaskRow
from hive.settings.templates import TemplateRow
from hive.slots.model_slots import ModelSlots
from hive.store import job_turns, jobs, usage
from hive.store.database import Database
from hive.store.job_turns import KIND, JobSignalRow, JobTurnRow
from hive.store.jobs import StoredJob
from hive.tasks import spawn
from tests.adapters.lora_files import Box as AdapterBox
from tests.control.box import AWAKE, Box
from tests.fakes.proxy_peer import ProxyPeer

POLICY = """
runtimes = ["process"]
programs = ["/usr/bin/sleep"]

[networks]
host = true

[limits]
memory_mb = 256
pids = 8
files = 256
"""
SLEEP = ["/usr/bin/sleep", "100000"]
ACTOR = "uid:0"
DAY_S = 86400.0
OLD_TASK = "d" * 12
"""A job in which a model worked, and which has ended."""
UNDER_WAY = ["e1-1", "e1-2"]


class Where(NamedTuple):
    """The address of one of these, and the token of an admin."""

    url: str
    token: str
    socket: str


@contextmanager
def running(directory: Path) -> Iterator[Where]:
    """One of these as a process of its own; what it says is in `err` of the directory. It ends with the block."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"}
    with (directory / "err").open("ab") as err:
        process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            env=environment,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (directory / "err").read_text()
        yield Where(**json.loads(line))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class OwnBackends(RunningCandidates):
    """The demo servers of this program, and no other address."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__([])
        self._known = list(addresses)

    async def find(self, asked: str) -> Target:
        if asked in self._known or asked in list(BackendKind):
            return await super().find(asked)
        raise DependencyDown(f"nothing is asked at {asked[:80]!r}: it is none of this program's servers")


class OwnDaemon(Daemon):
    """It counts no failures: a fuzzer has many, and 429 instead of 401 would hide what else there is."""

    def _tcp(self, wanted: WantedAddress) -> Tcp:
        tcp = super()._tcp(wanted)
        return tcp._replace(door=tcp.door._replace(failures=Failures(limit=1_000_000)))

    def _choices(self, known: list[str]) -> Choices:
        return OwnBackends([*known[:-1], str(self._paths.runtime / "other.sock")])


class OwnProxy(ProxyPeer):
    """The proxy's end of the link, with an ingress that leads to `inbox` and two requests under way."""

    def __init__(self, path: Path, *, inbox: int) -> None:
        self._inbox = inbox
        super().__init__(path)
        rungs = [RungRow(model="meta/tiny", served="meta/tiny", state="cold"), RungRow(model="second", refused="no")]
        route = TaskRoute(name="plan", aliases=["gpt-4"], rungs=rungs, rung=0, waits=True, why="meta/tiny is cold")
        self.tasks.append(route)

    def _greet(self, link: Link) -> None:
        link.tell(Hello(role=self.role, epoch=self._epoch))
        link.tell(ProxyTable(agents=self.seen, port=self._port, ingress_port=self._inbox))

    def _heard(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        match message:
            case AskQueue() if reply is not None:
                reply(queue())
            case CancelRequest(id=request) if reply is not None:
                reply(Done() if request in UNDER_WAY else failed(NotFound(f"there is no request {request[:40]!r}")))
            case CloseBackend() if reply is not None:
                reply(Drained(cut=1))
            case _:
                super()._heard(link, message, reply)


def queue() -> QueueIs:
    tenants = [TenantView("default", 1.0, 1, 1, 0.0)]
    common: dict[str, Any] = {"agent": "a" * 32, "name": "awake", "tenant": "default", "model": "demo"}
    running, waiting = UNDER_WAY
    return QueueIs(
        queue=QueueView(1, 1, 4, None, tenants),
        requests=[
            UnderWay(id=running, endpoint="/api/chat", state="streaming", age_ms=900.5, queue_ms=0.0, **common),
            UnderWay(id=waiting, endpoint="", state="reading", age_ms=1.0, queue_ms=None, **common),
            UnderWay(id="e1-3", endpoint="", state="queued", age_ms=9.0, queue_ms=8.0, **common | {"model": "second"}),
        ],
    )


class Contained(Box):
    def __init__(self, directory: Path, port: int) -> None:
        super().__init__(directory)
        self._port = port
        self.policy = directory / "sandbox.toml"
        self.policy.write_text(POLICY)
        self.policy.chmod(0o600)
        self.adapters = AdapterBox(self.paths.state)
        self.adapters.signed("legal", base="meta/tiny")
        self.adapters.install("legal", base=BaseModel("meta/tiny"))

    async def start_helper(self) -> None:
        runtime = ProcessRuntime(self.paths, subtree=None, log_max_bytes=100_000)
        starter = SlotSessions(self.paths, log_pipes_of(self.paths, 100_000), subtree=None, config=None)
        self.helper = HelperServer(
            self.paths,
            {RuntimeKind.PROCESS: runtime},
            allowed=Allowed(self.policy),
            slots=ModelSlots(self.paths, starter, set),
        )
        await self.helper.open()

    async def start_daemon(self, settings: Settings = AWAKE, **options: Any) -> None:
        backend = (BackendKind.DEMO, str(self.paths.runtime / "demo.sock"))
        models = {name: ModelRow(file=str(self.paths.state / "none.gguf")) for name in ("meta/tiny", "second")}
        tasks = {"plan": TaskRow(models="meta/tiny | second")}
        # without a file no server is ever started
        adapters = AdaptersSection(dir=str(self.adapters.beneath), keys_dir=str(self.adapters.keys.keys_dir))
        templates = {"oa": TemplateRow(python="/usr/bin/sleep", imports="openai", env="A=1", owner="acme")}
        given = {"models": models, "tasks": tasks, "adapters": adapters, "templates": templates}
        settings = msgspec.structs.replace(settings, **given)
        api = WantedAddress("127.0.0.1", self._port, False)
        self.daemon = OwnDaemon(self.paths, settings, backend=backend, api=api)
        await self.daemon.open()
        for proxy in self.proxies:
            await proxy.until_table()

    @property
    def url(self) -> str:
        assert self.daemon is not None
        return f"http://127.0.0.1:{self.daemon._api_at.port}"


async def inbox(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts every message, but refuses those of an agent whose inbox is called so."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    await reader.readexactly(int(length.partition(b":")[2]))
    status = b"404 Not Found" if b"/refuses" in head.partition(b"\r\n")[0] else b"202 Accepted"
    writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


async def populate(box: Box) -> None:
    """Agents in every state that lasts, messages, schedules, jobs, tokens and a changed setting."""
    for port, name in enumerate(("awake", "asleep", "stopped", "kept", "gone"), 9010):
        await box.create(name, SLEEP, port=port, tenant="acme" if name == "kept" else "default")
    await box.create(
        "refusing", SLEEP, port=9001, inbox="/refuses", env={"KEY": "\u2713"}, model="demo", system_prompt="Be kind."
    )
    await box.create("dying", ["/usr/bin/sleep", "0.01"])
    await box.create("elsewhere", [], runtime=RuntimeKind.EXTERNAL)
    await box.services.agents.apply(AgentSpec(name="made", command=SLEEP), ACTOR)
    for name in ("awake", "refusing", "stopped"):
        await box.schedule(name, "+1d", "1d", f"wake {name}", ACTOR)
        await box.schedule(name, "+2h", None, "", ACTOR)
    await box.stop("stopped", ACTOR)
    for name in ("awake", "refusing", "stopped"):
        await box.send(name, f"to {name}", ACTOR)
    await box.keep_awake("kept", 3600.0, ACTOR)
    await box.pause("asleep", timeout_s=5, now=False, actor=ACTOR)
    await box.switch("demo", ACTOR)
    await box.api_token("reader", Role.VIEWER, 3600.0, ACTOR)
    await box.services.config.change({"sleep.minimum_awake_s": 1}, ACTOR)
    gone = (await box.view("gone"))["id"]
    await box.services.agents.remove("gone", ACTOR)
    await box.stop_daemon()
    database = Database.open(box.paths.database)
    ids = await database.read(lambda conn: [row[0] for row in conn.execute("SELECT id FROM agents")])
    await database.write(lambda conn: usage.insert(conn, [event(no, [*ids, gone]) for no in range(400)]))
    await database.write(add_old_jobs)
    write_old_output(box.paths.jobs)
    database.close()
    await box.start_daemon()


def event(no: int, agents: list[str]) -> UsageEvent:
    """One of the last 25 days."""
    known = no % 7 > 0
    return UsageEvent(
        id=f"e0-{no}",
        epoch="e0",
        event_no=no,
        agent_id=agents[no % len(agents)],
        tenant=("default", "acme")[no % 2],
        model=("demo", "llama3.2:q4_0", "meta/llama-3 x")[no % 3],
        backend=("demo", "vllm")[no % 2],
        endpoint="/api/chat",
        tokens_in=10 + no if known else None,
        tokens_out=no if known else None,
        cached_tokens=no // 2 if known else None,
        estimated=no % 11 == 0,
        cut=no % 13 == 0,
        queue_ms=no / 3,
        ttft_ms=None if no % 5 == 0 else 2.5,
        duration_ms=100.0 + no,
        status=200,
        client_request_id=None if no % 2 else f"client {no}",
        created_at=time.time() - no * DAY_S / 16,
        asked=("demo", "task:plan")[no % 2],
        rung=1 if no % 2 else None,
        far=no % 3 == 0,
    )


def old_jobs() -> list[StoredJob]:
    now = time.time()
    plan = {"step": "health"}
    error = {"code": "backend_unavailable", "message": "it does not answer", "hint": "", "log": ["one", "two"]}
    common: dict[str, Any] = {"kind": "backend.switch", "plan": plan, "actor": ACTOR, "updated_at": now}
    return [
        StoredJob(id="b" * 12, state=JobState.FAILED, error=error, created_at=now - 60, **common),
        StoredJob(id="c" * 12, state=JobState.CANCELLED, error=error, created_at=now - 90, **common),
        old_task(now - 120),
    ]


def old_task(now: float) -> StoredJob:
    """A job in which a model worked."""
    plan = {"name": "tidy", "model": "demo", "tenant": "acme", "priority": "low", "form": "chat"}
    usage = {"turns": 2, "tokens_in": 90, "tokens_out": 9, "tokens_cached": 40}
    result = {"status": "incomplete", "reason": "length", "detail": "it was cut off", "usage": usage}
    return StoredJob(
        id=OLD_TASK,
        kind=KIND,
        state=JobState.DONE,
        plan=plan,
        result=result,
        actor=ACTOR,
        created_at=now,
        updated_at=now,
    )


def add_old_jobs(conn: sqlite3.Connection) -> None:
    for job in old_jobs():
        jobs.add(conn, job)
    call = {"id": "c1", "name": "look", "arguments": "{}"}
    result = {"id": "c1", "name": "look", "result": "bees"}
    turns = [
        JobTurnRow(n=1, calls=[call], results=[result], finish_reason="tool_calls", at=1.0),
        JobTurnRow(n=2, answer="Bees, and", thinking="hm", finish_reason="length", tokens_in=90, tokens_out=9, at=2.0),
    ]
    for turn in turns:
        job_turns.add_turn(conn, OLD_TASK, turn)
    doubt = JobSignalRow(n=1, name="LOW_CONFIDENCE", arguments={"reason": "fog"}, turn=1, has_ended=False, at=1.5)
    job_turns.add_signal(conn, OLD_TASK, doubt)


def write_old_output(directory: Path) -> None:
    """Writes the output of the old task."""
    output = JobOutput(directory, OLD_TASK)
    ended = {"status": "incomplete", "reason": "length", "detail": "it was cut off"}
    words: list[tuple[str, dict[str, Any]]] = [
        ("delta", {"turn": 1, "text": "Bees"}),
        ("tool_call", {"name": "look"}),
        ("ended", ended),
    ]
    output.append([JobWord(1.0, event, data) for event, data in words])
    output.close()


def credentials(directory: Path) -> str:
    """The token of an admin, which is no row that anybody could revoke."""
    token = "hive_" + os.urandom(16).hex()
    directory.mkdir(mode=0o700)
    (directory / "api-token").write_text(token)
    (directory / "api-token").chmod(0o600)
    os.environ["CREDENTIALS_DIRECTORY"] = str(directory)
    return token


async def main(directory: Path, port: int) -> None:
    token = credentials(directory / "credentials")
    box = Contained(directory, port)
    for path in (box.paths.state, box.paths.runtime):
        path.mkdir(exist_ok=True)
    for name in ("demo.sock", "other.sock"):
        spawn(server.serve(server.listen(socket=box.paths.runtime / name), handle_signals=False), name=name)
    messages = await asyncio.start_server(inbox, "127.0.0.1", 0)
    await box.start_helper()
    await box.start_daemon()
    box.proxies.append(OwnProxy(box.paths.link_socket, inbox=messages.sockets[0].getsockname()[1]))
    await box.proxy.until_table()
    try:
        await populate(box)
        print(json.dumps({"url": box.url, "token": token, "socket": str(box.paths.api_socket)}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        try:
            await box.end()
        except HiveError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
