"""Files of parked slots: taken from where the engine wrote them, and handed to it again only as they were taken.

Every method blocks, and raises OSError as the file system does.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from hive.backends.slot_place import SHOWN_MODE, SlotDirectories, make_place, place_of
from hive.errors import HiveError
from hive.store.parked_slots import ParkedSlot

log = logging.getLogger("hive.daemon")

BEGINS = "hive-parked-"
"""Beginning of the names under which an engine writes and reads."""
OURS = re.compile(r"/g-[0-9a-f]{16}/[0-9a-f]{32}\.(kv|half)\Z")
"""End of the path of a file that Hive made: of nothing else is any deleted."""
SWEPT_AT_START = 100_000
"""Entries that are swept before a daemon serves, some seconds' work: the next sweep takes the others."""
_PIECE = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotAsItWas(HiveError):
    """A parked file is not as Hive had written it."""


class ParkedFiles:
    """`directory` is Hive's own, 0700; each cache group has a directory there. In `engine` servers write and read.

    Where these are another user, `engine` is the daemon's still: what it puts there they may read, and neither change
    nor put another file in its place; and it is theirs to read only once it was checked (decision 054).

    A file's tag is over all that its row says, and its contents, with a key of the box: one that is cut, changed, or
    put in another's place is none.
    """

    def __init__(self, directory: Path, key: bytes, *, is_apart: bool = False, servers: int | None = None) -> None:
        """`directory`: as the setting names it; `is_apart`: servers are another user, whose uid is `servers`."""
        self._place: SlotDirectories = place_of(directory, is_apart=is_apart)
        self.directory = self._place.kept
        self.engine = self._place.engine
        self._key = hmac.digest(key, b"parked slots", "sha256")
        self._servers = os.geteuid() if servers is None else servers
        self._has_told_of_left = False

    def __repr__(self) -> str:
        return f"<ParkedFiles in {self.directory}>"

    def prepare(self, rows: Iterable[ParkedSlot]) -> list[str]:
        """Makes the directories, and removes what no row knows: what a kill left. The agents whose files are gone, or
        in another directory. Raises PermissionError for a directory that is not as it has to be."""
        make_place(self._place)
        self.sweep((), most=SWEPT_AT_START)
        known = {row.file: row.agent for row in rows}
        there = set()
        for path in self.directory.glob("g-*/*"):
            if not OURS.search(str(path)):
                continue
            if str(path) in known:
                there.add(str(path))
            else:
                path.unlink(missing_ok=True)
        return [agent for file, agent in known.items() if file not in there]

    def clear(self) -> None:
        """Removes what is left where nothing is kept any more; the log says where it cannot."""
        try:
            if self.directory.exists():
                self.prepare(())
        except OSError as error:
            log.warning("parked_files_not_removed directory=%s error=%s", self.directory, error)

    def sweep(self, in_use: Collection[str], *, most: int | None = None) -> None:
        """Removes what an engine wrote too late for anybody; all but these names. Of a directory that is made for this
        alone everything. What does not go, as a directory of a server's with something in it, stops nothing, and the
        log names it. `most`: entries that it tries."""
        left, first, tried = 0, "", 0
        with suppress(FileNotFoundError), os.scandir(self.engine) as entries:
            for entry in entries:
                if entry.name in in_use or not (self._place.is_apart or entry.name.startswith(BEGINS)):
                    continue
                if tried == most:
                    log.warning("parked_files_not_swept directory=%s tried=%d rest=next_sweep", self.engine, tried)
                    break
                tried += 1
                try:
                    _remove(entry.path)
                except OSError as error:
                    left, first = left + 1, first or f"{entry.name}: {error.strerror}"
        if left and not self._has_told_of_left:
            log.warning(
                "parked_entries_left directory=%s entries=%d first=%r: Hive's servers make none such; the next boot"
                " removes them, or root does by hand",
                self.engine,
                left,
                first,
            )
        self._has_told_of_left = bool(left)

    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def placed(self, row: ParkedSlot) -> ParkedSlot:
        """The row, with a place for its file where none is yet."""
        return msgspec.structs.replace(row, file=str(self.directory / _place(row, secrets.token_hex(16))))

    def take_in(self, name: str, row: ParkedSlot) -> ParkedSlot:
        """Copies what an engine wrote under this name to its place; the row with its tag. The engine's own is left. An
        earlier file of the agent stays as it is. Raises NotAsItWas where it is not as long as the engine said, or
        not a file of the servers' user with this one name, FileNotFoundError where the engine wrote nothing here."""
        place = Path(row.file)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        half = place.with_suffix(".half")
        half.unlink(missing_ok=True)
        try:
            tag = self._copy(self.engine / name, half, row)
            os.rename(half, place)
        except BaseException:
            half.unlink(missing_ok=True)
            raise
        return msgspec.structs.replace(row, tag=tag)

    def hand_out(self, row: ParkedSlot, name: str) -> None:
        """Copies a file to where engines read, under this name. Raises NotAsItWas."""
        to = self.engine / name
        try:
            self._copy(Path(row.file), to, row, is_for_engine=True)
        except BaseException:
            with suppress(OSError):
                to.unlink()
            raise

    def drop_engines(self, name: str) -> None:
        """Removes it; where it does not go the next sweep says why."""
        with suppress(OSError):
            _remove(self.engine / name)

    def _copy(self, source: Path, to: Path, row: ParkedSlot, *, is_for_engine: bool = False) -> str:
        """The tag of what was copied. `is_for_engine`: it has to be the row's, before anybody else may read it."""
        told = [row.agent, row.group, row.server, row.made_for, row.file, row.bytes, row.tokens]
        code = hmac.new(self._key, msgspec.json.encode(told), "sha256")
        left = row.bytes
        owner = os.geteuid() if is_for_engine else self._servers
        with (
            _opened(source, row.bytes, owner) as reading,
            open(os.open(to, _NEW, 0o600), "wb", buffering=0) as writing,
        ):
            while left > 0 and (piece := reading.read(min(_PIECE, left))):
                code.update(piece)
                left -= len(piece)
                view = memoryview(piece)
                while view:
                    view = view[writing.write(view) :]
            if left:
                raise NotAsItWas(f"it ends {left} bytes too soon")
            tag = code.hexdigest()
            if is_for_engine:
                if not hmac.compare_digest(tag, row.tag):
                    raise NotAsItWas("its contents are others")
                self._show(writing.fileno())
        return tag

    def _show(self, fd: int) -> None:
        if self._place.is_apart:
            os.fchown(fd, -1, self.engine.stat().st_gid)
            os.fchmod(fd, SHOWN_MODE)


def _opened(source: Path, size: int, owner: int) -> FileIO:
    """Raises NotAsItWas for what is not a file of this size and owner, with no second name."""
    fd = os.open(source, _READ)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_nlink != 1:
            raise NotAsItWas("it is not a file of its writer's alone")
        if found.st_size != size:
            raise NotAsItWas(f"it has {found.st_size} bytes instead of {size}")
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _remove(path: str | Path) -> None:
    """A file, a link, or an empty directory; no link is followed. What is gone already is no fault."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(path)


def drop_file(row: ParkedSlot) -> None:
    """Deletes the row's file, in whichever directory it is; none that Hive has not made."""
    if OURS.search(row.file):
        Path(row.file).unlink(missing_ok=True)


def _place(row: ParkedSlot, nonce: str) -> str:
    """The file's place: by the group, the agent, and all that it is good for; another one for each save.

    >>> row = ParkedSlot(agent="a", group="t", server="", made_for="m", file="", bytes=1, tokens=1, tag="", at=0.0)
    >>> len(_place(row, "1")), bool(OURS.search("/" + _place(row, "1"))), _place(row, "1") == _place(row, "2")
    (54, True, False)
    """
    group = hashlib.sha256(row.group.encode()).hexdigest()[:16]
    name = hashlib.sha256(msgspec.json.encode([row.agent, row.server, row.made_for, nonce])).hexdigest()[:32]
    return f"g-{group}/{name}.kv"


def beyond(rows: Iterable[ParkedSlot], *, most_bytes: int) -> list[ParkedSlot]:
    """The rows whose files have to go, the oldest first, so that the others have room.

    >>> row = ParkedSlot(agent="a", group="t", server="", made_for="", file="", bytes=6, tokens=1, tag="", at=1.0)
    >>> newer = msgspec.structs.replace(row, agent="b", at=2.0)
    >>> [one.agent for one in beyond([newer, row], most_bytes=10)], beyond([newer, row], most_bytes=12)
    (['a'], [])
    """
    by_age = sorted(rows, key=lambda row: row.at)
    used, gone = sum(row.bytes for row in by_age), list[ParkedSlot]()
    for row in by_age:
        if used <= most_bytes:
            break
        used -= row.bytes
        gone.append(row)
    return gone
