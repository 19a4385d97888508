"""The clock is set, by an hour or by ten years, forwards or back: nothing changes on the data path."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hive
from tests.journeys.alone import TOKEN, alone
from tests.proxy.at_rest import turns
from tests.proxy.harness import CHAT, JSON_ANSWER, STREAM, Backend, Client, answer, chunked, post, proxied, read_request
from tests.waiting import until

HOUR_S, YEARS_S = 3600.0, 10 * 365 * 86400.0
JUMPS = [HOUR_S, -HOUR_S, YEARS_S, -YEARS_S]
ASK = post(b"/v1/chat/completions", CHAT)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
WALL_CLOCK = Path(__file__).parent.parent / "tools" / "wall_clock.c"


class Wall:
    """The wall clock: `jump` sets it, nothing else of time changes."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._true = time.time

    def read(self) -> float:
        return self._true() + self._offset_s

    def jump(self, by_s: float) -> None:
        self._offset_s += by_s


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    clock = Wall()
    monkeypatch.setattr(time, "time", clock.read)
    return clock


@pytest.mark.parametrize("by_s", JUMPS)
async def test_the_window_neither_forgives_nor_refuses_more(tmp_path: Path, wall: Wall, by_s: float) -> None:
    async with proxied(tmp_path, window_requests=2) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(ASK))[0] == 200
        wall.jump(by_s)
        assert (await client.ask(ASK))[0] == 200
        wall.jump(by_s)
        status, fields, _ = await client.ask(ASK)
        assert status == 429
        assert 0 < int(fields[b"retry-after"]) <= 60


@pytest.mark.parametrize("by_s", JUMPS)
async def test_whoever_waits_goes_on_waiting_and_is_served(tmp_path: Path, wall: Wall, by_s: float) -> None:
    """One parked, then one with a place in the middle of its stream, one at the backend, one in line, one idle."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            if b"stream" in body:
                writer.write(chunked(EVENT, end=False))
                await go.wait()
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            else:
                await go.wait()
                writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        streams, asks, waits, idle = [await Client.unix(proxy.socket_path) for _ in range(4)]
        assert proxy.alice.gate.close(2, now=time.monotonic()) is None
        streams.writer.write(post(b"/v1/chat/completions", STREAM))
        await until(lambda: proxy.alice.gate.parked == 1)
        wall.jump(by_s)
        await asyncio.sleep(0.5)  # two rounds of the deadlines
        assert proxy.alice.gate.parked == 1
        proxy.alice.gate.open(2)
        await streams.reader.readuntil(EVENT)
        asks.writer.write(ASK)
        await until(lambda: turns(proxy.path)["running"] == 2)
        waits.writer.write(ASK)
        await until(lambda: turns(proxy.path)["waiting"] == 1)
        wall.jump(by_s)
        await asyncio.sleep(0.5)
        assert turns(proxy.path) == {"running": 2, "waiting": 1}
        go.set()
        assert b"[DONE]" in await streams.reader.readuntil(b"0\r\n\r\n")
        assert [(await client.answer())[0] for client in (asks, waits)] == [200, 200]
        assert (await idle.ask(ASK))[0] == 200, "its connection was kept"
        assert [event.cut for event in proxy.events] == [False] * 4
        assert all(0 <= event.duration_ms < 60_000 for event in proxy.events)


@pytest.mark.parametrize("by_s", JUMPS)
async def test_a_silent_backend_is_given_up_all_the_same(tmp_path: Path, wall: Wall, by_s: float) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with proxied(tmp_path, first_byte_s=0.3) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(ASK)
        await until(lambda: proxy.alice.gate.in_flight == 1)
        wall.jump(by_s)
        assert (await client.answer())[0] == 504


# --- where the wall clock may be read ---------------------------------------------------------------------------------

MAY_READ = {
    ("proxy/refusals.py", "too_many"): "the moment a client is told",
    ("wire/http1.py", "head_start"): "the moment a client is told",
    ("proxy/forward.py", "_10_meter"): "the record of a request",
    ("proxy/own_answers.py", "said_here"): "the moment a client is told",
    ("proxy/server.py", "__init__"): "a part of the epoch's name",
    ("proxy/links.py", "touch"): "the record of activity",
    ("agents/state.py", "replaced"): "the record of a change",
    ("agents/starting.py", "after_end"): "the moment of the next start, as it is told",
    ("agents/starting.py", "_start_again"): "the moment of the next start, as it is told",
    ("proxy/budgets.py", "look"): "days and months of budgets, whose step back is not trusted (queue/budgets.py)",
    ("proxy/budgets.py", "_ask"): "days and months of budgets",
    ("proxy/budgets.py", "why_not"): "days and months of budgets",
    ("proxy/runner.py", "_let_in"): "the day on which a token expires",
    ("proxy/budgets.py", "take"): "days and months of budgets",
    ("agents/state.py", "_loop_time_of"): "how long an operator keeps an agent awake, as it is recorded",
}


READS = re.compile(r"\btime\.time(_ns)?\(|\b(datetime|date)\.(now|utcnow|today)\(")


def readers_of_the_wall_clock() -> Iterator[tuple[str, str]]:
    """(file, function) of everything on the way of a request or a sleeping agent that looks at the wall clock."""
    root = Path(hive.__file__).parent
    for room in ("proxy", "wire", "link", "dialects", "models", "agents"):
        for path in sorted((root / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and READS.search(ast.unparse(node)):
                    yield path.relative_to(root).as_posix(), node.name


def test_only_records_are_stamped_with_the_wall_clock() -> None:
    found = set(readers_of_the_wall_clock())
    assert found == set(MAY_READ), "everything else counts in monotonic seconds"


# --- a real process ---------------------------------------------------------------------------------------------------


async def test_a_real_proxy_serves_on_while_the_clock_is_set(short_path: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make the clock that can be set")
    library, offset = tmp_path / "wall_clock.so", tmp_path / "offset"
    compiler = await asyncio.create_subprocess_exec("cc", "-shared", "-fPIC", "-o", library, WALL_CLOCK, "-ldl")
    assert await compiler.wait() == 0
    offset.write_text("0")
    env = {**os.environ, "LD_PRELOAD": str(library), "WALL_CLOCK": str(offset)}
    backend = Backend()
    await backend.start()
    ask = post(b"/v1/chat/completions", CHAT, token=TOKEN.encode())
    statuses: list[int] = []
    over = False

    async def asks(client: Client) -> None:
        while not over:
            statuses.append((await client.ask(ask))[0])
            await asyncio.sleep(0.01)

    def close_all() -> None:
        while Client.opened:
            Client.opened.pop().close()

    with contextlib.ExitStack() as after:
        after.callback(close_all)
        async with alone(short_path, backend=backend.address, env=env) as hive_:
            clients = [await Client.tcp(hive_.port) for _ in range(4)]
            tasks = [asyncio.ensure_future(asks(client)) for client in clients]
            for at_s in (0, *itertools.accumulate(JUMPS), 0):
                offset.write_text(f"{at_s:.0f}")
                await asyncio.sleep(0.4)
            over = True
            await asyncio.gather(*tasks)
            assert set(statuses) == {200}
            await until(lambda: len(hive_.events) == len(statuses), what="every event is told")
            events = sorted(hive_.events.values(), key=lambda event: event.event_no)
            assert [event.event_no for event in events] == list(range(1, len(events) + 1))
            stamps = [event.created_at for event in events]
            assert max(stamps) - min(stamps) > YEARS_S / 2, "the clock was not set at all"
            assert all(0 <= event.duration_ms < 10_000 for event in events)
    await backend.stop()
