"""Links between Hive's processes: frames split anywhere, answers, descriptors beside messages, lost peers."""

# ruff: noqa: ASYNC110 - what the kernel has done with a socket is asked, not told

from __future__ import annotations

import array
import asyncio
import gc
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import HiveError, LinkLost, TimedOut, WrongState
from hive.link.client import LinkClient
from hive.link.framing import MAX_FRAME, Envelope, FrameError, Unpacker, pack
from hive.link.helper import AskStat, Ended, Listener, ProxyStats, Reconcile, Stat, Thaw, Thawed
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import AnyMessage, Done, Quiet
from hive.link.server import LinkServer, bind_private, peer_of
from hive.tasks import spawn
from tests.descriptors import open_descriptors
from tests.waiting import until

# --- framing -----------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
MESSAGES: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(Quiet, agent=TEXT),
    st.builds(Thaw, agent=TEXT),
    st.builds(Done),
    st.builds(Ended, agent=TEXT, exit_code=st.none() | st.integers(0, 255), pid=st.integers(0, 2**22)),
    st.builds(Reconcile, asleep=st.dictionaries(TEXT, st.integers(0, 2**40), max_size=5)),
    st.builds(
        ProxyStats, agents=st.dictionaries(TEXT, st.builds(Stat, state=TEXT, cpu_us=st.integers(0, 2**50)), max_size=3)
    ),
)
ENVELOPES = st.builds(
    Envelope,
    seq=st.integers(0, 2**40),
    reply_to=st.integers(0, 2**40),
    descriptors=st.integers(0, 60),
    message=MESSAGES,
)


@given(envelopes=st.lists(ENVELOPES, max_size=6), data=st.data())
def test_envelopes_arrive_whole_and_in_order_wherever_the_bytes_are_split(
    envelopes: list[Envelope], data: st.DataObject
) -> None:
    stream = b"".join(pack(envelope) for envelope in envelopes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    unpacker = Unpacker()
    got: list[Envelope] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += unpacker.feed(stream[start:end])
    assert got == envelopes


@given(envelope=ENVELOPES)
def test_a_frame_that_lacks_its_last_byte_is_not_delivered(envelope: Envelope) -> None:
    assert Unpacker().feed(pack(envelope)[:-1]) == []


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x00",
    ],
)
def test_bytes_of_another_protocol_are_an_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        Unpacker().feed(data)


@given(data=st.binary(max_size=200))
def test_no_bytes_at_all_raise_anything_else(data: bytes) -> None:
    try:
        Unpacker().feed(data)
    except FrameError:
        return


# --- two ends ----------------------------------------------------------------------------------------------------


class End:
    """One end of a link: keeps what it was told, answers what `answer` says."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.got: list[LinkMessage] = []
        self.descriptors: list[int] = []
        self.take = True
        self.lost = asyncio.Event()
        self.answer: Callable[[LinkMessage], LinkMessage] = lambda _: Done()
        self.answer_with: list[int] = []
        """Descriptors that go with each answer."""
        self.link = Link(sock, name=name, on_message=self._on_message, on_lost=lambda _: self.lost.set())

    def _on_message(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        self.got.append(message)
        if self.take:
            self.descriptors += link.take_descriptors()
        if reply is not None:
            reply(self.answer(message), self.answer_with)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = End(left, "left"), End(right, "right")
    yield pair
    for end in pair:
        end.link.close()
        for descriptor in end.descriptors:
            os.close(descriptor)
    await pair[0].lost.wait()
    await pair[1].lost.wait()


async def test_an_answer_comes_back_to_the_question_it_belongs_to(ends: tuple[End, End]) -> None:
    left, right = ends
    right.answer = lambda message: Thawed(took_ms=float(message.agent)) if isinstance(message, Thaw) else Done()
    answers = await asyncio.gather(*(left.link.ask(Thaw(agent=str(n)), Thawed, timeout_s=5) for n in range(50)))
    assert [answer.took_ms for answer in answers] == list(range(50))


async def test_both_sides_may_ask_at_once(ends: tuple[End, End]) -> None:
    left, right = ends
    asked = [end.link.ask(AskStat(), Done, timeout_s=5) for end in (left, right) for _ in range(20)]
    assert await asyncio.gather(*asked) == [Done()] * 40


async def test_an_error_crosses_the_link_as_itself(ends: tuple[End, End]) -> None:
    left, right = ends
    right.answer = lambda _: failed(WrongState("not running", hint="start it"))
    with pytest.raises(WrongState, match="not running") as caught:
        await left.link.ask(Thaw(agent="a"), Thawed, timeout_s=5)
    assert caught.value.hint == "start it"


async def test_an_answer_of_another_type_is_an_error(ends: tuple[End, End]) -> None:
    left, _ = ends
    with pytest.raises(HiveError, match="asked Thaw, got Done"):
        await left.link.ask(Thaw(agent="a"), Thawed, timeout_s=5)


async def test_a_peer_that_does_not_answer_in_time_is_a_timeout_and_a_late_answer_is_dropped() -> None:
    left_sock, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left = End(left_sock, "left")
    with pytest.raises(TimedOut, match="Thaw"):
        await left.link.ask(Thaw(agent="a"), Thawed, timeout_s=0.01)
    right.sendall(pack(Envelope(0, 1, 0, Thawed(took_ms=1))))
    right.sendall(pack(Envelope(0, 0, 0, Quiet(agent="a"))))
    await until(lambda: left.got)
    assert left.got == [Quiet(agent="a")]
    right.close()
    await left.lost.wait()


async def test_whoever_waits_when_the_link_is_lost_hears_of_it(ends: tuple[End, End]) -> None:
    left, right = ends

    def close_and_answer(_: LinkMessage) -> Done:
        right.link.close()
        return Done()

    right.answer = close_and_answer
    with pytest.raises(LinkLost):
        await left.link.ask(Thaw(agent="a"), Thawed, timeout_s=5)
    await left.lost.wait()
    with pytest.raises(LinkLost):
        await left.link.ask(Thaw(agent="a"), Thawed, timeout_s=5)
    left.link.tell(Quiet(agent="a"))


async def test_a_handler_that_fails_does_not_cost_the_messages_behind_it(ends: tuple[End, End]) -> None:
    left, right = ends
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    def fail(message: LinkMessage) -> LinkMessage:
        if message == AskStat(agents=["bad"]):
            raise ValueError("a bug")
        return Done()

    right.answer = fail
    bad = left.link.ask_soon(AskStat(agents=["bad"]))
    good = left.link.ask_soon(AskStat())
    assert await good == Done()
    assert complaints == ["right: AskStat was not handled"]
    bad.cancel()


async def test_a_peer_that_speaks_another_protocol_is_hung_up_on(ends: tuple[End, End]) -> None:
    sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end = End(sock, "end")
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    await end.lost.wait()
    other.close()


# --- large messages and descriptors ------------------------------------------------------------------------------


async def test_what_is_too_large_for_a_frame_is_an_error_and_costs_no_link(ends: tuple[End, End]) -> None:
    left, right = ends
    large = "x" * MAX_FRAME
    right.answer = lambda asked: Quiet(agent=large) if asked == AskStat(agents=["a"]) else Done()
    with pytest.raises(HiveError, match="too large"):
        await left.link.ask(AskStat(agents=["a"]), Done, timeout_s=20)
    with pytest.raises(HiveError, match="too large"):
        await left.link.ask(AskStat(agents=[large]), Done, timeout_s=20)
    with pytest.raises(FrameError):
        left.link.tell(Quiet(agent=large))
    assert await left.link.ask(AskStat(), Done, timeout_s=5) == Done()


async def test_more_than_the_socket_holds_arrives_whole(ends: tuple[End, End]) -> None:
    left, right = ends
    table = Reconcile(asleep={f"agent-{n}" * 10: n for n in range(20_000)})
    for _ in range(3):
        left.link.tell(table)
        left.link.tell(Quiet(agent="after"))
    await until(lambda: len(right.got) == 6)
    assert right.got == [table, Quiet(agent="after")] * 3


def marked_pipe(text: bytes) -> int:
    """The read end of a pipe that holds `text`."""
    reads, writes = os.pipe()
    os.write(writes, text)
    os.close(writes)
    return reads


async def test_a_descriptor_arrives_with_its_message_also_behind_a_full_socket(ends: tuple[End, End]) -> None:
    """The sender closes its own at once: what is queued must hold a copy, else another file's number is sent."""
    left, right = ends
    before = open_descriptors()
    big = Reconcile(asleep={f"agent-{n}" * 10: n for n in range(20_000)})
    for number in range(5):
        left.link.tell(big)
        descriptor = marked_pipe(b"%d" % number)
        left.link.tell(Listener(agent=str(number), path="/"), [descriptor])
        os.close(descriptor)
        os.close(os.open("/dev/null", os.O_RDONLY))
    await until(lambda: len(right.got) == 10)
    assert [os.read(descriptor, 10) for descriptor in right.descriptors] == [b"0", b"1", b"2", b"3", b"4"]
    assert not any(os.get_inheritable(descriptor) for descriptor in right.descriptors)
    assert open_descriptors() == before + 5


async def test_descriptors_nobody_takes_are_closed(ends: tuple[End, End]) -> None:
    left, right = ends
    right.take = False
    before = open_descriptors()
    for _ in range(10):
        descriptor = marked_pipe(b"x")
        left.link.tell(Listener(agent="a", path="/"), [descriptor])
        os.close(descriptor)
    await until(lambda: len(right.got) == 10)
    assert open_descriptors() == before


async def test_an_answer_may_bring_a_descriptor_which_is_the_askers(ends: tuple[End, End]) -> None:
    left, right = ends
    reads, writes = os.pipe()
    right.answer_with = [reads]
    got = await left.link.ask_for_descriptor(Thaw(agent="a"), Done, timeout_s=5)
    os.write(writes, b"through")
    os.close(writes)
    assert os.read(got, 100) == b"through"
    assert not os.get_inheritable(got)
    os.close(got)
    os.close(reads)


@pytest.mark.parametrize("count", [0, 2])
async def test_an_answer_with_none_or_too_many_is_an_error_and_leaves_none_open(
    ends: tuple[End, End], count: int
) -> None:
    left, right = ends
    right.answer_with = [right.link.fileno()] * count
    before = open_descriptors()
    with pytest.raises(HiveError, match="asked Thaw, got Done"):
        await left.link.ask_for_descriptor(Thaw(agent="a"), Done, timeout_s=5)
    assert open_descriptors() == before


async def test_a_descriptor_that_comes_too_late_or_to_nobody_is_closed(ends: tuple[End, End]) -> None:
    left, right = ends
    right.answer_with = [right.link.fileno()]
    before = open_descriptors()
    assert await left.link.ask(Thaw(agent="a"), Done, timeout_s=5) == Done()  # `ask` alone wants no descriptor
    for turns in range(6):
        asking = asyncio.ensure_future(left.link.ask_for_descriptor(Thaw(agent="a"), Done, timeout_s=5))
        for _ in range(turns):
            await asyncio.sleep(0)
        if asking.done():
            os.close(asking.result())
            continue
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    right.answer = lambda _: failed(WrongState("not running"))
    with pytest.raises(WrongState):
        await left.link.ask_for_descriptor(Thaw(agent="a"), Done, timeout_s=5)
    assert open_descriptors() == before


async def test_queued_descriptors_are_closed_when_the_link_is_lost() -> None:
    sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end = End(sock, "end")
    before = open_descriptors()
    big = Reconcile(asleep={f"agent-{n}" * 10: n for n in range(20_000)})
    end.link.tell(big)
    descriptor = marked_pipe(b"x")
    end.link.tell(Listener(agent="a", path="/"), [descriptor])
    os.close(descriptor)
    assert open_descriptors() == before + 1
    other.close()
    await end.lost.wait()
    assert open_descriptors() == before - 2


async def test_a_message_that_announces_descriptors_it_does_not_bring_ends_the_link(ends: tuple[End, End]) -> None:
    """Else the next message's descriptor would be taken for this one's: one agent's socket for another's."""
    sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end = End(sock, "end")
    other.sendall(pack(Envelope(0, 0, 1, Listener(agent="a", path="/"))))
    await end.lost.wait()
    assert end.got == []
    other.close()


async def test_more_descriptors_than_fit_end_the_link() -> None:
    """The kernel cuts them off and says so; their messages are not known any more."""
    sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end = End(sock, "end")
    before = open_descriptors()
    null = os.open("/dev/null", os.O_RDONLY)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 200))]
    other.sendmsg([pack(Envelope(0, 0, 200, Listener(agent="a", path="/")))], rights)
    os.close(null)
    await end.lost.wait()
    assert end.got == []
    assert open_descriptors() == before - 1
    other.close()


@given(cut=st.integers(0, 80))
def test_a_descriptor_belongs_to_its_message_wherever_the_frame_is_cut(cut: int) -> None:
    """The kernel delivers it with the first byte; the message is complete only later."""

    async def run() -> None:
        sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        end = End(sock, "end")
        frames = [pack(Envelope(0, 0, 1, Listener(agent=name, path="/"))) for name in ("one", "two")]
        for name, frame in zip((b"one", b"two"), frames, strict=True):
            descriptor = marked_pipe(name)
            first = max(1, min(cut, len(frame)))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            other.sendmsg([frame[:first]], rights)
            await asyncio.sleep(0)
            other.sendall(frame[first:])
            os.close(descriptor)
        await until(lambda: len(end.got) == 2)
        assert [os.read(descriptor, 10) for descriptor in end.descriptors] == [b"one", b"two"]
        for descriptor in end.descriptors:
            os.close(descriptor)
        other.close()
        await end.lost.wait()

    asyncio.run(run())


# --- server and client -------------------------------------------------------------------------------------------


class Served:
    """A server that answers everything with Done."""

    def __init__(self, path: Path) -> None:
        self.lost = 0
        uids = frozenset({os.getuid()})  # the tests run as root and as a user
        self.server = LinkServer(
            path, name="s", uids=uids, on_link=lambda _: None, on_message=self._answer, on_lost=self._on_lost
        )

    @staticmethod
    def _answer(link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if reply is not None:
            reply(Done())

    def _on_lost(self, link: Link) -> None:
        self.lost += 1


async def test_a_private_socket_can_be_used_by_its_owner_only(tmp_path: Path) -> None:
    sock = bind_private(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["s"]
    sock.close()


async def test_binding_again_takes_the_name_over_without_a_moment_without_socket(tmp_path: Path) -> None:
    old = bind_private(tmp_path / "s")
    new = bind_private(tmp_path / "s")
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(tmp_path / "s"))
    accepted, _ = new.accept()
    assert peer_of(accepted) == (os.getpid(), os.getuid(), os.getgid())
    with pytest.raises(BlockingIOError):
        old.accept()
    for sock in (old, new, caller, accepted):
        sock.close()


async def test_a_name_that_is_too_long_leaves_nothing_behind(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="too long"):
        bind_private(tmp_path / ("x" * 120))
    assert os.listdir(tmp_path) == []
    assert open_descriptors() == before


async def test_a_client_finds_a_server_that_comes_later_and_comes_again(tmp_path: Path) -> None:
    linked: list[Link] = []
    lost: list[Link] = []
    client = LinkClient(
        tmp_path / "s", name="c", on_link=linked.append, on_message=lambda *_: None, on_lost=lost.append
    )
    await asyncio.sleep(0)
    with pytest.raises(LinkLost):
        _ = client.link
    for times in (1, 2):
        served = Served(tmp_path / "s")
        async with asyncio.timeout(60):
            while len(linked) < times:
                await asyncio.sleep(0.005)
        assert await client.link.ask(AskStat(), Done, timeout_s=5) == Done()
        served.server.close()
        await until(lambda times=times: len(lost) == times)  # type: ignore[misc]
        assert not client.connected
    assert not (tmp_path / "s").exists()
    client.close()


async def test_a_leaving_server_does_not_unlink_the_socket_of_the_next_one(tmp_path: Path) -> None:
    old, new = Served(tmp_path / "s"), Served(tmp_path / "s")
    old.server.close()
    assert (tmp_path / "s").exists()
    new.server.close()
    assert not (tmp_path / "s").exists()


async def test_a_lost_link_is_forgotten_by_the_server(tmp_path: Path) -> None:
    served = Served(tmp_path / "s")
    client = LinkClient(tmp_path / "s", name="c", on_link=lambda _: None, on_message=lambda *_: None)
    await until(lambda: served.server.links)
    client.close()
    await until(lambda: served.lost == 1)
    assert served.server.links == set()
    served.server.close()


# --- tasks -------------------------------------------------------------------------------------------------------


async def test_a_task_nobody_keeps_runs_to_its_end() -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)
        done.append(1)

    spawn(work(), name="work")
    await until(lambda: done)


async def test_a_task_that_fails_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("a bug")

    task = spawn(work(), name="wake a1")
    await asyncio.wait([task])
    await until(lambda: caplog.records)
    assert "task_failed task=wake a1" in caplog.text
    assert "a bug" in caplog.text


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_peer_that_dies_with_bytes_on_both_sides_is_heard_out_and_missed(run: Callable[[Any], None]) -> None:
    """Killed with ours unread and last words of its own: uvloop calls a reader once and never again then."""

    async def scene() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        heard: list[LinkMessage] = []
        lost = asyncio.Event()
        link = Link(
            ours,
            name="x",
            on_message=lambda _link, message, _reply: heard.append(message),
            on_lost=lambda _: lost.set(),
        )
        await asyncio.sleep(0)
        link.tell(Quiet(agent="unread"))
        theirs.send(pack(Envelope(0, 0, 0, Quiet(agent="last words"))))
        theirs.close()
        await asyncio.wait_for(lost.wait(), 5)
        assert heard == [Quiet(agent="last words")]

    run(scene())
