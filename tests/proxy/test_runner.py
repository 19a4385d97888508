"""The runner's listener over a real link: nothing of a stranger reaches the daemon or stays in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from hive.domain import Role
from hive.endpoints.runner_paths import PATHS
from hive.host.accounts import own
from hive.link.client import LinkClient
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Hello, ProxyTable
from hive.link.parking import UseParked
from hive.link.proxy_link import ProxyGates
from hive.link.runner import CALLS_MAX, RunnerCall, RunnerSaid, RunnerTokens, TokenRow
from hive.proxy.runner import RunnerEntry, RunnerExchange
from hive.wire.listeners import SocketListener, listen_tcp
from tests.proxy.harness import Client, Proxy, digest, get, nothing_is_held, post, proxied
from tests.proxy.test_slot_link import Heard
from tests.waiting import until

MIB = 1024 * 1024
BODY = b'{"modelId":"' + b"x" * (MIB - 14) + b'"}'
LOAD, FLUSH = b"/v1/models/load", b"/v1/cache/flush"
TOKENS = {
    digest(b"boss"): TokenRow(Role.OPERATOR),
    digest(b"looker"): TokenRow(Role.VIEWER),
    digest(b"late"): TokenRow(Role.OPERATOR, 1.0),
}


class Daemon(Heard):
    """Answers each call once it is `released`; keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[RunnerCall] = []
        self.released = asyncio.Event()
        self.released.set()
        self._answering: list[asyncio.Task[None]] = []

    def use_parked(self, message: UseParked, reply: LinkReply) -> None: ...

    def runner_asks(self, call: RunnerCall, reply: LinkReply) -> None:
        self.calls.append(call)
        self._answering.append(asyncio.create_task(self._answer(reply)))

    async def _answer(self, reply: LinkReply) -> None:
        await self.released.wait()
        reply(RunnerSaid(status=200, body=b"{}"))


class Runner:
    """The runner's listener on TCP, at `port`."""

    def __init__(self, proxy: Proxy, daemon: Daemon, entry: RunnerEntry, gates: ProxyGates) -> None:
        self.proxy, self.daemon, self.entry, self.gates = proxy, daemon, entry, gates
        sock = listen_tcp(0, move=False)
        self.port = sock.getsockname()[1]
        self.listener = SocketListener(sock, lambda s: proxy._connect(s, partial(RunnerExchange, proxy.path, entry)))

    async def client(self) -> Client:
        return await Client.tcp(self.port)


@asynccontextmanager
async def runner(tmp_path: Path, *, told: bool = True) -> AsyncIterator[Runner]:
    async with proxied(tmp_path) as (proxy, _):
        daemon = Daemon()
        gates = ProxyGates(epoch="d", events=daemon)
        gates.listen(tmp_path / "link.sock", own())
        entry = RunnerEntry(lambda: client.link)

        def here(link: Link) -> None:
            link.tell(Hello(role="proxy", epoch="p", pid=os.getpid()))
            link.tell(ProxyTable(agents={}, port=1, ingress_port=2))

        def heard(_: Link, message: LinkMessage, reply: LinkReply | None) -> None:
            if isinstance(message, RunnerTokens):
                entry.learn(message.tokens)

        client = LinkClient(tmp_path / "link.sock", name="daemon", on_link=here, on_message=heard)
        listening = Runner(proxy, daemon, entry, gates)
        try:
            await until(lambda: gates.session is not None)
            if told:
                gates.say(RunnerTokens(tokens=TOKENS))
                await until(lambda: repr(entry) == "<RunnerEntry 3, 0 calls>")
            yield listening
        finally:
            listening.listener.close()
            daemon.released.set()
            client.close()
            gates.stop()


def error_of(body: bytes) -> dict[str, object]:
    """The error, which has the shape that the runner's clients know."""
    told = msgspec.json.decode(body)
    assert set(told) == {"error"}
    assert set(told["error"]) <= {"code", "message", "hint"}
    return dict(told["error"])


async def test_bodies_of_strangers_reach_nobody_and_are_not_kept(tmp_path: Path) -> None:
    """They were buffered beside the budget, and sent over the link that carries wakes."""
    async with runner(tmp_path) as at:
        clients = [await at.client() for _ in range(40)]
        for client, token in zip(clients, [b"", b"wrong", b"late", b"boss2"] * 10, strict=True):
            client.writer.write(post(LOAD, BODY, token=token))
        for client in clients:
            status, fields, body = await client.answer()
            assert (status, fields[b"www-authenticate"], fields[b"content-type"]) == (
                401,
                b"Bearer",
                b"application/json",
            )
            assert error_of(body)["code"] == "unauthorized"
            assert await client.at_end()
        assert (at.daemon.calls, at.proxy.path.budget.used) == ([], 0)


async def test_a_stranger_is_answered_before_the_body_has_come(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        client = await at.client()
        client.writer.write(post(LOAD, BODY, token=b"wrong")[:1000])
        assert (await client.answer())[0] == 401
        assert not at.daemon.calls


async def test_each_path_of_the_runner_wants_a_token_that_is_good(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        for path in [*PATHS, b"/v1/models/load/load-1", b"/llm/adapters/legal/load", b"/llm/adapters/a/load-status"]:
            for method in (b"GET", b"POST", b"HEAD"):
                for token in (None, b"wrong", b"late"):
                    client = await at.client()
                    status, _, body = await client.ask(get(path, token=token, method=method))
                    assert status == 401, (path, method)
                    assert method == b"HEAD" or error_of(body)["code"] == "unauthorized"
                for known in (b"boss", b"looker"):  # what a viewer may is the daemon's to say
                    client = await at.client()
                    assert (await client.ask(get(path, token=known, method=method)))[0] == 200
        assert len(at.daemon.calls) == 2 * 3 * (len(PATHS) + 3)
        assert {call.authorization for call in at.daemon.calls} == {b"Bearer boss", b"Bearer looker"}


async def test_a_good_tokens_body_is_charged_to_the_budget_as_long_as_it_is_held(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        at.daemon.released.clear()
        client, request = await at.client(), post(LOAD, BODY, token=b"boss")
        client.writer.write(request[: MIB // 2])
        await until(lambda: at.proxy.path.budget.used > MIB // 4)
        client.writer.write(request[MIB // 2 :])
        await until(lambda: at.daemon.calls)
        assert at.proxy.path.budget.used == MIB == len(at.daemon.calls[0].body)
        at.daemon.released.set()
        assert (await client.answer())[0] == 200
        assert nothing_is_held(at.proxy)


async def test_a_body_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        at.proxy.path.budget.use(MIB // 2, one_body=MIB // 2)
        client = await at.client()
        status, fields, body = await client.ask(post(LOAD, BODY, token=b"boss"))
        assert (status, error_of(body)["code"]) == (503, "saturated")
        assert int(fields[b"retry-after"]) >= 1
        assert not at.daemon.calls
        assert nothing_is_held(at.proxy)


async def test_a_body_beyond_a_megabyte_is_refused_by_its_head(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        client = await at.client()
        client.writer.write(post(LOAD, BODY + b"x" * 16, token=b"boss")[:1000])
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (413, "too_large")
        chunks = await at.client()
        head = b"POST %b HTTP/1.1\r\nhost: h\r\nauthorization: Bearer boss\r\ntransfer-encoding: chunked\r\n\r\n" % LOAD
        chunks.writer.write(head + b"%x\r\n%b\r\n" % (len(BODY) + 16, BODY + b"x" * 16))
        assert (await chunks.answer())[0] == 413
        assert not at.daemon.calls
        assert nothing_is_held(at.proxy)


async def test_calls_in_flight_are_bounded_and_one_too_many_comes_again(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        at.daemon.released.clear()
        clients = [await at.client() for _ in range(CALLS_MAX)]
        for client in clients:
            client.writer.write(get(b"/v1/capabilities", token=b"looker"))
        await until(lambda: len(at.daemon.calls) == CALLS_MAX)
        another = await at.client()
        status, fields, body = await another.ask(get(b"/v1/capabilities", token=b"boss"))
        assert (status, error_of(body)["code"]) == (503, "saturated")
        assert int(fields[b"retry-after"]) >= 1
        at.daemon.released.set()
        assert [(await client.answer())[0] for client in clients] == [200] * CALLS_MAX
        assert (await another.ask(get(b"/v1/capabilities", token=b"boss")))[0] == 200
        assert repr(at.entry) == "<RunnerEntry 3, 0 calls>"


async def test_who_has_shown_a_good_token_is_no_stranger_any_more(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        shares = at.proxy.path.shares
        client, wrong = await at.client(), await at.client()
        assert (await client.ask(get(b"/health", token=b"looker")))[0] == 200
        wrong.writer.write(b"GET /health HTTP/1.1\r\n")
        await until(lambda: len(shares.strangers[0]) == 1)
        assert len(at.proxy.registry.operator.connections) == 1
        at.gates.say(RunnerTokens(tokens={}))
        await until(lambda: repr(at.entry) == "<RunnerEntry 0, 0 calls>")
        assert (await client.ask(get(b"/health", token=b"looker")))[0] == 401, (
            "and yet its token is looked at each time"
        )
        assert await client.at_end()


async def test_before_the_tokens_are_known_everybody_is_to_come_again(tmp_path: Path) -> None:
    async with runner(tmp_path, told=False) as at:
        client = await at.client()
        status, fields, body = await client.ask(get(b"/v1/capabilities", token=b"boss"))
        assert (status, error_of(body)["code"], fields[b"retry-after"]) == (503, "not_ready", b"2")


async def test_a_client_that_leaves_gives_back_its_call(tmp_path: Path) -> None:
    async with runner(tmp_path) as at:
        at.daemon.released.clear()
        client = await at.client()
        client.writer.write(post(FLUSH, b'{"scope":"all"}', token=b"boss"))
        await until(lambda: at.daemon.calls)
        client.close()
        await until(lambda: repr(at.entry) == "<RunnerEntry 3, 0 calls>")
        await until(lambda: nothing_is_held(at.proxy))
