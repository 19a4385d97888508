"""Fail the N-th call: every call of one scenario to the outside fails once, and each time Hive stays what it was.

The scenario is run once to count its calls, as SQLite does it; then once for each of them. The composition is the
proxy's own, on asyncio's loop; daemon and helper are stand-ins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hive.proxy.server import ProxyServer
from hive.settings.table import Proxy as ProxySettings
from hive.settings.table import Settings
from tests.journeys.alone import AGENT, TOKEN, Alone, around
from tests.proxy.at_rest import complaints, held_by
from tests.proxy.fault_points import FaultPoints
from tests.proxy.harness import JSON_ANSWER, Backend, Client, answer, chunked, post, read_request
from tests.waiting import until

FEWEST = {
    "tcp accept": 4,
    "tcp receive": 9,
    "tcp send": 8,
    "unix accept": 2,
    "unix receive": 3,
    "unix send": 3,
    "upstream connect": 2,
    "upstream send": 8,
    "upstream receive": 8,
    "reader pair": 3,
    "reader watch": 3,
    "reader send": 1,
    "reader receive": 3,
    "spool open": 1,
    "spool write": 8,
    "daemon connect": 1,
    "daemon send": 5,
    "daemon receive": 8,
    "helper connect": 1,
    "helper send": 2,
    "helper receive": 1,
}
"""Calls of each kind the scenario makes at least: a kind that is made less often is no longer tested."""
MAY_COMPLAIN = ("usage_spool_refuses", "deep_reader_not_started")
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
]
SETTINGS = Settings(
    proxy=ProxySettings(connect_s=1, first_byte_s=3, between_bytes_s=3, drain_s=1, window_requests=10**6)
)


def body(**more: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


CROWDED = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1500}]
"""Short, and read by a worker all the same."""
CHAT = b"/v1/chat/completions"


class Outcome(NamedTuple):
    """A client's result: the status (0 if it was cut), the request's id, the body as framed."""

    status: int
    id: str
    content: bytes


class Stage:
    """The proxy under test, its clients' connections, and what they were told."""

    def __init__(self, hive: Alone, server: ProxyServer, backend: Backend) -> None:
        self.hive = hive
        self.server = server
        self.backend = backend
        self.outcomes: list[Outcome] = []
        self.started = False
        self._kept: dict[str, Client] = {}

    def start(self) -> None:
        self.server.start(lambda: None)
        self.started = True

    async def connect(self, listener: str) -> Client:
        if listener == "unix":
            return await Client.unix(self.hive.agent_socket)
        return await Client.tcp(self.server.port)

    async def ask(self, listener: str, request: bytes, *, expect: bytes | None = None) -> Outcome:
        """Asks on the kept connection, on a new one where that is gone: a kept connection may close at any time."""
        for kept in (True, False):
            client = self._kept.pop(listener, None) if kept else None
            if client is None:
                client = await self.connect(listener)
            answered = await self._once(client, request)
            if answered is not None:
                self._kept[listener], outcome = client, answered
                break
            client.close()
            outcome = Outcome(0, "", b"")
        self.outcomes.append(outcome)
        if expect is not None and outcome.status == 200:
            assert outcome.content == expect, "a whole answer that is not the backend's"
        return outcome

    async def _once(self, client: Client, request: bytes) -> Outcome | None:
        try:
            client.writer.write(request)
            status, fields, content = await client.answer()
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        return Outcome(status, fields[b"x-request-id"].decode(), content)

    def hang_up(self) -> None:
        while Client.opened:
            Client.opened.pop().close()
        self._kept.clear()


def requests() -> list[tuple[str, bytes, bytes | None]]:
    """(listener, request, the body of the answer where it is a whole 200)."""
    token = TOKEN.encode()
    stream = post(CHAT, body(stream=True), token=token)
    return [
        ("tcp", post(CHAT, body(), token=token), JSON_ANSWER),
        ("tcp", stream, b"".join(EVENTS)),
        ("tcp", post(CHAT, body(messages=CROWDED), token=token), JSON_ANSWER),
        ("unix", post(CHAT, body(stream=True)), b"".join(EVENTS)),
        ("tcp", post(b"/api/delete", b"{}", token=token), None),
        ("tcp", b"GET /v1/models HTTP/1.1\r\nhost: h\r\nauthorization: Bearer %b\r\n\r\n" % token, None),
        ("tcp", post(CHAT, body(), token=b"hm_nobody"), None),
        ("tcp", stream, b"".join(EVENTS)),
    ]


async def scenario(stage: Stage) -> None:
    """All that happens on a data path: asleep and woken, asked in every way, left in the middle of a stream."""
    hive = stage.hive
    await hive.heard()
    await until(lambda: stage.server.registry.by_id.get(AGENT) is not None, what="the agent is known")
    with contextlib.suppress(Exception):  # the link may be what fails
        await hive.put_to_sleep()
    await stage.ask("unix", post(CHAT, body()), expect=JSON_ANSWER)
    for listener, request, expected in requests():
        await stage.ask(listener, request, expect=expected)
    leaver = await stage.connect("tcp")
    leaver.writer.write(post(CHAT, body(stream=True, user="never ends"), token=TOKEN.encode()))
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await asyncio.wait_for(leaver.reader.readuntil(b"\r\n\r\n"), 10)
    leaver.close()
    await stage.ask("unix", post(CHAT, body()), expect=JSON_ANSWER)
    await a_reader_dies(stage)


async def a_reader_dies(stage: Stage) -> None:
    """And another one takes its place."""
    readers = stage.server.path.readers
    assert readers is not None
    await until(lambda: repr(readers).startswith("<DeepReaders 2/2"))
    os.kill(readers.pids[0], signal.SIGKILL)
    await until(lambda: not repr(readers).startswith("<DeepReaders 2/2"))
    await until(lambda: repr(readers).startswith("<DeepReaders 2/2"))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        _, content = await read_request(reader)
        if b'"stream":' not in content:
            writer.write(answer(JSON_ANSWER))
        elif b"never ends" in content:
            writer.write(chunked(EVENTS[0], end=False))
            await reader.read()
            return
        else:
            writer.write(chunked(*EVENTS))


@contextlib.asynccontextmanager
async def stage(base: Path) -> AsyncIterator[tuple[Stage, FaultPoints]]:
    """A proxy that has not started yet, and the count of what it will call."""
    backend = Backend()
    backend.script = serve
    await backend.start()
    host, _, port = backend.address.rpartition(":")
    async with around(base, backend=backend.address) as hive:
        paths = hive.paths
        shutil.rmtree(paths.spool, ignore_errors=True)
        server = ProxyServer(paths, SETTINGS, handed={}, ports=(0, 0), move=False, descriptors=1000)
        points = FaultPoints(
            addresses={
                (host, int(port)): "upstream",
                str(paths.link_socket): "daemon",
                str(paths.sandbox_socket): "helper",
            },
            doors={str(hive.agent_socket): "unix"},
            spool=paths.spool,
        )
        scene = Stage(hive, server, backend)
        try:
            yield scene, points
        finally:
            if scene.started:
                await server.stop(asyncio.Event())
            server.path.use_backend(None, [])
            await backend.stop()
            await asyncio.sleep(0.02)


async def run(base: Path, kind: str = "", number: int = 0) -> dict[str, int]:
    """One run with one failing call (or none), and all that must hold after it. Returns the calls of a clean run."""
    async with stage(base) as (scene, points):
        with complaints() as found, points.installed():
            if number:
                points.fail(kind, number)
            scene.start()
            points.doors[("127.0.0.1", scene.server.port)] = "tcp"
            before = held_by(scene.server.path, scene.server.registry.operator)
            await scenario(scene)
            outcomes = list(scene.outcomes)
            whole = {outcome.id for outcome in outcomes if is_metered(outcome)}
            await until(lambda: whole <= set(scene.hive.events), what="every whole answer is metered")
            counts = dict(points.counts)
            assert points.failed or not number, f"there was no {number}. {kind}: {points}"
            scene.hang_up()
            entry = scene.server.registry.by_id[AGENT]
            await until(lambda: held_by(scene.server.path, entry) == before)
            await until(lambda: not entry.connections)
            for request in requests()[:4]:
                after = await scene.ask(request[0], request[1], expect=request[2])
                assert after.status == 200, f"after the {number}. {kind}: {after}"
            scene.hang_up()
            whole = {outcome.id for outcome in scene.outcomes if is_metered(outcome)}
            await until(lambda: whole <= set(scene.hive.events), what="what came after is metered, too")
        assert [line for line in found if not any(word in line for word in MAY_COMPLAIN)] == []
        assert scene.hive.told_twice == 0
        if not number:
            assert [outcome.status for outcome in outcomes] == [200, 200, 200, 200, 200, 403, 200, 401, 200, 200]
            assert found == []
        broken = [outcome for outcome in outcomes if outcome.status not in (200, 401, 403)]
        assert len(broken) <= 2, f"one fault, many victims: {outcomes}"
        assert {outcome.status for outcome in broken} <= {0, 502, 503, 504}
    return counts


def is_metered(outcome: Outcome) -> bool:
    return outcome.status == 200 and (b"choices" in outcome.content)


async def test_the_scenario_makes_the_calls_it_is_known_to_make(short_path: Path) -> None:
    """On a loaded host two answers may come in one read: what one run of three makes is made."""
    counts: Counter[str] = Counter()
    for _ in range(3):
        counts |= Counter(await run(short_path))
        if not (fewer := {kind: count for kind, count in FEWEST.items() if counts[kind] < count}):
            break
    print(dict(sorted(counts.items())))
    assert fewer == {}, "the list has shrunk"
    assert counts.keys() <= FEWEST.keys(), "calls of a new kind, which nobody makes fail yet"


@pytest.mark.chaos
@pytest.mark.parametrize("kind", FEWEST)
async def test_whatever_call_fails_hive_stays_what_it_was(short_path: Path, kind: str) -> None:
    for number in range(1, FEWEST[kind] + 1):
        await run(short_path, kind, number)
