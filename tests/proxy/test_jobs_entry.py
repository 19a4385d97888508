"""The listener of model jobs: who asks is who the daemon has said, and a job that is gone has nothing under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hive.domain import Band
from hive.link.jobs import JobGrantRow
from hive.proxy.jobs_entry import JobsDoor, JobsEntry
from hive.proxy.under_way import end_request, queue_now
from hive.settings.table import TenantRow
from hive.wire.listeners import SocketListener, listen_tcp
from tests.proxy.harness import (
    CHAT,
    STREAM,
    Backend,
    Client,
    Proxy,
    chunked,
    digest,
    get,
    nothing_is_held,
    post,
    proxied,
)
from tests.proxy.harness import answer as answering
from tests.proxy.test_leaving import far_and_near
from tests.waiting import until

ASK = b"/v1/chat/completions"
OWN = JobGrantRow(job="j1", agent="a1", tenant="default", agents=["a1"])
BOSS = JobGrantRow(job="j2", tenant="acme", band=Band.LOW, agents=["bob"])


class Jobs:
    """The listener of jobs, at `port`."""

    def __init__(self, proxy: Proxy, backend: Backend) -> None:
        self.proxy, self.backend = proxy, backend
        self.entry = JobsEntry(proxy.registry)
        sock = listen_tcp(0, move=False)
        self.port = sock.getsockname()[1]
        door = partial(JobsDoor, proxy.path, proxy.ingress, self.entry)
        holder = proxy.registry.operator.jobs
        self.listener = SocketListener(sock, lambda s: proxy._connect(s, door, holder))

    async def client(self) -> Client:
        return await Client.tcp(self.port)

    async def ask(self, request: bytes) -> tuple[int, str, bytes]:
        """Status, code of its error, body."""
        client = await self.client()
        status, _, body = await client.ask(request)
        client.close()
        code = "" if status == 200 else str(msgspec.json.decode(body)["error"]["code"])
        return status, code, body


@asynccontextmanager
async def jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with proxied(tmp_path, tenants={"acme": TenantRow(models="m")}) as (proxy, backend):
        found = Jobs(proxy, backend)
        yield found
        found.listener.close()


async def test_a_job_is_known_by_its_token_alone(tmp_path: Path) -> None:
    async with jobs(tmp_path) as at:
        assert (await at.ask(post(ASK, CHAT, token=b"one")))[:2] == (503, "saturated")  # the daemon was not heard
        at.entry.learn({digest(b"one"): OWN})
        assert (await at.ask(post(ASK, CHAT, token=b"one")))[0] == 200
        for token in (b"two", None, b"internal", b"hm_alice"):
            assert (await at.ask(post(ASK, CHAT, token=token)))[:2] == (401, "unauthorized")
        at.entry.learn({})
        assert (await at.ask(post(ASK, CHAT, token=b"one")))[:2] == (401, "unauthorized")
        assert nothing_is_held(at.proxy)


async def test_a_job_asks_as_its_agent_or_as_operator_for_its_tenant_whatever_it_wishes(tmp_path: Path) -> None:
    async with jobs(tmp_path) as at:
        at.entry.learn({digest(b"one"): OWN, digest(b"two"): BOSS})
        wishes = b"x-tenant-id: other\r\nx-priority: high\r\n"
        for token in (b"one", b"two"):
            assert (await at.ask(post(ASK, CHAT, token=token, fields=wishes)))[0] == 200
        found = [(event.agent_id, event.tenant) for event in at.proxy.events]
        assert found == [("a1", "default"), ("operator", "acme")]
        other = CHAT.replace(b'"m"', b'"m2"')
        at.proxy.use(at.backend, models=("m", "m2"))
        assert (await at.ask(post(ASK, other, token=b"two")))[0] in (403, 404)  # the tenant has m alone
        assert (await at.ask(post(ASK, other, token=b"one")))[0] == 200


@pytest.mark.parametrize("row", [OWN, BOSS], ids=["agent", "operator"])
async def test_a_job_that_is_local_only_stays_whatever_its_process_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: JobGrantRow
) -> None:
    local = msgspec.structs.replace(row, is_local_only=True)
    ask = CHAT.replace(b'"m"', b'"sonnet"')
    async with far_and_near(tmp_path, monkeypatch) as (proxy, near, far):
        tenants = {"acme": TenantRow(models="sonnet")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, tenants=tenants))
        at = Jobs(proxy, near)
        try:
            at.entry.learn({digest(b"one"): local, digest(b"two"): row})
            for fields in (b"", b"x-hive-local-only: 0\r\n"):
                found = await at.ask(post(ASK, ask, token=b"one", fields=fields))
                assert found[:2] == (403, "cloud_not_permitted")
            assert not far.requests
            assert (await at.ask(post(ASK, ask, token=b"two")))[0] == 200
            assert len(far.requests) == 1
        finally:
            at.listener.close()


async def test_asking_as_an_agent_neither_wakes_it_nor_keeps_it_awake(tmp_path: Path) -> None:
    async with jobs(tmp_path) as at:
        at.entry.learn({digest(b"one"): OWN})
        assert at.proxy.alice.gate.close(1, 0.0) is None
        at.proxy.alice.gate.asleep(1)
        at.backend.script = slow
        client = await at.client()
        client.writer.write(post(ASK, STREAM, token=b"one"))
        await until(lambda: at.backend.connections)
        assert at.proxy.wakes == []
        assert at.proxy.registry.why_busy_outside("a1", 0.0, unread_counts=True) is None
        assert (await client.answer())[0] == 200
        assert at.proxy.wakes == []


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.2)
    writer.write(chunked(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n"))
    await writer.drain()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(chunked(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', end=False))
    await reader.read()  # until the proxy leaves
    if await reader.read():
        raise AssertionError("more was sent")


@pytest.mark.parametrize("row", [OWN, BOSS], ids=["agent", "operator"])
async def test_what_a_job_has_under_way_ends_with_its_grant(tmp_path: Path, row: JobGrantRow) -> None:
    async with jobs(tmp_path) as at:
        at.entry.learn({digest(b"one"): row})
        at.backend.script = hangs
        client = await at.client()
        client.writer.write(post(ASK, STREAM, token=b"one"))
        await until(lambda: at.backend.connections == 1 and queue_now(at.proxy.registry, 0.0).requests)
        at.entry.learn({})
        await until(lambda: at.backend.closed == 1)
        await until(lambda: nothing_is_held(at.proxy))
        assert not end_request(at.proxy.registry, "e-1")


async def test_a_job_whose_agent_is_removed_is_refused_and_cut(tmp_path: Path) -> None:
    async with jobs(tmp_path) as at:
        at.entry.learn({digest(b"one"): OWN})
        at.backend.script = hangs
        client = await at.client()
        client.writer.write(post(ASK, STREAM, token=b"one"))
        await until(lambda: at.backend.connections == 1)
        at.proxy.registry.forget("a1")
        await until(lambda: at.backend.closed == 1)
        assert (await at.ask(post(ASK, CHAT, token=b"one")))[:2] == (404, "not_found")


async def test_a_job_calls_the_agents_of_its_grant_and_no_other(tmp_path: Path) -> None:
    async with jobs(tmp_path) as at:
        at.proxy.another("bob", tenant="acme")
        at.proxy.another("cid", tenant="acme")
        at.entry.learn({digest(b"one"): OWN, digest(b"two"): BOSS})
        port = await served(at, "bob", b'"pong"')
        try:
            status, _, body = await at.ask(get(b"/agents/bob/tools/look", token=b"two"))
            assert (status, body) == (200, b'"pong"')
            for name in (b"cid", b"alice"):
                assert (await at.ask(get(b"/agents/%b/x" % name, token=b"two")))[:2] == (403, "not_permitted")
            assert (await at.ask(get(b"/agents/nobody/x", token=b"two")))[:2] == (404, "not_found")
            assert (await at.ask(get(b"/agents/bob/x", token=b"one")))[:2] == (403, "not_permitted")
            assert (await at.ask(get(b"/agents/bob/x", token=b"hi_bob")))[:2] == (401, "unauthorized")
            at.proxy.registry.learn(
                msgspec.structs.replace(at.proxy.registry.by_id["bob"].row, tenant="default", generation=2)
            )
            assert (await at.ask(get(b"/agents/bob/x", token=b"two")))[:2] == (403, "not_permitted")  # it moved
        finally:
            port.close()
            await port.wait_closed()


async def served(at: Jobs, name: str, body: bytes) -> asyncio.Server:
    """A server at that agent's port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answering(body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    row = at.proxy.registry.by_id[name].row
    at.proxy.registry.learn(msgspec.structs.replace(row, address=address, generation=2))
    return server
