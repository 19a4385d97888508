"""The life of the proxy process: real processes, real signals, sockets handed over, a notify socket that is read."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.link.messages import Busy, Close, Closed
from hive.link.pool import SlotIs, SlotRow, Slots
from hive.proxy.metrics import TABLE
from tests.proxy.harness import CHAT, JSON_ANSWER, MODEL_TOKEN, STREAM, Client, answer, get, post, read_request
from tests.proxy.proxy_process import ALICE, CONFIG, House, Proxy, house, run
from tests.waiting import until

ASK = post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN)
FIRST, LAST = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\ndata: [DONE]\n\n',
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Held:
    """A backend that answers when `go` is set; a stream has begun by then."""

    def __init__(self, house: House, *, stream: bool) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self._stream = stream
        house.backend.script = self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            self.asked += 1
            if self._stream:
                writer.write(STREAM_HEAD + chunk(FIRST))
            await self.go.wait()
            writer.write(chunk(LAST) + b"0\r\n\r\n" if self._stream else answer(JSON_ANSWER))
            await writer.drain()


def listening(where: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind((where, 0))
    sock.listen(64)
    return sock


def rewritten(house: House, **proxy: object) -> None:
    """hive.conf with these keys of [proxy] besides the usual ones."""
    house.config.write_text(CONFIG + "".join(f"{key} = {value}\n" for key, value in proxy.items()))


# --- ready, and how it is ----------------------------------------------------------------------------------------


async def test_it_says_ready_once_it_serves_and_stopping_when_it_is_told_to_leave(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        assert await proxy.admin("/readyz") == (200, b'{"status":"ready"}\n')
        status, _, _ = await (await Client.tcp(proxy.port)).ask(ASK)
        assert status == 200
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        assert await proxy.ended() == 0
        assert "Traceback" not in proxy.said()
        assert not home.paths.admin_socket.exists()


async def test_without_a_daemon_it_is_ready_all_the_same_after_a_while(short_path: Path) -> None:
    async with house(short_path) as home:
        home.hang_up()
        proxy = await home.proxy()
        assert await proxy.admin("/readyz") == (200, b'{"status":"ready"}\n')
        assert await proxy.metric("hive_proxy_daemon_up") == 0
        assert await proxy.stop() == 0


async def test_until_it_knows_who_there_is_callers_wait_and_it_can_be_ended(short_path: Path) -> None:
    async with house(short_path) as home:
        home.hang_up()
        with listening() as model:
            proxy = Proxy(home, [("model", model)], {})
            try:
                await until(home.paths.admin_socket.exists)
                assert await proxy.admin("/readyz") == (503, b'{"status":"not listening"}\n')
                client = await Client.tcp(model.getsockname()[1])
                assert await proxy.metric("hive_proxy_connections") == 0
                assert await proxy.stop() == 0
            finally:
                proxy.process.kill()
            client.close()


async def test_a_scrape_of_a_running_proxy_shows_every_metric_there_is(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        assert (await client.ask(ASK))[0] == 200
        _, text = await proxy.admin("/metrics")
        shown = {family.name for family in text_string_to_metric_families(text.decode())}
        assert shown == {row.full_name.removesuffix("_total") for row in TABLE}
        assert await proxy.metric("hive_proxy_connections") == 1
        assert await proxy.metric("hive_proxy_daemon_up") == 1
        assert await proxy.metric("hive_proxy_usage_backlog") == 1
        requests = await proxy.metric("hive_proxy_requests_total", endpoint="/v1/chat/completions", status="200")
        assert requests == 1
        assert await proxy.metric("hive_proxy_loop_lag_seconds_count") > 0


async def test_the_slots_of_the_pool_are_seen_in_a_scrape(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        assert home.link is not None
        cold = BackendInfo(kind=BackendKind.LLAMA, address="")
        row = SlotRow(
            id="big-1", generation=1, is_open=False, backend=cold, models=[ModelInfo(name="big")], wait_s=30.0
        )
        home.link.tell(Slots(slots=[row]))
        client = await Client.tcp(proxy.port)
        client.writer.write(post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"big"'), token=MODEL_TOKEN))
        of = {"slot": "big-1", "model": "big"}
        await proxy.has("hive_proxy_slot_waiting", 1, **of)
        assert await proxy.metric("hive_proxy_slot_open", **of) == 0
        warm = BackendInfo(kind=BackendKind.LLAMA, address=home.backend.address, up=True)
        home.link.tell(SlotIs(slot=replace(row, is_open=True, backend=warm, generation=2)))
        assert (await client.answer())[0] == 200
        await proxy.has("hive_proxy_slot_open", 1, **of)
        assert await proxy.metric("hive_proxy_slot_waiting", **of) == 0
        assert await proxy.metric("hive_proxy_slot_in_flight", **of) == 0
        assert await proxy.metric("hive_proxy_slot_connections", state="idle", **of) == 1


async def test_who_waits_is_told_while_they_wait(short_path: Path) -> None:
    async with house(short_path) as home:
        rewritten(home, backend_concurrency=1)
        held = Held(home, stream=False)
        proxy = await home.proxy()
        first, second = await Client.tcp(proxy.port), await Client.tcp(proxy.port)
        first.writer.write(ASK)
        await until(lambda: held.asked == 1)
        second.writer.write(ASK)
        await proxy.has("hive_proxy_queue_waiting", 1, tenant="default")
        queue = await proxy.queue()
        tenant = next(tenant for tenant in queue["tenants"] if tenant["name"] == "default")
        assert (queue["running"], queue["waiting"], queue["slots"]) == (1, 1, 1)
        assert (tenant["running"], tenant["waiting"]) == (1, 1)
        held.go.set()
        assert [(await client.answer())[0] for client in (first, second)] == [200, 200]


async def test_the_watchdog_is_fed_by_the_loop_and_not_by_a_stopped_process(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy(env={"WATCHDOG_USEC": "300000"})
        await proxy.hears("WATCHDOG=1")
        proxy.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        while home.ear.hears(0.3) != [""]:
            pass  # what was sent before it stood still
        proxy.signal(signal.SIGCONT)
        await proxy.hears("WATCHDOG=1")


# --- drain -------------------------------------------------------------------------------------------------------


async def test_a_drain_ends_what_was_asked_and_takes_nobody_new(short_path: Path) -> None:
    async with house(short_path) as home:
        held = Held(home, stream=True)
        proxy = await home.proxy()
        client, idle = await Client.tcp(proxy.port), await Client.tcp(proxy.port)
        client.writer.write(post(b"/v1/chat/completions", STREAM, token=MODEL_TOKEN))
        await until(lambda: held.asked == 1)
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        assert await idle.at_end(), "nothing was asked on it"
        assert await proxy.admin("/readyz") == (503, b'{"status":"draining"}\n')
        assert (await proxy.admin("/healthz"))[0] == 200
        assert await proxy.metric("hive_proxy_draining") == 1
        with pytest.raises(OSError, match="Connect call failed"):
            await Client.tcp(proxy.port)
        held.go.set()
        status, _, body = await client.answer()
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        assert await proxy.ended() == 0


async def test_an_answer_given_while_draining_closes_its_connection(short_path: Path) -> None:
    async with house(short_path) as home:
        held = Held(home, stream=False)
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        client.writer.write(ASK)
        await until(lambda: held.asked == 1)
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        held.go.set()
        status, fields, _ = await client.answer()
        assert (status, fields.get(b"connection")) == (200, b"close")
        assert await client.at_end()


async def test_a_connection_made_just_before_the_drain_may_still_ask(short_path: Path) -> None:
    """Its client saw it accepted; closed without a word, its first request would be lost."""
    async with house(short_path) as home:
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        status, _, _ = await client.ask(ASK)
        assert status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["unanswered", "streaming"])
async def test_what_has_not_ended_in_time_is_cut_so_that_the_client_can_tell(short_path: Path, stream: bool) -> None:
    async with house(short_path) as home:
        rewritten(home)
        home.config.write_text(home.config.read_text().replace("drain_s = 5", "drain_s = 0.3"))
        held = Held(home, stream=stream)
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        client.writer.write(post(b"/v1/chat/completions", STREAM if stream else CHAT, token=MODEL_TOKEN))
        await until(lambda: held.asked == 1)
        proxy.signal(signal.SIGTERM)
        if stream:
            seen = await asyncio.wait_for(client.reader.read(), 5)
            assert seen.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in seen
            assert not seen.endswith(b"0\r\n\r\n"), "it does not look whole"
        else:
            status, fields, body = await client.answer()
            assert (status, fields[b"retry-after"]) == (503, b"1")
            assert json.loads(body)["error"]["src"] == "hive"
        assert await proxy.ended() == 0
        assert "proxy_drained cut=1" in proxy.said()
        spooled = next(path for path in home.paths.spool.iterdir() if path.suffix == ".jsonl").read_text()
        assert [json.loads(line)["cut"] for line in spooled.splitlines()] == [True], "what it cost is not lost"


async def test_a_second_signal_ends_it_at_once(short_path: Path) -> None:
    async with house(short_path) as home:
        home.config.write_text(home.config.read_text().replace("drain_s = 5", "drain_s = 1000"))
        held = Held(home, stream=False)
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        client.writer.write(ASK)
        await until(lambda: held.asked == 1)
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        proxy.signal(signal.SIGTERM)
        assert (await client.answer())[0] == 503
        assert await proxy.ended() == 0


async def test_while_it_drains_no_agent_is_put_to_sleep(short_path: Path) -> None:
    """Callers wait in the agent's backlog then, and no wake would follow."""
    async with house(short_path) as home:
        held = Held(home, stream=False)
        proxy = await home.proxy()
        assert home.link is not None
        client = await Client.tcp(proxy.port)
        client.writer.write(ASK)
        await until(lambda: held.asked == 1)
        proxy.signal(signal.SIGTERM)
        await proxy.hears("STOPPING=1")
        busy = await home.link.ask_any(Close(agent=ALICE, generation=2), timeout_s=5)
        assert isinstance(busy, Busy)
        assert busy.reason == "the proxy is restarting"
        held.go.set()
        await client.answer()


async def test_an_awake_and_quiet_agent_may_be_put_to_sleep_otherwise(short_path: Path) -> None:
    async with house(short_path) as home:
        await home.proxy()
        assert home.link is not None
        assert isinstance(await home.link.ask_any(Close(agent=ALICE, generation=2), timeout_s=5), Closed)


# --- sockets that outlive it -------------------------------------------------------------------------------------


async def test_who_comes_between_two_proxies_is_served_by_the_next(short_path: Path) -> None:
    """TCP from systemd, the agent's own from the helper: both stay open, their backlogs wait."""
    with listening() as model, listening() as ingress:
        async with house(short_path) as home:
            first = await home.proxy(("model", model), ("ingress", ingress))
            assert (first.port, first.ingress_port) == (model.getsockname()[1], ingress.getsockname()[1])
            assert await first.stop() == 0
            tcp = await Client.tcp(model.getsockname()[1])
            unix = await Client.unix(home.paths.agent_socket(ALICE))
            caller = await Client.tcp(ingress.getsockname()[1])
            for client, request in ((tcp, ASK), (unix, ASK), (caller, get(b"/agents/alice/"))):
                client.writer.write(request)
            await home.proxy(("model", model), ("ingress", ingress))
            statuses = [(await client.answer())[0] for client in (tcp, unix, caller)]
            assert statuses == [200, 200, 401]


async def test_a_draining_proxy_leaves_the_handed_backlogs_alone(short_path: Path) -> None:
    with listening() as model:
        async with house(short_path) as home:
            held = Held(home, stream=False)
            first = await home.proxy(("model", model))
            client = await Client.tcp(first.port)
            client.writer.write(ASK)
            await until(lambda: held.asked == 1)
            first.signal(signal.SIGTERM)
            await first.hears("STOPPING=1")
            late = [await Client.tcp(first.port), await Client.unix(home.paths.agent_socket(ALICE))]
            for one in late:
                one.writer.write(ASK)
            held.go.set()
            assert (await client.answer())[0] == 200
            assert await first.ended() == 0
            assert held.asked == 1
            await home.proxy(("model", model))
            assert [(await one.answer())[0] for one in late] == [200, 200]


async def test_an_admin_socket_may_be_handed_over_too(short_path: Path) -> None:
    async with house(short_path) as home:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.bind(str(home.paths.admin_socket))
            admin.listen(8)
            proxy = await home.proxy(("admin", admin))
            assert (await proxy.admin("/readyz"))[0] == 200
            assert await proxy.stop() == 0
        assert home.paths.admin_socket.exists(), "it is systemd's, not the proxy's"


@pytest.mark.parametrize(
    ("name", "said"),
    [("modell", "'modell': no such socket; known are model, ingress, vsock, admin"), ("admin", "expected AF_UNIX")],
)
def test_a_socket_that_does_not_fit_is_said_and_nothing_starts(short_path: Path, name: str, said: str) -> None:
    with listening() as sock:
        ended = run((name, sock), base=short_path)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_admin_socket_that_cannot_be_made_is_said(short_path: Path) -> None:
    (short_path / "r/proxy.sock").mkdir(parents=True)
    ended = run(base=short_path)
    assert ended.returncode == 5
    assert f"the admin socket {short_path}/r/proxy.sock cannot be made" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- SIGHUP ------------------------------------------------------------------------------------------------------


async def test_a_new_configuration_is_in_force_without_a_restart(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        assert (await client.ask(ASK))[0] == 200
        home.config.write_text(CONFIG.replace("window_requests = 1000000", "window_requests = 1") + "port = 1\n")
        with home.config.open("a") as file:
            file.write("[sleep]\ncheck_s = 7\n[tenant acme]\nrate_limit = 5/min\n")
        proxy.signal(signal.SIGHUP)
        assert (await proxy.hears("RELOADING=1"))[1].startswith("MONOTONIC_USEC=")
        assert await proxy.hears("READY=1") == ["READY=1", "STATUS=serving"]
        assert [(await client.ask(ASK))[0] for _ in range(2)] == [200, 429]
        assert await proxy.metric("hive_proxy_config_reloads_total") == 1
        assert (
            "config_reloaded applied=proxy.window_requests,[tenant acme] not_the_proxys=sleep.check_s" in proxy.said()
        ), "the port was given as a flag, which wins"


@pytest.mark.parametrize(
    "wrong", ["[proxy]\nwindow_requests = many\n", "[proxy]\nwindow_request = 1\n", "\xff\n", None]
)
async def test_a_wrong_configuration_changes_nothing_and_is_said_loudly(short_path: Path, wrong: str | None) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        client = await Client.tcp(proxy.port)
        if wrong is None:
            home.config.unlink()
        else:
            home.config.write_bytes(wrong.encode("latin-1"))
        proxy.signal(signal.SIGHUP)
        await proxy.hears("RELOADING=1")
        assert await proxy.hears("READY=1") == [
            "READY=1",
            "STATUS=serving with the old configuration: the new one is wrong",
        ]
        assert "config_reload_failed error=" in proxy.said()
        assert str(home.config) in proxy.said()
        assert await proxy.metric("hive_proxy_config_reload_failed_total") == 1
        assert (await client.ask(ASK))[0] == 200


# --- limits of the house -----------------------------------------------------------------------------------------


async def test_it_may_open_as_many_files_as_the_system_lets_it(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        soft, hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        assert await proxy.metric("hive_proxy_connections_limit") == (hard - 128) // 2


async def test_one_connection_too_many_is_answered_503_and_admin_still_answers(short_path: Path) -> None:
    async with house(short_path) as home:
        rewritten(home, connections_max=40)
        proxy = await home.proxy()
        own = home.paths.agent_socket(ALICE)
        busy = [await Client.unix(own) for _ in range(31)]  # 4 of 40 are the operator's, 5 those of strangers
        for client in busy:
            client.writer.write(ASK[:-1])
        await proxy.has("hive_proxy_in_flight", 31)
        late = await Client.unix(own)
        status, fields, body = await late.ask(ASK)
        assert (status, fields[b"retry-after"], fields[b"connection"]) == (503, b"1", b"close")
        assert json.loads(body)["error"]["message"] == "too many connections"
        assert await late.at_end()
        assert await proxy.metric("hive_proxy_connections_refused_total", reason="connections_max") == 1
        late = await Client.tcp(proxy.port)
        assert (await late.ask(ASK))[0] == 503, "the same for who shows by a token that it is this agent"
        assert (await busy[0].ask(ASK[-1:]))[0] == 200
        assert (await (await Client.unix(own)).ask(ASK))[0] == 200, "in place of the one that is idle now"
        assert await proxy.metric("hive_proxy_connections_displaced_total", of="idle") == 1
        assert proxy.said().count("connection_refused reason=connections_max") == 1, "one line a second"


async def test_idle_strangers_lock_nobody_out(short_path: Path) -> None:
    """9,936 TCP connections without a token made every request 503 for 75 s, those on agents' own sockets included."""
    async with house(short_path) as home:
        rewritten(home, connections_max=40)
        proxy = await home.proxy()
        for port in (proxy.port, proxy.ingress_port):
            strangers = [await Client.tcp(port) for _ in range(60)]
            own = await Client.unix(home.paths.agent_socket(ALICE))
            assert (await own.ask(ASK))[0] == 200
            assert (await (await Client.tcp(proxy.port)).ask(ASK))[0] == 200, "also who shows its token late"
            asked = b"GET /agents/nobody/ HTTP/1.1\r\nhost: h\r\n\r\n"
            assert (await (await Client.tcp(proxy.ingress_port)).ask(asked))[0] == 401
            assert await strangers[0].at_end(), "the oldest went"
            assert (await own.ask(ASK))[0] == 200, "and none of the agent's own"
            assert await proxy.metric("hive_proxy_connections_refused_total", reason="connections_max") == 0
            assert await proxy.metric("hive_proxy_connections_displaced_total", of="stranger") > 20


async def test_one_agent_cannot_have_all_connections(short_path: Path) -> None:
    async with house(short_path) as home:
        rewritten(home, agent_connections_max=2)
        proxy = await home.proxy()
        own = [await Client.unix(home.paths.agent_socket(ALICE)) for _ in range(2)]
        for client in own:
            assert (await client.ask(ASK))[0] == 200
        late = await Client.unix(home.paths.agent_socket(ALICE))
        assert (await late.ask(ASK))[0] == 503
        assert await proxy.metric("hive_proxy_connections_refused_total", reason="agent_connections_max") == 1
        assert "connection_refused reason=agent_connections_max at='alice'" in proxy.said()
        own[0].close()
        await proxy.has("hive_proxy_connections", 1)
        assert (await (await Client.unix(home.paths.agent_socket(ALICE))).ask(ASK))[0] == 200
