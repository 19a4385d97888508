"""One live connection between two Hive processes: `tell`, `ask`, and descriptors beside messages.

Works on a plain non-blocking socket with `add_reader`/`recvmsg`, because asyncio and uvloop transports drop
ancillary data (facts: design.md §9).
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, cast

from hive.errors import HiveError, LinkLost, TimedOut, by_code
from hive.link.framing import Envelope, FrameError, Unpacker, pack
from hive.link.message import LinkMessage
from hive.link.messages import AnyMessage, Failed

Answer = TypeVar("Answer", bound=LinkMessage)


class LinkReply(Protocol):
    """Answers what was asked; the caller keeps its descriptors, and may close them at once."""

    def __call__(self, message: LinkMessage, /, descriptors: Sequence[int] = ()) -> None: ...


OnMessage = Callable[["Link", LinkMessage, LinkReply | None], None]
OnLost = Callable[["Link"], None]

MAX_UNSENT = 256 * 1024 * 1024
"""Bytes a peer may leave unread before the link is given up."""
MAX_DESCRIPTORS = 64


class Link:
    """A connected AF_UNIX stream socket, owned by this object.

    `on_message(link, message, reply)` is called on the loop for every message that is no answer; `reply` is None
    for told messages, else it must be called exactly once. `on_lost(link)` is called once, after every pending
    `ask` has failed with LinkLost. Descriptors that came with a message are in `take_descriptors()` while
    `on_message` runs.
    """

    def __init__(self, sock: socket.socket, *, name: str, on_message: OnMessage, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self.name = name
        self._on_message = on_message
        self._on_lost = on_lost
        self._unpacker = Unpacker()
        self._seq = 0
        self._waiting: dict[int, tuple[asyncio.Future[LinkMessage], list[int] | None]] = {}
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._received: deque[int] = deque()
        self._current: list[int] = []
        self.lost = False
        sock.setblocking(False)
        self._loop.add_reader(self._fd, self._readable)

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"{len(self._waiting)} waiting, {self._unsent_bytes} B unsent"
        return f"<Link {self.name} {state}>"

    def fileno(self) -> int:
        return self._fd

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not taken yet; messages told now come behind it."""
        return self._unsent_bytes

    def tell(self, message: LinkMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message that wants no answer. On a lost link it is dropped: the next table tells everything. Raises
        FrameError for one that is too large for any frame."""
        self._send(_envelope(message, descriptors=len(descriptors)), descriptors)

    async def ask(self, message: LinkMessage, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Sends a message and awaits its answer.

        Raises LinkLost, TimedOut, or the error the peer answered with.
        """
        got = await self.ask_any(message, timeout_s=timeout_s)
        if not isinstance(got, answer):
            raise HiveError(f"{self.name}: asked {type(message).__name__}, got {type(got).__name__}")
        return got

    async def ask_for_descriptor(self, message: LinkMessage, answer: type[Answer], *, timeout_s: float) -> int:
        """`ask` for an answer that carries one descriptor, which is the caller's then."""
        taken: list[int] = []
        try:
            got = await self.ask_any(message, timeout_s=timeout_s, taken=taken)
            if not isinstance(got, answer) or len(taken) != 1:
                raise HiveError(f"{self.name}: asked {type(message).__name__}, got {type(got).__name__}")
            return taken.pop()
        finally:
            _close_all(taken)

    async def ask_any(self, message: LinkMessage, *, timeout_s: float, taken: list[int] | None = None) -> LinkMessage:
        """`ask` where the answer may be of several types. `taken` gets its descriptors; without it they are closed."""
        future = self.ask_soon(message, taken)
        try:
            # Not wait_for: it returns an answer although it was cancelled (3.11), and the descriptor would have no
            # owner.
            async with asyncio.timeout(timeout_s):
                got = await future
        except TimeoutError:
            raise TimedOut(f"{self.name} did not answer {type(message).__name__} within {timeout_s:g} s") from None
        if isinstance(got, Failed):
            raise by_code(got.code)(got.message, hint=got.hint)
        return got

    def ask_soon(self, message: LinkMessage, taken: list[int] | None = None) -> asyncio.Future[LinkMessage]:
        """Sends a message; the future holds the answer, also where that is `Failed`, or raises LinkLost, or HiveError
        where the message is too large for any frame.

        `taken` has the descriptors of the answer once the future holds it.
        """
        future: asyncio.Future[LinkMessage] = self._loop.create_future()
        if self.lost:
            future.set_exception(LinkLost(f"{self.name} is not connected"))
            return future
        self._seq += 1
        seq = self._seq
        self._waiting[seq] = future, taken
        future.add_done_callback(lambda _: self._waiting.pop(seq, None))
        try:
            self._send(_envelope(message, seq=seq), ())
        except FrameError as error:
            future.set_exception(_too_large(error))
        return future

    def take_descriptors(self) -> list[int]:
        """The descriptors that came with the message being handled; the caller owns them now."""
        taken, self._current = self._current, []
        return taken

    def close(self) -> None:
        """Closes the connection; `on_lost` is called as for a lost one."""
        self._lose()

    def _send(self, envelope: Envelope, descriptors: Sequence[int]) -> None:
        if self.lost:
            return
        frame = pack(envelope)
        if not self._unsent:
            sent = self._try_send(frame, descriptors)
            if sent == len(frame) or self.lost:
                return
            frame, descriptors = frame[sent:], () if sent else descriptors
            self._loop.add_writer(self._fd, self._writable)
        # Copies: the sender may close its own before the peer reads, and the number may then be another file's.
        self._unsent.append((frame, [os.dup(descriptor) for descriptor in descriptors]))
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_UNSENT:
            self._lose()

    def _try_send(self, frame: bytes, descriptors: Sequence[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            return self._sock.sendmsg([frame], ancillary)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._lose()
            return 0

    def _writable(self) -> None:
        while self._unsent:
            frame, descriptors = self._unsent[0]
            sent = self._try_send(frame, descriptors)
            if self.lost:
                return
            self._unsent_bytes -= sent
            if sent:
                _close_all(descriptors)
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], () if sent else descriptors)
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        """Reads until nothing is left: libuv stops watching at a peer's error, so uvloop calls this once only."""
        while not self.lost and self._read_once():
            pass

    def _read_once(self) -> bool:
        """Whether more may be waiting."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                262144, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._lose()
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._received.extend(numbers)
        if not data or flags & socket.MSG_CTRUNC:  # cut off: some descriptors are missing, and not known which
            self._lose()
            return False
        try:
            envelopes = self._unpacker.feed(data)
        except FrameError:
            self._lose()
            return False
        for envelope in envelopes:
            if self.lost:
                return False
            self._dispatch(envelope)
        return True

    def _dispatch(self, envelope: Envelope) -> None:
        if envelope.descriptors > len(self._received):
            self._lose()
            return
        self._current = [self._received.popleft() for _ in range(envelope.descriptors)]
        if envelope.reply_to:
            future, taken = self._waiting.get(envelope.reply_to, (None, None))
            if future is not None and not future.done():
                if taken is not None:
                    taken += self.take_descriptors()
                future.set_result(envelope.message)
        else:
            self._handle(envelope)
        _close_all(self.take_descriptors())

    def _handle(self, envelope: Envelope) -> None:
        """A handler that fails must not cost the frames behind its own, so the loop's handler gets the exception."""
        try:
            self._on_message(self, envelope.message, self._replier(envelope.seq) if envelope.seq else None)
        except Exception as error:
            kind = type(envelope.message).__name__
            self._loop.call_exception_handler({"message": f"{self.name}: {kind} was not handled", "exception": error})

    def _replier(self, seq: int) -> LinkReply:
        def reply(message: LinkMessage, descriptors: Sequence[int] = ()) -> None:
            try:
                self._send(_envelope(message, reply_to=seq, descriptors=len(descriptors)), descriptors)
            except FrameError as error:  # the one that asked must not lose the link over it
                self._send(_envelope(failed(_too_large(error)), reply_to=seq), ())

        return reply

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        _close_all([*self._received, *self.take_descriptors(), *(fd for _, queued in self._unsent for fd in queued)])
        self._received.clear()
        self._unsent.clear()
        for future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(LinkLost(f"{self.name} is gone"))
        self._loop.call_soon(self._on_lost, self)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _envelope(message: LinkMessage, *, seq: int = 0, reply_to: int = 0, descriptors: int = 0) -> Envelope:
    return Envelope(seq, reply_to, descriptors, cast(AnyMessage, message))


def _too_large(error: FrameError) -> HiveError:
    return HiveError(f"too large for a link: {error}")


def failed(error: HiveError) -> Failed:
    """The answer that carries this error to the other side."""
    return Failed(code=error.code, message=error.message, hint=error.hint)
