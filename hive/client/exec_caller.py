"""The caller's side of a program inside an agent, blocking: one thread reads, another one may send."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from hive.http_answer import HEAD_MAX_BYTES, AnswerTooLarge, HungUp
from hive.shapes.exec_frames import PIECE_BYTES, PROTOCOL, SIZE, TAKEN, WINDOW_BYTES, FrameKind, FrameReader, pack


def begin(sock: socket.socket, target: str) -> tuple[int, bytes, bytes]:
    """Asks for it; the status of the answer, its body (of an error), and what came behind the head. Raises OSError."""
    fields = f"Host: hive\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\nContent-Length: 0\r\n"
    sock.sendall(f"POST {target} HTTP/1.1\r\n{fields}\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _some(sock)
        if len(answer) > HEAD_MAX_BYTES:
            raise AnswerTooLarge(HEAD_MAX_BYTES)
    head, _, rest = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
    status = int(lines[0].split()[1])
    while status >= 200 and len(rest) < length:
        rest += _some(sock)
    return status, rest[:length], rest[length:]


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(PIECE_BYTES)
    if not data:
        raise HungUp("the connection ended before the answer did")
    return data


class ExecCaller:
    """One program. `pieces` until it has ended; `send`, `end_input`, `resize` from any thread.

    `translated`: around what a socket may raise.
    """

    def __init__(
        self, sock: socket.socket, rest: bytes, translated: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._rest = rest
        self._translated = translated
        self._sending = threading.Lock()
        self._room = threading.Condition()
        self._left = WINDOW_BYTES
        self._is_over = False

    def __enter__(self) -> ExecCaller:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it; one that runs still is killed."""
        self._over()
        self._sock.close()

    def pieces(self) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
        """Pieces of its `stdout` and `stderr` as they come; last `end` with what it says.

        Raises DependencyDown where Hive is gone before that.
        """
        with self._translated():
            data = self._rest
            while True:
                for kind, payload in self._reader.feed(data):
                    if kind is FrameKind.TAKEN:
                        self._taken(TAKEN.unpack(payload)[0])
                    elif kind is FrameKind.END:
                        self._over()
                        yield "end", json.loads(payload)
                        return
                    else:
                        yield "stdout" if kind is FrameKind.OUTPUT else "stderr", payload
                data = _some(self._sock)

    def send(self, data: bytes) -> bool:
        """A piece of its stdin; waits until there is room for it. Whether it wants more."""
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            with self._room:
                self._room.wait_for(lambda piece=piece: self._is_over or self._left >= len(piece))  # type: ignore[misc]
                self._left -= len(piece)
            if not self._put(FrameKind.INPUT, piece):
                return False
        return True

    def end_input(self) -> None:
        """Nothing more comes."""
        self._put(FrameKind.INPUT, b"")

    def resize(self, rows: int, columns: int) -> None:
        """Sets the size of its terminal."""
        self._put(FrameKind.SIZE, SIZE.pack(min(rows, 0xFFFF), min(columns, 0xFFFF)))

    def _put(self, kind: FrameKind, payload: bytes) -> bool:
        if self._is_over:
            return False
        try:
            with self._sending:
                self._sock.sendall(pack(kind, payload))
        except OSError:
            return False  # the reader learns why
        return True

    def _taken(self, count: int) -> None:
        with self._room:
            self._left += count
            self._room.notify_all()

    def _over(self) -> None:
        with self._room:
            self._is_over = True
            self._room.notify_all()
