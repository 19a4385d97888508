"""The gate: parked requests, wakes, and what counts as busy. Pure, then over real sockets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import WakeCause
from hive.errors import AgentAsleep, HiveError
from hive.queue.gate import Gate, GateState
from tests.proxy.harness import CHAT, JSON_ANSWER, MODEL_TOKEN, Client, answer, post, proxied, read_request
from tests.waiting import until


class Notes:
    """An `Outside` that notes, and says what it is told to."""

    def __init__(self) -> None:
        self.wakes: list[WakeCause] = []
        self.quiets = 0
        self.outside: str | None = None

    def wake(self, agent: str, cause: WakeCause) -> None:
        self.wakes.append(cause)

    def tell_quiet(self, agent: str) -> None:
        self.quiets += 1

    def wake_ended(self, agent: str, *, awake: bool) -> None:
        pass

    def why_busy_outside(self, agent: str, now: float, *, unread_counts: bool) -> str | None:
        return self.outside


class Waiter:
    def __init__(self) -> None:
        self.opened = 0
        self.refused: list[HiveError] = []

    def on_gate_open(self) -> None:
        self.opened += 1

    def on_gate_refused(self, error: HiveError) -> None:
        self.refused.append(error)


def closed_gate(notes: Notes, *, asleep: bool = False) -> Gate:
    gate = Gate("a", notes, parked_max=2)
    gate.open(1)
    assert gate.close(2, now=0.0) is None
    if asleep:
        gate.asleep(2)
    return gate


def test_who_is_not_woken_refuses_those_who_wait_and_the_next_one_asks_again() -> None:
    """The answer of the API: the gate is not told if it still holds when another request asks."""
    notes, waiter, next_one = Notes(), Waiter(), Waiter()
    gate = closed_gate(notes, asleep=True)
    assert gate.begin(waiter, now=0.0) is False
    gate.not_woken("stopped")
    assert [error.message for error in waiter.refused] == ["the agent is stopped"]
    assert (gate.state, gate.parked) == (GateState.ASLEEP, 0)
    assert gate.begin(next_one, now=1.0) is False
    assert len(notes.wakes) == 2


def test_the_first_request_before_a_closed_gate_wakes_and_the_second_only_parks() -> None:
    notes = Notes()
    gate = closed_gate(notes)
    first, second = Waiter(), Waiter()
    assert gate.begin(first, 1.0) is False
    assert gate.begin(second, 1.0) is False
    assert notes.wakes == [WakeCause.REQUEST]
    gate.open(3)
    assert (first.opened, second.opened, gate.parked) == (1, 1, 0)


def test_too_many_parked_are_refused_and_still_counted_until_they_end() -> None:
    gate = closed_gate(Notes())
    for _ in range(2):
        gate.begin(Waiter(), 1.0)
    with pytest.raises(AgentAsleep):
        gate.begin(Waiter(), 1.0)
    assert gate.in_flight == 3


def test_with_a_request_in_flight_the_gate_stays_open_and_owes_one_quiet() -> None:
    notes = Notes()
    gate = Gate("a", notes, parked_max=2)
    gate.begin(Waiter(), 1.0)
    assert gate.close(1, now=1.0) == "1 request is in flight"
    assert gate.state is GateState.OPEN
    gate.end(2.0)
    gate.begin(Waiter(), 3.0)
    gate.end(3.0)
    assert notes.quiets == 1


def test_quiet_waits_for_what_the_kernel_still_holds() -> None:
    notes = Notes()
    gate = Gate("a", notes, parked_max=2)
    notes.outside = "the answer has not been read"
    assert gate.close(1, now=0.0) == "the answer has not been read"
    assert gate.settle(0.1) is False
    notes.outside = None
    assert gate.settle(0.2) is True
    assert notes.quiets == 1


def test_after_the_freeze_whatever_came_makes_it_busy() -> None:
    notes = Notes()
    gate = closed_gate(notes)
    assert gate.still_closed(2, now=1.0) is None
    notes.outside = "bytes of a request are waiting"
    assert gate.still_closed(2, now=1.0) == "bytes of a request are waiting"
    notes.outside = None
    gate.begin(Waiter(), 1.0)
    assert gate.still_closed(2, now=1.0) == "1 request is in flight"
    assert gate.still_closed(1, now=1.0) is not None, "an older generation is never confirmed"


def test_a_message_of_an_older_generation_is_ignored() -> None:
    gate = closed_gate(Notes(), asleep=True)
    gate.open(1)
    assert gate.state is GateState.ASLEEP
    assert gate.close(1, now=0.0) == "a newer generation is known"


def test_when_the_link_drops_a_closed_gate_opens_and_a_sleeping_one_parks() -> None:
    notes = Notes()
    closed, asleep = closed_gate(notes), closed_gate(notes, asleep=True)
    waiter = Waiter()
    closed.begin(waiter, 0.0)
    closed.link_lost()
    asleep.link_lost()
    assert (closed.state, waiter.opened, asleep.state) == (GateState.OPEN, 1, GateState.ASLEEP)
    sleeper = Waiter()
    assert asleep.begin(sleeper, 1.0) is False
    asleep.wake_failed()
    asleep.wake_again()
    assert notes.wakes.count(WakeCause.REQUEST) == 3


def test_a_stopped_agent_flushes_what_is_parked_and_takes_nothing_new() -> None:
    gate = closed_gate(Notes(), asleep=True)
    waiter = Waiter()
    gate.begin(waiter, 0.0)
    gate.refuse(3, "stopped")
    assert "stopped" in waiter.refused[0].message
    with pytest.raises(AgentAsleep, match="stopped"):
        gate.begin(Waiter(), 1.0)


def test_callers_of_an_agent_that_failed_are_told_how_it_ended() -> None:
    """They read `the agent is error`."""
    gate = closed_gate(Notes(), asleep=True)
    waiter = Waiter()
    gate.begin(waiter, 0.0)
    gate.refuse(3, "error", "exited with 1")
    assert waiter.refused[0].message == "the agent has ended with an error: exited with 1"
    assert "hive agent logs NAME" in waiter.refused[0].hint
    gate.move(GateState.REFUSED, 4, "stopped")
    with pytest.raises(AgentAsleep, match="the agent is stopped"):
        gate.begin(Waiter(), 1.0)


STEPS = ["begin", "ingress", "end", "close", "still", "asleep", "open", "refuse", "lost", "outside", "quiet"]


@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_whatever_happens_a_closed_gate_with_waiters_has_asked_to_wake(steps: list[str]) -> None:
    notes = Notes()
    gate = Gate("a", notes, parked_max=100)
    generation, running, asked_before = 1, [], 0
    for step in steps:
        match step:
            case "begin" | "ingress":
                waiter = Waiter()
                try:
                    open_now = gate.begin(waiter, 0.0, ingress=step == "ingress")
                except AgentAsleep:
                    assert gate.state is GateState.REFUSED
                else:
                    assert open_now or len(notes.wakes) > asked_before
                running.append((waiter, step == "ingress"))
            case "end" if running:
                waiter, ingress = running.pop()
                gate.unpark(waiter)
                gate.end(0.0, ingress=ingress)
            case "close":
                generation += 1
                if gate.close(generation, 0.0) is None:
                    assert not running
                    asked_before = len(notes.wakes)
            case "still":
                if gate.still_closed(generation, 0.0) is None:
                    assert not running
            case "asleep":
                gate.asleep(generation)
            case "open":
                gate.open(generation)
            case "refuse":
                gate.refuse(generation, "stopped")
            case "lost":
                gate.link_lost()
            case "outside":
                notes.outside = "busy"
            case "quiet":
                notes.outside = None
                gate.settle(0.0)
        assert gate.in_flight + gate.ingress == len(running)
        assert gate.parked == 0 or gate.state in (GateState.CLOSED, GateState.ASLEEP)
        assert all(waiter.opened + len(waiter.refused) <= 1 for waiter, _ in running)


# over real sockets -------------------------------------------------------------------------------------------------


async def test_a_request_to_a_sleeping_agent_waits_for_its_wake_and_is_answered(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        gate = proxy.alice.gate
        client = await Client.unix(proxy.socket_path)
        await until(lambda: len(proxy.alice.connections) == 1)
        assert gate.close(2, now=0.0) is None
        gate.asleep(2)
        client.writer.write(post(b"/v1/chat/completions", CHAT))
        await until(lambda: proxy.wakes == [("a1", WakeCause.REQUEST)])
        assert gate.parked == 1
        gate.open(3)
        assert (await client.answer())[0] == 200
        client.close()


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_half_sent_body_wakes_at_its_first_byte_and_its_clocks_stand_still(tmp_path: Path, tcp: bool) -> None:
    """A sender stopped in the middle of a large body: a gate looked at only after the body deadlocks (seen)."""
    async with proxied(tmp_path, body_idle_s=0.3, head_s=0.3) as (proxy, _):
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        client = await (Client.tcp(proxy.port) if tcp else Client.unix(proxy.socket_path))
        request = post(b"/v1/chat/completions", b'{"x":"%b"}' % (b"y" * 600_000), token=MODEL_TOKEN)
        client.writer.write(request[:300_000])
        await until(lambda: gate.parked == 1)
        assert proxy.wakes == [("a1", WakeCause.REQUEST)]
        await asyncio.sleep(0.9)  # three times the body clock: frozen, it cannot send
        assert gate.parked == 1
        gate.open(3)
        client.writer.write(request[300_000:])
        assert (await client.answer())[0] == 200
        client.close()


async def test_an_agent_that_does_not_wake_in_time_is_503_with_retry_after_and_its_charge_back(tmp_path: Path) -> None:
    async with proxied(tmp_path, gate_wait_s=0.2) as (proxy, _):
        assert proxy.alice.gate.close(2, now=0.0) is None
        client = await Client.unix(proxy.socket_path)
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert (status, b"retry-after" in fields) == (503, True)
        assert repr(proxy.alice.window) == "<SlidingWindow 0/600 in 60 s>"
        assert proxy.alice.gate.in_flight == 0
        client.close()


async def test_bytes_not_yet_read_by_the_loop_keep_the_gate_open(tmp_path: Path) -> None:
    """The request is in the kernel, even the connection is not accepted yet: `close` must see both, at once."""
    async with proxied(tmp_path) as (proxy, _):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(str(proxy.socket_path))
        raw.send(b"P")
        assert proxy.alice.gate.close(2, now=0.0) == "bytes of a request are waiting"
        raw.close()
        await until(lambda: not proxy.alice.connections)
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(str(proxy.socket_path))
        await until(lambda: len(proxy.alice.connections) == 1)
        assert proxy.alice.gate.close(3, now=100.0) is None
        raw.send(b"P")  # between the acknowledgement and the freeze
        assert proxy.alice.gate.still_closed(3, now=100.0) == "bytes of a request are waiting"
        raw.close()


async def test_an_answer_sent_but_not_read_keeps_the_agent_awake_until_it_is(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER.replace(b'"hi"', b'"%b"' % (b"x" * 20_000)))
        loop = asyncio.get_running_loop()
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.setblocking(False)
        raw.connect(str(proxy.socket_path))
        await loop.sock_sendall(raw, post(b"/v1/chat/completions", CHAT))
        await until(lambda: len(proxy.events) == 1 and proxy.alice.gate.in_flight == 0)
        now = loop.time()
        assert proxy.alice.gate.close(2, now=now) == "the answer has not been read"
        assert proxy.alice.gate.close(3, now=now + 61) is None, "but not for longer than 60 s"
        proxy.alice.gate.open(4)
        got = 0
        while got < 20_000:
            got += len(await loop.sock_recv(raw, 65536))
        assert proxy.alice.gate.close(5, now=now) is None
        raw.close()


async def test_over_tcp_the_last_byte_must_be_a_second_old(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.tcp(proxy.port)
        await client.ask(post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN))
        now = asyncio.get_running_loop().time()
        assert proxy.alice.gate.close(2, now=now) == "an answer was sent less than 1 s ago"
        assert proxy.alice.gate.close(3, now=now + 1.1) is None
        client.close()


async def test_idle_connections_of_a_sleeping_agent_stay_open(tmp_path: Path) -> None:
    async with proxied(tmp_path, keepalive_s=0.2) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        await until(lambda: len(proxy.alice.connections) == 1)
        assert proxy.alice.gate.close(2, now=0.0) is None
        await asyncio.sleep(0.7)
        assert len(proxy.alice.connections) == 1
        proxy.alice.gate.open(3)
        assert await client.at_end(), "awake and idle it is closed in time"
        client.close()


async def test_a_request_that_began_before_the_pause_keeps_the_gate_open_to_its_end(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go.wait()
        writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", CHAT))
        await until(lambda: proxy.alice.gate.in_flight == 1)
        assert proxy.alice.gate.close(2, now=0.0) is not None
        go.set()
        assert (await client.answer())[0] == 200
        await until(lambda: proxy.alice.gate.settle(0.0))
        assert proxy.quiets == ["a1"]
        client.close()


async def test_a_removed_agents_connections_are_closed(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.tcp(proxy.port)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN)))[0] == 200
        proxy.registry.forget("a1")
        assert await client.at_end()
        assert proxy.registry.by_model_token(MODEL_TOKEN) is None
        client.close()
