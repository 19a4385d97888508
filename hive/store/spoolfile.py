"""The file a proxy writes its usage events to before they go anywhere else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections import deque
from pathlib import Path

import msgspec

log = logging.getLogger("hive.usage")

MAX_LINE = 64 * 1024
"""Bytes of the longest line."""
READ_BYTES = 4 * MAX_LINE
TRIM_BYTES = 1024 * 1024
"""A committed beginning of this size is cut off where the rest is smaller; a file all committed is emptied at a
sixteenth of it."""
RESERVED_BYTES = 256 * 1024
"""Of the disk for lines that are yet to come, 1,000 events: a disk that others fill takes them, while SQLite, whose own
file is on the same disk, takes nothing any more."""
_KEEP_SIZE = 1
"""`FALLOC_FL_KEEP_SIZE` of fallocate(2)."""
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


_libc = ctypes.CDLL(None)


class SpoolFile:
    """One epoch's events, a JSON line each, in the order of their numbers. Nothing here raises OSError.

    Lines the disk does not take are kept and tried again by `retry`; until then nothing else is written, so that
    the order holds. A reading cursor follows the end while memory has everything.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0
        """Highest number in the file."""
        self._fd = -1
        self._size = 0
        self._reserved = 0
        """Up to where the disk has given its blocks, or was asked in vain."""
        self._read_at = 0
        self._torn = False
        self._unwritten: deque[tuple[int, bytes]] = deque()
        self._ends: deque[tuple[int, int]] = deque()
        """(number, file offset after its line) every MAX_LINE bytes: where the committed beginning can be cut."""

    def __repr__(self) -> str:
        return f"<SpoolFile {self.path.name} {self._size} B, {len(self._unwritten)} unwritten>"

    @property
    def full(self) -> bool:
        """The disk does not take what should be written."""
        return bool(self._unwritten)

    def append(self, no: int, lines: bytes, *, in_memory: bool) -> bool:
        """Writes lines (each with its newline), the last of which is number `no`, in one piece; False where the disk
        refuses, though it may have taken the first of them. `in_memory`: all are kept to try again then."""
        at_end = self._read_at == self._size
        if not self._unwritten and self._write(no, lines):
            if in_memory and at_end:
                self._read_at = self._size
            return True
        if in_memory:
            self._unwritten.append((no, lines))
        return False

    def retry(self, mark: int) -> None:
        """Writes what the disk did not take before and the daemon has not committed meanwhile."""
        while self._unwritten:
            no, lines = self._unwritten[0]
            if no > mark and not self._write(no, lines):
                return
            self._unwritten.popleft()
            if not self._unwritten:
                log.warning("usage_spool_caught_up path=%s", self.path)

    def _write(self, no: int, lines: bytes) -> bool:
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, _FLAGS | os.O_CREAT, 0o600)
            wanted = b"\n" + lines if self._torn else lines
            written = os.write(self._fd, wanted)
            self._size += written
            self._reserve()
            # A full disk takes the beginning of a line: readers skip it, the next line starts afresh.
            self._torn = written < len(wanted)
            if self._torn:
                raise OSError(errno.ENOSPC, "it took only the beginning of a line")
        except OSError as error:
            if not self._unwritten:
                log.error("usage_spool_refuses path=%s error=%s", self.path, error.strerror)
            return False
        self.last = no
        if self._size - (self._ends[-1][1] if self._ends else 0) >= MAX_LINE:
            self._ends.append((no, self._size))
        return True

    def _reserve(self) -> None:
        """Blocks behind the end, the length stays. A disk that has none, or no such call, is asked again later."""
        if self._size + RESERVED_BYTES // 2 > self._reserved:
            self._reserved = self._size + RESERVED_BYTES
            offset, length = ctypes.c_int64(self._size), ctypes.c_int64(RESERVED_BYTES)
            _libc.fallocate(self._fd, _KEEP_SIZE, offset, length)

    @classmethod
    def found(cls, path: Path) -> SpoolFile:
        """The spool a killed proxy left, to be read from its beginning. Raises OSError."""
        spool = cls(path)
        spool._fd = os.open(path, _FLAGS)
        spool._size = os.fstat(spool._fd).st_size
        # No line is longer than MAX_LINE, so the last whole one is in the last piece; where it is not, look at all.
        for start in (max(0, spool._size - READ_BYTES), 0):
            spool._read_at = start
            while not spool.last and spool._read_at < spool._size:
                spool.last = max((no for no, _ in spool.read()), default=0)
        spool._read_at = 0
        spool.close(delete=False)  # many may be waiting for their turn; `read` opens it again
        return spool

    def read(self) -> list[tuple[int, bytes]]:
        """The next lines as (number, line without newline); none at the end. What is no event is skipped.

        Where the disk cannot be read the rest is given up: the cursor goes to the end.
        """
        if self.at_end:
            return []
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, _FLAGS)
            data = os.pread(self._fd, READ_BYTES, self._read_at)
        except OSError as error:
            log.error("usage_spool_unreadable path=%s error=%s", self.path, error.strerror)
            self._read_at = self._size
            return []
        if not data:  # somebody else shortened the file
            self._read_at = self._size
        at_end = self._read_at + len(data) >= self._size
        whole = data.rfind(b"\n") + 1
        # A last line without its end was cut off by a full disk, or by the end of its proxy. One that lacks no more
        # than its newline counts; of any other the answer was held back until something else had the event.
        if at_end and _number(data[whole:]):
            whole = len(data)
        self._read_at += whole or len(data)
        return [(no, line) for line in data[:whole].splitlines() if (no := _number(line))]

    @property
    def at_end(self) -> bool:
        return self._read_at >= self._size

    def trim(self, mark: int) -> None:
        """Gives committed bytes back to the disk."""
        cut = 0
        while self._ends and self._ends[0][0] <= mark:
            cut = self._ends.popleft()[1]
        if mark >= self.last and not self._unwritten:
            if self._size >= TRIM_BYTES // 16:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
                    self._shift(self._size)
                    self._reserve()
        elif cut >= TRIM_BYTES and self._size - cut <= TRIM_BYTES:
            self._rewrite(cut)
        elif cut:
            # Not worth it yet: the next call finds the same place, or a later one.
            self._ends.appendleft((mark, cut))

    def _shift(self, cut: int) -> None:
        """The first `cut` bytes are gone."""
        self._size -= cut
        self._reserved = 0
        self._read_at = max(0, self._read_at - cut)
        self._ends = deque((no, end - cut) for no, end in self._ends if end > cut)

    def _rewrite(self, cut: int) -> None:
        """Replaces the file by its part after `cut`, in one step as a reader after a crash sees it."""
        shorter = self.path.with_suffix(".tmp")
        try:
            rest = os.pread(self._fd, self._size - cut, cut)
            fd = os.open(shorter, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, rest) < self._size - cut:
                    raise OSError("the disk is full")
                shorter.rename(self.path)
            except OSError:
                os.close(fd)
                shorter.unlink()
                raise
        except OSError as error:
            log.warning("usage_spool_not_trimmed path=%s error=%s", self.path, error)
            return
        os.close(self._fd)
        self._fd = fd
        self._shift(cut)
        self._reserve()

    def close(self, *, delete: bool) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if delete:
            with contextlib.suppress(OSError):
                self.path.unlink()


class _Line(msgspec.Struct):
    event_no: int


_decode_number = msgspec.json.Decoder(_Line).decode


def _number(line: bytes) -> int:
    """The event's number; 0 where the line holds no event."""
    try:
        return max(0, _decode_number(line).event_no)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
