"""A probe of Redis as a stranger: commands by hand over its socket, each with its one-line answer.

A client logs in and tries again; a question about a *bare* connection must send nothing of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hiredis

LINE_MAX = 65536


def ask(path: Path, *commands: Sequence[str], within_s: float = 1.0) -> list[str]:
    """The first line of each answer, its type's sign included: `+PONG`, `-NOPERM …`, `$-1`, `:0`.

    Only for commands with an answer of one line (a bulk string's content is not read: send those last). Raises OSError,
    TimeoutError among them; ConnectionError where it hangs up before it has answered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        sock.connect(str(path))
        answers = []
        received = b""
        for command in commands:
            words: tuple[Any, ...] = tuple(command)
            sock.sendall(hiredis.pack_command(words))
            while b"\r\n" not in received:
                piece = sock.recv(4096)
                if not piece or len(received) > LINE_MAX:
                    raise ConnectionError("it hung up")
                received += piece
            line, received = received.split(b"\r\n", 1)
            answers.append(line.decode(errors="replace"))
    return answers
