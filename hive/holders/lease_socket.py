"""`lease.sock`: the place where the process that was granted a lease comes in, itself.

No number in any message says which process that is. The kernel tells who connected (SO_PEERCRED); a pidfd of it is
opened; then it has to say back what it was told after that, and the kernel tells who said so (SCM_CREDENTIALS). So the
process that holds the socket now is the one that the pidfd is of, however often pids were given anew meanwhile.

No descriptor is taken. One that a caller passes all the same is closed by whoever reads or closes the connection, and
that may wait as long as the caller likes (SO_LINGER): Linux from 6.16 on refuses to pass it, and for an older one both
are done in a thread of that caller alone, never on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from hive.errors import HiveError, NotPermitted, TimedOut
from hive.holders.own_thread import OwnThread
from hive.host.process import Identity, identify
from hive.link.server import bind_private, peer_of
from hive.tasks import spawn

HANDSHAKE_S = 10.0
LINE_MAX_BYTES = 1024
CALLERS_MAX, CALLERS_OF_USER = 256, 16
"""Callers that are being let in, at a time: each has some seconds to say its nonce, and no user keeps others out."""
TURNED_AWAY_MAX, REST_S = 1000, 1.0
"""Connections that wait to be closed, until nobody is accepted for a moment."""
OTHER_NAMESPACE = "other_namespace"
_CREDENTIALS = struct.calcsize("3i")


class LeaseCaller(NamedTuple):
    """The process at the other end."""

    main: Identity
    uid: int
    nonce: str


class Admitted(NamedTuple):
    """Answer to a caller that was let in."""

    id: str
    enforced: str
    held_by: str
    environment: dict[str, str]


class OtherNamespace(NotPermitted):
    """This process is in another pid namespace than Hive."""

    code = OTHER_NAMESPACE
    hint = "a container cannot be held by its process: hive lease take, renew and release"


Admit = Callable[[LeaseCaller], Awaitable[Admitted]]
"""Raises HiveError: not let in."""


class LeaseSocket:
    """Listens at `path` for this user and for the members of `group`."""

    def __init__(self, path: Path, *, group: int | None, admit: Admit) -> None:
        """Raises OSError."""
        self.path = path
        self._admit = admit
        self._callers: Counter[int] = Counter()
        self._loop = asyncio.get_running_loop()
        self._sock = bind_private(path, group=group, takes_files=False)
        self._turned_away = OwnThread("lease callers turned away")
        self._inode = os.stat(path).st_ino
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def __repr__(self) -> str:
        return f"<LeaseSocket {self.path} {self._callers.total()} callers>"

    def close(self) -> None:
        """Stops listening, and removes the socket's file if it is still this one's."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._turned_away.end()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            _, uid, _ = peer_of(sock)
            if self._callers[uid] >= CALLERS_OF_USER or self._callers.total() >= CALLERS_MAX:
                self._turned_away.do(sock.close)
                if self._turned_away.behind >= TURNED_AWAY_MAX:
                    self._rest()
                    return
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._callers[uid] += 1
            spawn(self._serve(sock, uid), name="lease caller")

    def _rest(self) -> None:
        """Accepts nobody for a moment: an older kernel waits with the close of those that were turned away."""
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        self._loop.call_later(REST_S, self._listen)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _serve(self, sock: socket.socket, uid: int) -> None:
        call = _Call(sock)
        try:
            answer = await self._answer(call)
            with contextlib.suppress(OSError):  # it has left
                sock.send(json.dumps(answer).encode() + b"\n")
        finally:
            await call.close()
            self._callers[uid] -= 1

    async def _answer(self, call: _Call) -> dict[str, Any]:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                caller = await call.caller()
        except TimeoutError:
            return _refused(TimedOut("the nonce did not come in time"))
        except HiveError as error:
            return _refused(error)
        try:
            admitted = await self._admit(caller)
        except HiveError as error:
            return _refused(error)
        return {
            "ok": True,
            "id": admitted.id,
            "enforced": admitted.enforced,
            "held_by": admitted.held_by,
            "environment": admitted.environment,
        }


def _refused(error: HiveError) -> dict[str, Any]:
    return {"ok": False, "code": error.code, "message": error.message, "hint": error.hint}


class _Call:
    """One connection until its answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pidfd = -1
        self._thread = OwnThread("lease caller")

    async def close(self) -> None:
        """Returns once it is closed: until then it counts for its caller."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        closed = self._thread.do(self._sock.close)  # after what that thread does still
        self._thread.end()
        with contextlib.suppress(OSError):
            await closed

    async def caller(self) -> LeaseCaller:
        """The process at the other end, known for certain. Raises HiveError."""
        pid, uid, _ = peer_of(self._sock)
        if pid == 0:
            raise OtherNamespace
        main = self._opened(pid)
        challenge = secrets.token_hex(16)
        try:
            self._sock.send(json.dumps({"challenge": challenge}).encode() + b"\n")
            said, senders = await self._line()
        except OSError:
            raise NotPermitted("the caller hung up") from None
        if senders != {pid} or select.select([self._pidfd], [], [], 0)[0]:
            raise NotPermitted("another process holds this connection than the one that made it")
        try:
            found = json.loads(said)
            nonce, echoed = str(found["nonce"]), str(found["challenge"])
        except (ValueError, KeyError, TypeError):
            raise NotPermitted("this is no line with a nonce and the challenge") from None
        if not secrets.compare_digest(echoed.encode(), challenge.encode()):
            raise NotPermitted("the challenge was another one")
        return LeaseCaller(main, uid, nonce)

    def _opened(self, pid: int) -> Identity:
        """Its identity, with a pidfd: the process that had this number when it connected may have ended since."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            raise NotPermitted("the process that connected has ended") from None
        main = identify(pid)
        if main is None or select.select([self._pidfd], [], [], 0)[0]:
            raise NotPermitted("the process that connected has ended")
        if is_in_other_namespace(pid):
            raise OtherNamespace
        return main

    async def _line(self) -> tuple[bytes, set[int]]:
        """The first line, and the pid of whoever wrote it. Raises NotPermitted, OSError."""
        data, senders = b"", set[int]()
        while b"\n" not in data:
            await self._readable()
            piece, ancillary = await self._thread.do(self._received)
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    senders.add(struct.unpack_from("3i", content)[0])
            data += piece
            if not piece or len(data) > LINE_MAX_BYTES:
                raise NotPermitted("no line came")
        return data.partition(b"\n")[0], senders

    def _received(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        """Receives without room for a descriptor, so that the kernel closes one."""
        piece, ancillary, _, _ = self._sock.recvmsg(LINE_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS))
        return piece, ancillary

    async def _readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._sock.fileno())


def is_in_other_namespace(pid: int) -> bool:
    """Whether this process numbers processes otherwise than this one does; False where that may not be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False
