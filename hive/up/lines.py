"""The output of children, as prefixed lines of bounded length; and a terminal that never holds the supervisor up."""

from __future__ import annotations

import os
import re
import select
import zlib

from hive.terminal_text import counted

LINE_MAX = 2000
"""Characters of one line that are shown; a backend's stack trace in JSON can have a megabyte."""
NAME_WIDTH = 8
WRITE_MAX = 4096
"""Bytes a pipe that polls writable takes without blocking (PIPE_BUF, pipe(7))."""

COLOURS = {"up": 37, "proxy": 36, "daemon": 32, "sandbox": 33, "redis": 35, "backend": 34, "demo": 96}
"""ANSI colour of each process that `hive up` runs; any other name gets one of these by its own letters."""


def colour_of(name: str) -> int:
    """The ANSI colour number of `name`, the same in every run.

    >>> colour_of("proxy"), colour_of("other") == colour_of("other")
    (36, True)
    """
    known = list(COLOURS.values())
    return COLOURS.get(name) or known[zlib.crc32(name.encode()) % len(known)]


def prefixed(name: str, text: str, *, coloured: bool) -> str:
    r"""One line as it is shown: its component, then its text, cut to LINE_MAX, control characters made harmless.

    >>> prefixed("proxy", "hello\x1b[2J", coloured=False)
    'proxy    | hello\\x1b[2J'
    """
    if len(text) > LINE_MAX:
        text = f"{text[:LINE_MAX]} … {len(text) - LINE_MAX} more"
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)
    head = f"{name:<{NAME_WIDTH}} |"
    return f"\x1b[{colour_of(name)}m{head}\x1b[0m {text}" if coloured else f"{head} {text}"


_REDIS_LINE = re.compile(r"[0-9]+:[A-Za-z-]+ (?:\([0-9]+\)|[0-9]+ \w+ [0-9]+ [0-9:.]+ [#*.-]) (.*)")
REDIS_NOISE = (
    "oO0OoO0OoO0Oo",
    "Redis version=",
    "Configuration loaded",
    "Server initialized",
    "WARNING Memory overcommit",  # of a background save, and ours saves nothing
    "Received SIGTERM",
    "User requested shutdown",
    "Redis is now ready to exit",
)
"""Lines of every Redis at `--loglevel warning` although nothing is wrong (7.0)."""


def worth_telling(name: str, text: str) -> str | None:
    """The part of a child's line to show; None for a line that tells nothing.

    >>> worth_telling("redis", "7:M 20 Nov 2026 08:51:39.622 # Server initialized")
    >>> worth_telling("redis", "7:M 20 Nov 2026 08:51:39.622 # Fatal error, can't open config file")
    "Fatal error, can't open config file"
    """
    if name != "redis" or (found := _REDIS_LINE.fullmatch(text)) is None:
        return text
    return None if found[1].startswith(REDIS_NOISE) else found[1]


_KEPT_ONLY = re.compile(r"\b(?:audit_head|deep_reader_ended) ")


def is_routine(text: str) -> bool:
    """Whether a line is for the log file only: it tells of work that goes on all the time and asks for nothing.

    >>> is_routine("audit_head head=3:9f"), is_routine("audit_heads_unreadable path=x")
    (True, False)
    """
    return _KEPT_ONLY.search(text) is not None


class TerminalWriter:
    """Text out to a descriptor that may stand still (Ctrl-S, a stopped `less`): then lines are dropped and counted.

    The supervisor is one thread: were it to wait here, no child's output would be read, and soon the proxy would
    stand in a `write` too. Has what `rich.console.Console(file=…)` asks of a file.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = ""
        self._dropped = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def __repr__(self) -> str:
        return f"<TerminalWriter {self._descriptor} {self._dropped} dropped>"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        self._pending += text
        return len(text)

    def flush(self) -> None:
        """Writes what is pending, or drops it where the other side takes nothing now."""
        data, self._pending = self._pending.encode(errors="backslashreplace"), ""
        if self._dropped and self._is_writable():
            self._put(f"… {counted(self._dropped, 'line')} dropped: nobody read this output\n".encode())
            self._dropped = 0
        while data:
            if not self._is_writable():
                self._dropped += max(1, data.count(b"\n"))
                return
            data = data[self._put(data[:WRITE_MAX]) :]

    def line(self, text: str) -> None:
        """One whole line."""
        self.write(text + "\n")
        self.flush()

    def _is_writable(self) -> bool:
        return any(event & select.POLLOUT for _, event in self._poll.poll(0))

    def _put(self, data: bytes) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            # The terminal is gone: nothing can be shown, and the agents need their Hive all the same.
            return len(data)
