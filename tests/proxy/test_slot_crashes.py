"""A server of the pool that ends by itself: who is blamed, and what becomes of requests that found nobody there."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from pathlib import Path

import msgspec
import pytest

from hive.domain import BackendInfo
from hive.link.message import LinkMessage
from hive.link.pool import CrashBlame, SlotCrashed, SlotIs, SlotRow
from hive.proxy import slot_orders
from hive.proxy.forward import KEPT_BODY_MAX
from hive.queue import crash_marks, suspects
from hive.settings.pool import PoolSection
from tests.proxy.harness import CHAT, STREAM, Backend, Client, chunked, full_backlog, nothing_is_held, read_request
from tests.proxy.test_prewarms import outcome, sending
from tests.proxy.test_slots import FIRST, Pool, ask, content, hold, pooled
from tests.waiting import until


def crash(pool: Pool, model: str = "a", generation: int = 1) -> CrashBlame:
    """Asks the proxy whose requests were there when the server ended."""
    answers: list[LinkMessage] = []
    message = SlotCrashed(id=f"{model}-1", generation=generation)
    pool.orders.order(message, lambda said, _=(): answers.append(said))
    (blame,) = answers
    assert isinstance(blame, CrashBlame)
    return blame


def dies(server: Backend, *, mid_stream: bool) -> None:
    """The server breaks every connection off once it has a request."""

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if mid_stream:
            writer.write(chunked(FIRST, end=False))
            await writer.drain()
        writer.transport.abort()

    server.script = scene


async def crashes(pool: Pool, clients: list[Client], generation: int) -> CrashBlame:
    """One crash with a request of each of these clients there; the next server is there after it."""
    pool.tell(pool.row("a", generation=generation))
    release = hold(pool.servers["a"])
    for client in clients:
        client.writer.write(ask("a", body=STREAM))
    slot = pool.proxy.path.slots.pooled["a-1"]
    await until(lambda: slot.line.running == len(clients) and all(one.is_sent for one in slot.line.owners))  # type: ignore[attr-defined]
    blame = crash(pool, generation=generation)
    release.set()
    for client in clients:
        assert (await client.answer())[0] == 200
    pool.servers["a"].script = None
    return blame


async def clients_of(pool: Pool, *names: str) -> list[Client]:
    """A connection of alice for the empty name, else one of an agent of this name."""
    return [await Client.unix(pool.proxy.another(name)) if name else await pool.client() for name in names]


@pytest.mark.parametrize("mid_stream", [False, True])
async def test_an_agent_whose_connection_broke_a_moment_ago_is_blamed(tmp_path: Path, mid_stream: bool) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        dies(pool.servers["a"], mid_stream=mid_stream)
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        assert b"backend" in await asyncio.wait_for(client.reader.read(4096), 10) or mid_stream
        await until(lambda: nothing_is_held(pool.proxy))
        assert crash(pool, generation=7).agents == []  # another server of this slot
        assert crash(pool).agents == [pool.proxy.row.id]
        assert crash(pool, "b").agents == []


async def test_what_broke_long_before_has_nothing_to_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "LOST_S", 0.0)
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        dies(pool.servers["a"], mid_stream=False)
        assert (await (await pool.client()).ask(ask("a")))[0] == 502
        assert crash(pool).agents == []


async def test_who_was_there_at_two_crashes_is_slowed_and_at_the_third_refused(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        alice, eve = await clients_of(pool, "", "eve")
        assert await crashes(pool, [alice, eve], 1) == CrashBlame(agents=["a1", "eve"])
        assert await crashes(pool, [alice], 2) == CrashBlame(agents=["a1"], slowed=["a1"])
        # a bystander at a crash with a suspect has nothing to answer for
        assert await crashes(pool, [alice, eve], 3) == CrashBlame(agents=["a1", "eve"], refused=["a1"])
        pool.tell(pool.row("a", generation=4), pool.row("b"))
        status, fields, body = await alice.ask(ask("a"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "the server of the model a has crashed again and again" in json.loads(body)["error"]["message"]
        assert int(fields[b"retry-after"]) == 120  # the most that is ever said
        assert await content(alice, "b") == (200, "b")
        assert await content(eve, "a") == (200, "a")
        assert nothing_is_held(pool.proxy)


async def test_one_crash_is_one_mark_however_often_it_is_asked(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        (alice,) = await clients_of(pool, "")
        first = await crashes(pool, [alice], 1)
        assert crash(pool) == first == CrashBlame(agents=["a1"])


async def test_of_the_suspects_requests_one_at_a_time_goes_there(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", tier_low_concurrency=4) as pool:
        alice, more, ben, eve = await clients_of(pool, "", "", "ben", "eve")
        for generation in (1, 2):
            blame = await crashes(pool, [alice, ben], generation)
        assert blame.slowed == ["a1", "ben"]
        pool.tell(pool.row("a", generation=3))
        slot = pool.proxy.path.slots.pooled["a-1"]
        release = hold(pool.servers["a"])
        alice.writer.write(ask("a", body=STREAM))
        await until(lambda: slot.line.running == 1)
        for number, client in enumerate((more, ben), 1):
            client.writer.write(ask("a", body=STREAM))
            await until(lambda number=number: len(slot.suspects.held) == number)  # type: ignore[misc]
        eve.writer.write(ask("a", body=STREAM))
        await until(lambda: slot.line.running == 2)  # who is no suspect waits for nobody
        assert slot.line.waiting == 0
        release.set()
        for client in (alice, eve, ben, more):
            assert (await client.answer())[0] == 200
        assert slot.suspects.one is None
        assert slot.suspects.held == []
        assert nothing_is_held(pool.proxy)


async def test_a_request_that_is_held_back_may_leave_and_waits_no_longer_than_others(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", queue_wait_s=0.3, tier_low_concurrency=4) as pool:
        first, second, third = await clients_of(pool, "", "", "")
        for generation in (1, 2):
            await crashes(pool, [first], generation)
        pool.tell(pool.row("a", generation=3))
        slot = pool.proxy.path.slots.pooled["a-1"]
        release = hold(pool.servers["a"])
        first.writer.write(ask("a", body=STREAM))
        await until(lambda: slot.line.running == 1)
        second.writer.write(ask("a", body=STREAM))
        await until(lambda: len(slot.suspects.held) == 1)
        second.close()
        await until(lambda: not slot.suspects.held)
        assert (await third.ask(ask("a", body=STREAM)))[0] == 503
        release.set()
        assert (await first.answer())[0] == 200
        assert nothing_is_held(pool.proxy)


async def test_requests_that_wait_for_the_next_server_are_judged_when_their_agent_is(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", tier_low_concurrency=4) as pool:
        first, second, third = await clients_of(pool, "", "", "")
        slot_of = pool.proxy.path.slots.pooled
        await crashes(pool, [first], 1)
        pool.tell(pool.row("a", generation=2))
        dies(pool.servers["a"], mid_stream=False)
        assert (await first.ask(ask("a")))[0] == 502
        pool.orders.order(SlotIs(slot=pool.row("a", is_open=False, generation=2)), None)
        for client in (second, third):
            client.writer.write(ask("a"))
        await pool.waits("a", 2)
        assert crash(pool, generation=2).slowed == ["a1"]
        assert slot_of["a-1"].line.waiting == len(slot_of["a-1"].suspects.held) == 1
        pool.servers["a"].script = None
        pool.tell(pool.row("a", generation=3))
        assert [(await client.answer())[0] for client in (second, third)] == [200, 200]
        pool.tell(pool.row("a", generation=4))
        dies(pool.servers["a"], mid_stream=False)
        assert (await first.ask(ask("a")))[0] == 502
        pool.orders.order(SlotIs(slot=pool.row("a", is_open=False, generation=4)), None)
        for client in (second, third):
            client.writer.write(ask("a"))
        await until(lambda: len(slot_of["a-1"].suspects.held) == 1)
        assert crash(pool, generation=4).refused == ["a1"]
        assert [(await client.answer())[0] for client in (second, third)] == [429, 429]
        assert nothing_is_held(pool.proxy)


async def test_a_suspicion_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pooled(tmp_path, "a") as pool:
        (alice,) = await clients_of(pool, "")
        for generation in (1, 2):
            await crashes(pool, [alice], generation)
        monkeypatch.setattr(crash_marks, "SPAN_S", 0.2)
        assert (await crashes(pool, [alice], 3)).refused == ["a1"]
        pool.tell(pool.row("a", generation=4))
        await asyncio.sleep(0.25)
        assert await content(alice, "a") == (200, "a")
        assert await crashes(pool, [alice], 5) == CrashBlame(agents=["a1"])


async def test_an_operator_s_request_is_nobody_s_fault(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        dies(pool.servers["a"], mid_stream=False)
        client = await Client.tcp(pool.proxy.port)
        request = ask("a").replace(b"host: h\r\n", b"host: h\r\nauthorization: Bearer internal\r\n")
        assert (await client.ask(request))[0] == 502
        assert crash(pool) == CrashBlame(agents=[])


# --- nobody listens at the address -----------------------------------------------------------------------------------


def nobody(pool: Pool, generation: int = 1) -> tuple[SlotRow, socket.socket]:
    """The row of an open slot where nobody listens, and the socket that keeps its port free of others."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    row = pool.row("a", generation=generation)
    port = sock.getsockname()[1]
    backend = BackendInfo(kind=row.backend.kind, address=f"127.0.0.1:{port}", up=True)
    return msgspec.structs.replace(row, backend=backend), sock


async def test_a_request_that_finds_nobody_waits_for_the_reload_and_is_told(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        row, sock = nobody(pool)
        with sock:
            pool.tell(row)
            client = await pool.client()
            client.writer.write(ask("a"))
            await pool.waits("a")
            await until(lambda: any(told.slots["a-1"].waiting for told in pool.told))
            pool.tell(pool.row("a", generation=2))
            assert (await client.answer())[0] == 200
        assert len(pool.servers["a"].requests) == 1
        assert nothing_is_held(pool.proxy)


class Unready:
    """A server that ends with a request in its buffers that it has not read."""

    def __init__(self, folder: Path) -> None:
        path = folder / "unready.sock"
        path.unlink(missing_ok=True)
        self.address = str(path)
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.address)
        self._sock.listen(8)
        self._sock.setblocking(False)

    async def is_knocked_at(self) -> None:
        knock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        knock.close()

    async def ends(self) -> None:
        """It ends as soon as a request is there, unread."""
        accepted, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        with accepted:
            await until(lambda: select.select([accepted], [], [], 0)[0])
            self._sock.close()


def before(pool: Pool, server: Unready) -> None:
    row = pool.row("a")
    pool.tell(msgspec.structs.replace(row, backend=msgspec.structs.replace(row.backend, address=server.address)))


async def test_a_request_that_no_server_has_read_goes_to_the_next_one(tmp_path: Path) -> None:
    """With a real llama-server that was killed, every second request got 502."""
    async with pooled(tmp_path, "a") as pool:
        server = Unready(tmp_path)
        before(pool, server)
        client = await pool.client()
        client.writer.write(ask("a"))
        await server.ends()
        await pool.waits("a")
        assert crash(pool).agents == []
        pool.tell(pool.row("a", generation=2))
        assert (await client.answer())[0] == 200
        assert len(pool.servers["a"].requests) == 1
        assert nothing_is_held(pool.proxy)


async def test_a_long_body_is_not_kept_for_the_next_server(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        server = Unready(tmp_path)
        before(pool, server)
        client = await pool.client()
        client.writer.write(ask("a", body=CHAT.replace(b"hello", b"a" * (KEPT_BODY_MAX + 1))))
        await server.ends()
        assert (await client.answer())[0] == 502
        assert pool.proxy.path.slots.pooled["a-1"].gate.is_lost
        assert nothing_is_held(pool.proxy)


async def test_a_request_that_is_not_read_twice_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_orders, "LOOK_S", 0.05)
    async with pooled(tmp_path, "a") as pool:
        server = Unready(tmp_path)
        before(pool, server)
        client = await pool.client()
        client.writer.write(ask("a"))
        await server.ends()
        await pool.waits("a")
        server = Unready(tmp_path)
        await server.is_knocked_at()
        await server.ends()
        assert (await client.answer())[0] == 502
        assert nothing_is_held(pool.proxy)


async def test_a_prompt_that_finds_nobody_does_not_wait(tmp_path: Path) -> None:
    """It ended as the gate closed, and stood in the line all the same."""
    async with pooled(tmp_path, "a") as pool:
        row, sock = nobody(pool)
        with sock:
            pool.tell(row)
            assert (await outcome(sending(pool.proxy), model="a")).code == "not_supported"
        assert pool.proxy.path.slots.pooled["a-1"].gate.is_lost
        await asyncio.sleep(3 * slot_orders.TELL_S)
        assert pool.told == []
        assert nothing_is_held(pool.proxy)


async def test_a_socket_that_is_gone_is_nobody_too(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        row = pool.row("a")
        backend = msgspec.structs.replace(row.backend, address=str(tmp_path / "gone.sock"))
        pool.tell(msgspec.structs.replace(row, backend=backend))
        client = await pool.client()
        client.writer.write(ask("a"))
        await pool.waits("a")
        pool.tell(pool.row("a", generation=2))
        assert (await client.answer())[0] == 200


async def test_it_waits_for_load_wait_s_at_most(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", pool=PoolSection(load_wait_s=0.3)) as pool:
        row, sock = nobody(pool)
        with sock:
            pool.tell(row)
            status, _, body = await (await pool.client()).ask(ask("a"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert "the model a is not loaded any more, and it was not within 0.3 s" in json.loads(body)["error"]["message"]
        assert nothing_is_held(pool.proxy)


async def test_it_keeps_its_place_in_the_line(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", tier_low_concurrency=4) as pool:
        clients = [await pool.client() for _ in range(3)]
        with full_backlog() as nowhere:
            row = pool.row("a", places=1)
            pool.tell(msgspec.structs.replace(row, backend=msgspec.structs.replace(row.backend, address=nowhere)))
            slot = pool.proxy.path.slots.pooled["a-1"]
            for number, client in enumerate(clients):
                client.writer.write(ask("a", body=CHAT.replace(b'"m"', b'"m","seed":%d' % number)))
                await pool.waits("a", number)
            assert slot.line.running == 1
            pool.close("a", drain_s=0.0)
            await pool.waits("a", 3)
            pool.tell(pool.row("a", generation=2, places=1))
            assert [(await client.answer())[0] for client in clients] == [200, 200, 200]
        assert [json.loads(body)["seed"] for _, body in pool.servers["a"].requests] == [0, 1, 2]


async def test_a_server_that_listens_again_is_asked_without_a_word_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon takes the server for a good one, and would never say anything."""
    monkeypatch.setattr(slot_orders, "LOOK_S", 0.1)
    async with pooled(tmp_path, "a") as pool:
        path = tmp_path / "server.sock"
        row = pool.row("a")
        pool.tell(msgspec.structs.replace(row, backend=msgspec.structs.replace(row.backend, address=str(path))))
        client = await pool.client()
        client.writer.write(ask("a"))
        await pool.waits("a")
        server = await asyncio.start_unix_server(pool.servers["a"]._serve, str(path))
        assert (await client.answer())[0] == 200
        assert await content(client, "a") == (200, "a")
        server.close()


async def test_a_request_that_was_sent_once_is_not_sent_to_the_next_server(tmp_path: Path) -> None:
    """It may be what the server died of."""
    async with pooled(tmp_path, "a") as pool:
        server = pool.servers["a"]

        async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(server.reply)
            await read_request(reader)
            await server.stop()
            writer.transport.abort()

        server.script = scene
        pool.tell(pool.row("a"))
        client = await pool.client()
        assert await content(client, "a") == (200, "a")
        assert (await client.ask(ask("a")))[0] == 502
        assert pool.proxy.path.slots.pooled["a-1"].gate.is_lost
        assert crash(pool).agents == ["a1"]
        assert nothing_is_held(pool.proxy)
