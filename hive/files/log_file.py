"""The lines of `hive up`, kept: one bounded file in the state directory, every line with its time and component."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

NAME = "up.log"
MAX_BYTES = 4 * 1024 * 1024
"""Then the file becomes `up.log.1`, in place of the one before: some 60,000 lines are kept."""


class LogLine(NamedTuple):
    """`at`: Unix time. `name`: which process said it."""

    at: float
    name: str
    text: str


class LogFile:
    """Appends. A disk that is full or gone costs the line, never more: the agents need their Hive all the same."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._open()

    def __repr__(self) -> str:
        return f"<LogFile {self._path} {self._size} bytes>"

    def write(self, name: str, text: str, *, at: float) -> None:
        """One line; line breaks in it become spaces."""
        data = written(LogLine(at, name, text))
        if self._size + len(data) > self._max_bytes:
            self._turn()
        with contextlib.suppress(OSError):
            self._size += os.write(self._fd, data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _turn(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            os.replace(self._path, previous(self._path))
        self._size = 0
        self._open()


def previous(path: Path) -> Path:
    """The path of the lines before those in `path`."""
    return path.with_name(f"{path.name}.1")


def written(line: LogLine) -> bytes:
    r"""
    >>> written(LogLine(0.5, "proxy", "proxy_lost\nx"))
    b'1970-01-01T00:00:00.500+00:00 proxy proxy_lost x\n'
    """
    moment = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds")
    text = " ".join(line.text.split("\n"))
    return f"{moment} {line.name} {text}\n".encode(errors="backslashreplace")


def parsed(raw: bytes) -> LogLine | None:
    """One line of the file; None where it is none, or only the end of one.

    >>> parsed(written(LogLine(0.5, "proxy", "proxy_lost")))
    LogLine(at=0.5, name='proxy', text='proxy_lost')
    """
    moment, _, rest = raw.decode(errors="backslashreplace").rstrip("\n").partition(" ")
    name, found, text = rest.partition(" ")
    try:
        return LogLine(datetime.fromisoformat(moment).timestamp(), name, text) if found else None
    except ValueError:
        return None
