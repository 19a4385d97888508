"""The limits of one proxy process, reached: descriptors, memory, a process that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from tests.journeys.alone import TOKEN, Alone, alone
from tests.proxy.harness import CHAT, JSON_ANSWER, Backend, Client, answer, post, read_request
from tests.waiting import until

MIB = 1 << 20
ASK = post(b"/v1/chat/completions", CHAT, token=TOKEN.encode())
FEW = {resource.RLIMIT_NOFILE: 300}
"""Of these the proxy keeps 128 for itself."""


@contextlib.asynccontextmanager
async def behind(backend: Backend) -> AsyncIterator[str]:
    await backend.start()
    try:
        yield backend.address
    finally:
        while Client.opened:
            Client.opened.pop().close()
        await backend.stop()


async def statuses_now(clients: list[Client]) -> list[int]:
    """The status each has been answered with by now; 0 for those that still wait."""
    found: list[int] = []
    for client in clients:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            line = await asyncio.wait_for(client.reader.readline(), 0.2 if not found else 0.01)
            found.append(int(line.split(b" ")[1]) if line else 0)
            continue
        found.append(0)
    return found


async def is_served(hive: Alone) -> bool:
    client = await Client.tcp(hive.port)
    try:
        return (await client.ask(ASK))[0] == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    finally:
        client.close()


async def test_connections_beyond_the_descriptors_are_refused_or_wait_and_nothing_else_happens(
    short_path: Path,
) -> None:
    async with behind(Backend()) as backend, alone(short_path, backend=backend, limits=FEW) as hive:
        assert await is_served(hive)
        before = hive.descriptors()
        clients = []
        for _ in range(400):
            with contextlib.suppress(OSError):
                clients.append(await Client.tcp(hive.port))
        for client in clients:
            client.writer.write(ASK)
        answered = await statuses_now(clients)
        assert set(answered) <= {200, 503, 0}
        assert answered.count(200) > 20, "those who got in are served"
        assert (await hive.gauges())["connections"] <= 300, "the admin socket answers all the while"
        lines = hive.log.count("\n")
        assert lines < 60, f"{lines} lines of log"
        for client in clients:
            client.close()
        await until(lambda: is_served(hive), what="the next one is served")
        await until(lambda: hive.descriptors().get("socket", 0) <= before["socket"] + 1, what="all are given back")


async def test_descriptors_that_end_in_the_middle_of_requests_are_an_answer_and_come_back(
    short_path: Path,
) -> None:
    """`connections_max` beyond what there is: connecting to the backend fails with EMFILE, and so does accept."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go.wait()
        writer.write(answer(JSON_ANSWER))

    backend = Backend()
    backend.script = script
    config = "connections_max = 100000\nagent_connections_max = 100000\ntier_high_concurrency = 1000\n"
    async with (
        behind(backend) as address,
        alone(short_path, backend=address, limits=FEW, config=config) as hive,
    ):
        clients = [await Client.tcp(hive.port) for _ in range(400)]
        for client in clients:
            client.writer.write(ASK)
        await asyncio.sleep(1)
        go.set()
        await asyncio.sleep(0.5)  # a displaced connection is at its end at once, and not waited for
        answered, waiting = [], clients
        for _ in range(20):  # a busy machine takes its time for the first ones
            found = await statuses_now(waiting)
            answered += [status for status in found if status]
            waiting = [client for client, status in zip(waiting, found, strict=True) if not status]
            if answered.count(200) > 20:
                break
        assert set(answered) <= {200, 502, 503}
        assert answered.count(200) > 20
        for client in clients:
            client.close()
        await until(lambda: is_served(hive), what="the next one is served")
        assert hive.log.count("\n") < 200
        assert "Traceback" not in hive.log


async def test_more_bodies_than_the_budget_are_503_and_memory_stays_bounded(short_path: Path) -> None:
    held, callers = 64 * MIB, 60
    body = 15 * MIB
    head = post(b"/v1/chat/completions", b"", token=TOKEN.encode()).replace(b"length: 0", b"length: %d" % (body + 9))
    begins = head + b'{"model":"'
    config = f"body_budget_bytes = {held}\nagent_connections_max = 1000\n"
    async with behind(Backend()) as backend, alone(short_path, backend=backend, config=config) as hive:
        assert await is_served(hive)
        before, most = hive.seen.memory_info().rss, 0
        piece = b"x" * MIB

        async def uploads() -> int:
            """All but its last byte; the status of a refusal."""
            client = await Client.tcp(hive.port)
            client.writer.write(begins)
            for _ in range(body // MIB):
                client.writer.write(piece)
                drained = asyncio.ensure_future(client.writer.drain())
                said = asyncio.ensure_future(client.reader.readline())
                await asyncio.wait([drained, said], return_when=asyncio.FIRST_COMPLETED)
                if said.done():
                    drained.cancel()
                    return int(said.result().split(b" ")[1])
                said.cancel()
                await drained
            return 0

        tasks = [asyncio.ensure_future(uploads()) for _ in range(callers)]
        while not all(task.done() for task in tasks):
            most = max(most, hive.seen.memory_info().rss)
            await asyncio.sleep(0.02)
        results = [task.result() for task in tasks]
        assert set(results) == {0, 503}
        assert results.count(503) > callers / 2
        gauges = await hive.gauges()
        assert gauges["request_body_bytes"] <= held
        assert most - before < 2 * held, f"{(most - before) / MIB:.0f} MiB for {held / MIB:.0f} MiB of bodies"
        print(f"{callers} bodies of {body / MIB:.0f} MiB: RSS grew by {(most - before) / MIB:.0f} MiB")
        while Client.opened:
            Client.opened.pop().close()
        await until(lambda: no_bodies(hive), what="the budget is whole again")
        assert await is_served(hive)


async def no_bodies(hive: Alone) -> bool:
    return (await hive.gauges())["request_body_bytes"] == 0


async def test_a_process_that_stood_still_serves_everybody_who_waited_meanwhile(short_path: Path) -> None:
    async with (
        behind(Backend()) as backend,
        alone(short_path, backend=backend, config="tier_high_concurrency = 100\n") as hive,
    ):
        clients = [await Client.tcp(hive.port) for _ in range(20)]
        assert [(await client.ask(ASK))[0] for client in clients] == [200] * 20
        os.kill(hive.process.pid, signal.SIGSTOP)
        late = [await Client.tcp(hive.port) for _ in range(20)]
        for client in (*clients, *late):
            client.writer.write(ASK)
        await asyncio.sleep(2)
        os.kill(hive.process.pid, signal.SIGCONT)
        assert [(await client.answer())[0] for client in (*clients, *late)] == [200] * 40
        await until(lambda: len(hive.events) == 60, what="each is metered")


async def test_a_disk_without_room_costs_no_request_and_no_event(short_path: Path) -> None:
    """The spool's file may have 8 KiB: what it does not take waits in memory and reaches the daemon from there."""
    small = {resource.RLIMIT_FSIZE: 8192}
    async with behind(Backend()) as backend, alone(short_path, backend=backend, limits=small) as hive:
        client = await Client.tcp(hive.port)
        answers = [await client.ask(ASK) for _ in range(200)]
        assert [status for status, _, _ in answers] == [200] * 200
        await until(lambda: len(hive.events) == 200, what="every event is told")
        assert set(hive.events) == {fields[b"x-request-id"].decode() for _, fields, _ in answers}
        assert "usage_spool_refuses" in hive.log, "the disk was full"
        assert hive.told_twice == 0
