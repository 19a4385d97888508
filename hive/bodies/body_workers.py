"""Large bodies are read in two worker processes, so that no other request waits for it.

Decoding holds the GIL, so a thread does not help (22 ms of decoding were 22 ms of loop lag). A body goes to a worker
in the pieces it came in and comes back in pieces; neither is ever joined here, and no call copies more than what a
socket buffer holds. In the middle of a body the worker tells which model it names, and is told what its server wants
of it. Callbacks, no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from hive.bodies.body import Asked, BodyChoice, NamedBody, Opening
from hive.bodies.body_worker import BUFFER_BYTES, CHOICE, HEAD, READY, REPLY, BodyResult
from hive.errors import BadRequest, HiveError, Saturated, by_code
from hive.host.process import spawn
from hive.settings.field_rules import FieldRules

log = logging.getLogger("hive.deep")
WORKERS = 2
HANG_S = 10.0
"""A reading takes 0.2 s for the largest ordinary body, some seconds for the worst; a worker that takes so long is
killed."""
WAIT_S = 10.0
"""Longest wait for a worker, then 503."""
RESTART_S, RESTART_MAX_S = 0.05, 5.0
"""Wait before a worker is started again; doubled each time one ends without having read anything."""
ATTEMPTS = 2
"""Workers that one body may cost."""
READ_BYTES = 256 * 1024
"""Taken from a worker at once: 40 µs."""
SENT_AT_ONCE = 256
"""Pieces given to one sendmsg(2), which takes as much of them as the buffer holds."""
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LANG")
_OWN_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(1024 * 1024)}
"""glibc gives large blocks back at once then; else a worker keeps 140 MB after its first large body."""

Choose = Callable[[NamedBody], BodyChoice | None]
Done = Callable[[Asked | HiveError], None]


class BodyReading:
    """One large body on its way through a worker. `choose`: what its server wants of it, by its model; called on the
    loop, once for each worker that opens it. None gives the reading up."""

    __slots__ = ("_done", "_timer", "attempts", "choose", "is_over", "owner", "parts")

    def __init__(self, parts: list[bytes], choose: Choose, done: Done, owner: object) -> None:
        self.parts = parts
        self.choose = choose
        self.owner = owner
        self.attempts = 0
        self.is_over = False
        self._done: Done | None = done
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BodyReading {sum(map(len, self.parts))} bytes, {self.attempts} attempts{', over' * self.is_over}>"

    def cancel(self) -> None:
        """Gives the reading up: `done` is not called."""
        self.is_over = True
        self._done = None
        self.parts = []
        self.stop_waiting()

    def wait(self, longest_s: float) -> None:
        """Waits for a worker, not for ever."""
        self._timer = asyncio.get_running_loop().call_later(longest_s, self._give_up)

    def _give_up(self) -> None:
        self.end(Saturated("no reader of large bodies was free in time", retry_after_s=2))

    def stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self, result: Asked | HiveError) -> None:
        """Tells the result, once."""
        done = self._done
        if done is not None:
            self.cancel()
            done(result)


class DeepReaders:
    """Two workers and the readings that wait for them, in the order they came."""

    def __init__(self, *, hang_s: float = HANG_S, wait_s: float = WAIT_S) -> None:
        self._hang_s = hang_s
        self._wait_s = wait_s
        self._waiting: deque[BodyReading] = deque()
        self._workers: list[_Worker] = []

    def __repr__(self) -> str:
        ready = sum(worker.is_free for worker in self._workers)
        return f"<DeepReaders {ready}/{len(self._workers)} free, {len(self.waiting)} waiting>"

    @property
    def waiting(self) -> list[BodyReading]:
        """The readings that wait for a worker."""
        return [reading for reading in self._waiting if not reading.is_over]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid]

    def start(self) -> None:
        """Starts the workers (5 ms each); within a running loop."""
        self._workers = [_Worker(self._feed, self._give_back, self._hang_s) for _ in range(WORKERS)]
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """Ends the workers; what was being read is refused."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        while self._waiting:
            self._waiting.popleft().end(Saturated("Hive is shutting down", retry_after_s=2))

    def read(
        self,
        pieces: list[bytes],
        rules: FieldRules,
        opening: Opening,
        choose: Choose,
        done: Done,
        *,
        owner: object = None,
    ) -> BodyReading:
        """Reads one body as `body.open_body` and `body.complete` do. Later `choose` is called with its model, then
        `done` with what it asks or why it is refused; not `done` where the choice was None.

        Of one `owner` only one body is read at a time, so that no owner can hold all workers. 503 if no worker is free
        in time, 400 if a body has ended two of them.
        """
        ruled, wanted = msgspec.msgpack.encode(rules), msgspec.msgpack.encode(opening)
        head = HEAD.pack(len(ruled), len(wanted), sum(map(len, pieces)))
        reading = BodyReading([head, ruled, wanted, *pieces], choose, done, owner)
        reading.wait(self._wait_s)
        self._waiting.append(reading)
        self._feed()
        return reading

    def _feed(self) -> None:
        """Gives waiting readings to free workers."""
        busy = {worker.owner for worker in self._workers} - {None}
        for reading in list(self._waiting):
            worker = next((worker for worker in self._workers if worker.is_free), None)
            if worker is None:
                return
            if reading.is_over or reading.owner not in busy:
                self._waiting.remove(reading)
                if not reading.is_over:
                    busy.add(reading.owner)
                    busy.discard(None)
                    worker.take(reading)

    def _give_back(self, reading: BodyReading) -> None:
        """A worker ended over this body: another one gets it, first of all, unless it was not the first time."""
        reading.attempts += 1
        if reading.attempts < ATTEMPTS:
            reading.wait(self._wait_s)
            self._waiting.appendleft(reading)
        else:
            reading.end(BadRequest("this body could not be read"))


class _Worker:
    """One process and the socket to it. `free` is called when it can take a reading, `give_back` with one it lost."""

    def __init__(self, free: Callable[[], None], give_back: Callable[[BodyReading], None], hang_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = free
        self._give_back = give_back
        self._hang_s = hang_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unreaped: dict[int, subprocess.Popen[bytes]] = {}
        self._sock: socket.socket | None = None
        self._is_ready = False
        self._failures = 0
        self._restart: asyncio.TimerHandle | None = None
        self._hang: asyncio.TimerHandle | None = None
        self._reading: BodyReading | None = None
        self._parts: list[bytes] = []
        self._at = self._offset = 0
        self._head = bytearray()
        self._is_chosen = False
        """True once the worker has the choice of the server."""
        self._answer: BodyResult | None = None
        self._pieces: list[bytes] = []
        self._missing = 0

    def __repr__(self) -> str:
        return f"<_Worker {self.pid} {'ready' if self._is_ready else 'not ready'} {self._reading or 'idle'}>"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def owner(self) -> object:
        """The owner of the body it reads, None if it has no owner or reads none."""
        return self._reading.owner if self._reading is not None else None

    @property
    def is_free(self) -> bool:
        return self._is_ready and self._reading is None

    # the process ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._restart = None
        try:
            ours, process, pidfd = _spawn()
        except (HiveError, OSError) as error:  # no process or no descriptor to be had just now
            log.error("deep_reader_not_started error=%s", error)
            self._start_again()
            return
        self._sock, self._process = ours, process
        self._unreaped[pidfd] = process
        self._loop.add_reader(pidfd, self._reap, pidfd)
        self._loop.add_reader(ours, self._on_readable)

    def _reap(self, pidfd: int) -> None:
        """The process has ended, or was killed just now."""
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        process = self._unreaped.pop(pidfd)
        log.info("deep_reader_ended pid=%d code=%d", process.pid, process.wait())

    def _start_again(self) -> None:
        delay_s = min(RESTART_S * 2**self._failures, RESTART_MAX_S)
        self._failures = min(self._failures + 1, 16)
        self._restart = self._loop.call_later(delay_s, self.start)

    def _lost(self, why: str) -> None:
        """The process is no use any more, whether it lives or not."""
        log.warning("deep_reader_lost pid=%d why=%s", self.pid, why)
        reading = self._reading
        self._end()
        self._start_again()
        if reading is not None and not reading.is_over:
            self._give_back(reading)
            self._free()

    def _end(self) -> None:
        """Closes the socket and kills the process; `_reap` sees its end."""
        self._is_ready = False
        self._forget()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        reading = self._reading
        if self._restart is not None:
            self._restart.cancel()
        self._end()
        for pidfd in list(self._unreaped):
            self._reap(pidfd)  # the loop may not run any more; each was killed, so it waits for a millisecond or two
        if reading is not None:
            reading.end(Saturated("Hive is shutting down", retry_after_s=2))

    # a reading --------------------------------------------------------------------------------------------------------

    def take(self, reading: BodyReading) -> None:
        reading.stop_waiting()
        self._reading = reading
        self._parts, self._at, self._offset = reading.parts, 0, 0
        self._hang = self._loop.call_later(self._hang_s, self._lost, "hung")
        self._on_writable()

    def _on_writable(self) -> None:
        """Sends what the buffer takes: one call for any number of pieces."""
        sock, parts = self._sock, self._parts
        assert sock is not None
        batch: list[bytes | memoryview] = [*parts[self._at : self._at + SENT_AT_ONCE]]
        if self._offset:
            batch[0] = memoryview(batch[0])[self._offset :]
        try:
            sent = sock.sendmsg(batch)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(f"send: {error.strerror}")
            return
        self._offset += sent
        while self._at < len(parts) and self._offset >= len(parts[self._at]):
            self._offset -= len(parts[self._at])
            self._at += 1
        if self._at < len(parts):
            self._loop.add_writer(sock, self._on_writable)
        else:
            self._loop.remove_writer(sock)

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"receive: {error.strerror}")
            return
        if not data:
            self._lost("ended")
        elif self._reading is None:
            self._on_ready(data)
        elif self._answer is not None:
            self._on_piece(data)
        else:
            self._head += data
            self._on_head()

    def _on_ready(self, data: bytes) -> None:
        if self._is_ready or data != READY:
            self._lost("talks unasked")
            return
        self._is_ready = True
        log.info("deep_reader_ready pid=%d", self.pid)
        self._free()

    def _on_head(self) -> None:
        head = self._head
        if len(head) < REPLY.size:
            return
        length, self._missing = REPLY.unpack_from(head)
        end = REPLY.size + length
        if len(head) < end:
            return
        try:
            answer = msgspec.msgpack.decode(bytes(head[REPLY.size : end]), type=BodyResult)
        except msgspec.MsgspecError:
            self._lost("talks nonsense")
            return
        rest = bytes(head[end:])
        if answer.named is not None:
            self._on_named(answer.named, rest)
        else:
            self._answer = answer
            self._on_piece(rest)

    def _on_named(self, named: NamedBody, rest: bytes) -> None:
        """The worker has opened the body, and waits for the choice of its server."""
        reading = self._reading
        assert reading is not None
        if rest or self._missing or self._is_chosen or self._at < len(self._parts):
            self._lost("says too much")
            return
        self._is_chosen = True
        self._head = bytearray()
        choice = None if reading.is_over else reading.choose(named)
        if self._reading is not reading:
            return  # the readers were closed over it
        chosen = b"" if choice is None else msgspec.msgpack.encode(choice)
        if choice is None:
            reading.cancel()
        self._parts, self._at, self._offset = [CHOICE.pack(len(chosen)) + chosen], 0, 0
        self._on_writable()
        if choice is None and self._reading is reading:
            self._forget()
            self._free()

    def _on_piece(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self._missing -= len(data)
        if self._missing < 0:
            self._lost("says too much")
        elif self._missing == 0:
            self._finish()

    def _finish(self) -> None:
        reading, answer, pieces = self._reading, self._answer, self._pieces
        assert reading is not None
        assert answer is not None
        self._failures = 0
        self._forget()
        self._free()
        if answer.asked is not None:
            reading.end(msgspec.structs.replace(answer.asked, upstream=pieces))
        else:
            reading.end(by_code(answer.code)(answer.message))

    def _forget(self) -> None:
        """Forgets the reading."""
        if self._hang is not None:
            self._hang.cancel()
            self._hang = None
        self._reading = None
        self._parts = []
        self._at = self._offset = 0
        self._is_chosen = False
        self._head = bytearray()
        self._answer = None
        self._pieces = []


def _spawn() -> tuple[socket.socket, subprocess.Popen[bytes], int]:
    """A worker: the socket to it, its process, a pidfd of that. Raises HiveError, OSError, and leaves nothing then."""
    with contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            process = spawn(
                [sys.executable, "-P", "-m", "hive.bodies.body_worker", str(theirs.fileno())],
                env={**{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}, **_OWN_VARIABLES},
                keep_fds=[theirs.fileno()],
                pdeathsig=signal.SIGKILL,
                no_new_privs=True,
            )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pidfd = os.pidfd_open(process.pid)
        undo.pop_all()
        return ours, process, pidfd
