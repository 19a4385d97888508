"""The output of model jobs on disk: one file a job, one JSON object a line, written as it comes.

Every function blocks. A line is whole or not there: what a full disk or a killed daemon left of one is taken off.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hive.errors import NotFound, StoreFull, TooLarge
from hive.jobs.order import JobEvent
from hive.link.jobs import JobWord

OUTPUT, ORDER = ".out", ".order"
ENDED = "ended"
READ_BYTES = 256 * 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_decode = msgspec.json.Decoder(JobEvent).decode
_encode = msgspec.json.Encoder().encode


class JobOutput:
    """The file of one job that runs here, which alone writes it. `n`: of the last event; `size`: bytes written."""

    def __init__(self, directory: Path, job: str) -> None:
        """Opens it, and takes a half line off its end. Raises StoreFull, OSError."""
        self.path = directory / f"{job}{OUTPUT}"
        with _told():
            directory.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        events = whole_events(self.path)
        self.n = events[-1].n if events else 0
        self.last = events[-1] if events else None
        self.size = _whole_bytes(self._fd)
        os.ftruncate(self._fd, self.size)

    def __repr__(self) -> str:
        return f"<JobOutput {self.path.name} {self.n} events>"

    def append(self, words: Sequence[JobWord], *, limit: int | None = None) -> list[JobEvent]:
        """Writes them, numbered. Raises StoreFull, and TooLarge where the file would have more than `limit` bytes: then
        none of them is written."""
        events = [JobEvent(self.n + number, word.at, word.event, word.data) for number, word in enumerate(words, 1)]
        data = b"".join(_encode(event) + b"\n" for event in events)
        if limit is not None and self.size + len(data) > limit:
            raise TooLarge(
                f"its output would be larger than {limit} bytes",
                hint="[jobs] output_max_mb of hive.conf says how large",
            )
        try:
            with _told():
                _write_all(self._fd, data)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.n += len(events)
        self.size += len(data)
        if events:
            self.last = events[-1]
        return events

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _whole_bytes(fd: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = os.fstat(fd).st_size
    while end:
        begin = max(0, end - READ_BYTES)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


class JobOutputReader:
    """Reads the events behind number `after`, from its place on: called again, it goes on where it was."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self._path = path
        self._after = after
        self._at = 0
        self._rest = b""
        self.last: JobEvent | None = None
        """The last one that was read, wanted or not."""

    def read(self) -> list[JobEvent]:
        """The next events that are whole, some 256 KiB of them; none where there are no more yet. Raises NotFound where
        the file is gone."""
        while data := self._more():
            *lines, self._rest = (self._rest + data).split(b"\n")
            events = [event for line in lines if (event := _event(line)) is not None]
            self.last = events[-1] if events else self.last
            if wanted := [event for event in events if event.n > self._after]:
                return wanted
        return []

    def _more(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            raise NotFound(
                "the output of this job is not kept any more", hint="[jobs] kept_mb of hive.conf says how much is"
            ) from None
        self._at += len(data)
        return data


def whole_events(path: Path) -> list[JobEvent]:
    """All events of a file; none where there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return [event for line in path.read_bytes().split(b"\n")[:-1] if (event := _event(line)) is not None]
    return []


def _event(line: bytes) -> JobEvent | None:
    """None for a line that a disk has spoilt."""
    try:
        return _decode(line)
    except msgspec.MsgspecError:
        return None


def partial_answer(events: Sequence[JobEvent]) -> str:
    """The text of the turn that had not ended.

    >>> said = [JobEvent(1, 0, "delta", {"turn": 1, "text": "a"}), JobEvent(2, 0, "turn", {"turn": 1})]
    >>> partial_answer([*said, JobEvent(3, 0, "delta", {"turn": 2, "text": "b"})])
    'b'
    """
    ended = max((event.data["turn"] for event in events if event.event == "turn"), default=0)
    return "".join(event.data["text"] for event in events if event.event == "delta" and event.data["turn"] > ended)


def remove(directory: Path, job: str) -> None:
    """Takes its files away."""
    for suffix in (OUTPUT, ORDER):
        (directory / f"{job}{suffix}").unlink(missing_ok=True)


def sizes(directory: Path) -> dict[str, int]:
    """Bytes on disk by job."""
    found: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                job = entry.name.partition(".")[0]
                found[job] = found.get(job, 0) + entry.stat().st_size
    return found


def keep_order(directory: Path, job: str, order: bytes) -> None:
    """Writes the order of a job. Raises StoreFull, OSError."""
    with _told():
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory / f"{job}{ORDER}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, order)
        finally:
            os.close(fd)


def kept_order(directory: Path, job: str) -> bytes:
    """Raises NotFound where it is not kept."""
    try:
        return (directory / f"{job}{ORDER}").read_bytes()
    except FileNotFoundError:
        raise NotFound("the order of this job is not kept any more") from None


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A disk that is full as StoreFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(f"the disk is full: {error.strerror}") from None
        raise
