"""The directory of installed adapters: `NAME/DIGEST/`, each there whole or not at all. It has no other list of them.

What comes is made in a directory beside, synced and renamed, and what goes is renamed before it is deleted: who is
killed in between leaves only what `tidy` takes away. Nothing there is ever changed: other weights have another digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hive.adapters.record import DIGEST, GGUF, AdapterRecord, why_no_record
from hive.errors import AdapterNotFound, BadRequest, SignatureMismatch
from hive.host.files import sync, translated, write_whole

RECORD = "hive-adapter.json"
RECORD_MAX_BYTES = 4 * 1024 * 1024
BESIDE = ".new"
"""The directory in which adapters are made and deleted; no adapter has such a name."""
READABLE = 0o755
"""Inference servers are other users."""
RECORD_MODE = 0o444
_PREFIX = re.compile(r"[0-9a-f]{1,64}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class AdapterDirectory:
    """The directory. Every method reads or writes the disk, so none is for the loop."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"<AdapterDirectory {self.root}>"

    @property
    def beside(self) -> Path:
        return self.root / BESIDE

    # what is there ------------------------------------------------------------------------------------------------

    def records(self) -> list[AdapterRecord]:
        """All that are installed, the newest first. A directory without a whole record of its files is none."""
        found = [record for name, digest in self._places() if (record := self._record(name, digest)) is not None]
        return sorted(found, key=lambda record: (-record.installed_at, record.name, record.digest))

    def find(self, name: str, digest: str = "") -> AdapterRecord:
        """The adapter of that name whose digest begins so, without a digest the one that was installed last.

        Raises AdapterNotFound, BadRequest where several begin so.
        """
        name, _, told = name.partition("@")
        digest = digest or told
        if digest and not _PREFIX.fullmatch(digest):
            raise BadRequest(f"{digest[:80]!r} is no digest", hint="hex digits, as hive adapter list shows them")
        named = [record for record in self.records() if record.name == name]
        found = [record for record in named if record.digest.startswith(digest)]
        if not found and named:
            raise AdapterNotFound(f"{name} is installed, but not as {digest[:80]}")
        if not found:
            raise AdapterNotFound(f"there is no adapter {name[:80]!r}")
        if digest and len(found) > 1:
            raise BadRequest(f"{len(found)} adapters {name} have digests that begin with {digest}")
        return found[0]

    def path(self, record: AdapterRecord) -> Path:
        """The path that an inference server is given: the GGUF file, or the directory. Nothing there ever changes."""
        place = self.place(record)
        return place / record.files[0].path if record.format == GGUF else place

    def place(self, record: AdapterRecord) -> Path:
        return self.root / record.name / record.digest

    def check(self, record: AdapterRecord) -> None:
        """Hashes its files once more. Raises SignatureMismatch where they are not those that were installed,
        NotPermitted, WrongState."""
        place = self.place(record)
        with translated(place, act="read"):
            for file in record.files:
                with open(os.open(place / file.path, _READ), "rb", buffering=0) as reading:
                    if not stat.S_ISREG(os.fstat(reading.fileno()).st_mode):
                        raise SignatureMismatch(f"{place / file.path} is no file any more")
                    if hashlib.file_digest(reading, "sha256").hexdigest() != file.sha256:
                        raise SignatureMismatch(f"{place / file.path} was changed since it was installed")

    def _places(self) -> list[tuple[str, str]]:
        """Names and digests of the directories that may be adapters."""
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(self.root) if entry.name != BESIDE)
            return [(name, digest) for name in names for digest in self._digests(name)]
        return []

    def _digests(self, name: str) -> list[str]:
        with contextlib.suppress(OSError):
            found = [entry.name for entry in os.scandir(self.root / name) if entry.is_dir(follow_symlinks=False)]
            return sorted(digest for digest in found if DIGEST.fullmatch(digest))
        return []

    def _record(self, name: str, digest: str) -> AdapterRecord | None:
        place = self.root / name / digest
        try:
            with open(os.open(place / RECORD, _READ), "rb") as file:
                record = msgspec.json.decode(file.read(RECORD_MAX_BYTES), type=AdapterRecord)
            is_whole = all(os.lstat(place / file.path).st_size == file.size for file in record.files)
        except (OSError, msgspec.MsgspecError, ValueError):
            return None
        return record if is_whole and not why_no_record(record, name=name, digest=digest) else None

    # what comes and goes ------------------------------------------------------------------------------------------

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty directory to make an adapter in; what is left of it is gone in the end. Raises NotPermitted,
        StoreFull."""
        work = self.beside / secrets.token_hex(8)
        with translated(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(READABLE)
            self.beside.mkdir(mode=0o700, exist_ok=True)
            work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def put(self, work: Path, record: AdapterRecord) -> None:
        """Makes what lies in `work`, its files synced, the adapter of this record. It is on the disk when this returns.

        Where it is installed already, only its record is put in place of the old one. Raises NotPermitted, StoreFull.
        """
        place = self.place(record)
        content = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
        with translated(place), self._alone():
            if self._record(record.name, record.digest) is not None:
                write_whole(place / RECORD, content, mode=RECORD_MODE)
                return
            self._discard(place)
            write_whole(work / RECORD, content, mode=RECORD_MODE)
            work.chmod(READABLE)
            place.parent.mkdir(exist_ok=True)
            place.parent.chmod(READABLE)
            os.rename(work, place)
            sync(place.parent)
            sync(self.root)

    def remove(self, record: AdapterRecord) -> None:
        """Removes an adapter; nothing is done where it is gone. Raises NotPermitted, StoreFull."""
        place = self.place(record)
        if not place.parent.exists():
            return
        with translated(place), self._alone():
            self._discard(place)
            with contextlib.suppress(OSError):  # others of its name are there
                place.parent.rmdir()

    def tidy(self) -> list[str]:
        """Removes what somebody who was killed left, and what is no whole adapter; names of the latter, to be told.

        Raises NotPermitted, StoreFull. For the start alone: what is being installed would go too.
        """
        left = [(name, digest) for name, digest in self._places() if self._record(name, digest) is None]
        with translated(self.root):
            for name, digest in left:
                self._discard(self.root / name / digest)
            shutil.rmtree(self.beside, ignore_errors=True)
            for name in {name for name, _ in self._places()} | {name for name, _ in left}:
                with contextlib.suppress(OSError):
                    (self.root / name).rmdir()
        return [f"{name}@{digest}" for name, digest in left]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps others from putting and removing meanwhile; they wait. Raises OSError."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _discard(self, place: Path) -> None:
        """Renames a directory away, then deletes it: at no moment is half of it there. Raises OSError."""
        self.beside.mkdir(mode=0o700, exist_ok=True)
        gone = self.beside / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, gone)
            sync(place.parent)
            shutil.rmtree(gone)
