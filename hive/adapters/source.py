"""An adapter as somebody else brings it: opened beneath one directory, without a link on the way, and copied while it
is hashed. Who else writes there meanwhile changes nothing of what was copied.

Each component is opened below the one before it with O_NOFOLLOW, so no name is looked up twice and `..` is refused:
that is what openat2 with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS does, on any kernel and under any filter.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from hive.adapters.oms import IGNORED, ONE_FILE
from hive.adapters.record import AdapterFile
from hive.errors import AdapterUnsafe, BadRequest, NotFound, NotPermitted

SIGNATURE = "model.sig"
"""In a directory. Beside one file FILE it is FILE.sig."""
FILES_MAX = 4096
DEPTH_MAX = 16
PIECE_BYTES = 1 << 20
"""So much is copied between two looks at whether it was cancelled."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
Progress = Callable[[int], None]
"""Told how many bytes were read. Raises Cancelled where no more shall be."""


class AdapterSource:
    """One directory, or one file, that is open. `files`: the bytes of every regular file, by path; of one file by its
    own name. What a repository keeps for itself (IGNORED) is none of it."""

    def __init__(self, place: Path, directory: int, name: str, files: dict[str, int], *, is_file: bool) -> None:
        self.place = place
        self.name = name
        self.files = files
        self.is_file = is_file
        self.read_bytes = 0
        self._directory = directory

    def __repr__(self) -> str:
        return f"<AdapterSource {self.place} {len(self.files)} files>"

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())

    def signed_as(self, path: str) -> str:
        """The name by which a signature knows a file."""
        return ONE_FILE if self.is_file else path

    def signature(self, most: int) -> bytes | None:
        """The bytes in the place of the signature; None where there are none. Raises AdapterUnsafe, NotPermitted."""
        path = f"{self.name}.sig" if self.is_file else SIGNATURE
        with _told(self.place / path):
            try:
                fd = _open_file(self._directory, path)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as file:
                return file.read(most + 1)

    def copy(self, path: str, to: BinaryIO | None, progress: Progress) -> AdapterFile:
        """Reads a file once, from its begin to its end, into `to`; its hash is of what was written there.

        Raises BadRequest where somebody changed it meanwhile, AdapterUnsafe, NotPermitted, what `progress` raises, and
        OSError of writing.
        """
        whole = hashlib.sha256()
        with ExitStack() as stack:
            with _told(self.place / path):
                reading = stack.enter_context(open(self._open(path), "rb", buffering=0))
                before = os.fstat(reading.fileno())
            left = before.st_size + 1
            while left > 0:
                with _told(self.place / path):
                    piece = reading.read(min(PIECE_BYTES, left))
                if not piece:
                    break
                left -= len(piece)
                whole.update(piece)
                if to is not None:
                    to.write(piece)
                self.read_bytes += len(piece)
                progress(self.read_bytes)
            after = os.fstat(reading.fileno())
        if left != 1 or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise BadRequest(
                f"{self.place / path} was changed while it was read", hint="try again when nobody writes it"
            )
        return AdapterFile(path, before.st_size, whole.hexdigest())

    def _open(self, path: str) -> int:
        *directories, name = path.split("/")
        with ExitStack() as stack:
            return _open_file(_descended(self._directory, directories, stack), name)


@contextmanager
def opened(source: Path, *, beneath: Path) -> Iterator[AdapterSource]:
    """The adapter at `source`, absolute or below `beneath`; nothing else than what is really below is ever opened.

    Raises NotFound, NotPermitted, AdapterUnsafe: for a link, a device, a pipe or a socket anywhere in it.
    """
    parts = _parts(source, beneath)
    place = beneath.joinpath(*parts)
    with ExitStack() as stack:
        with _told(place):
            root = stack.enter_context(_fd(os.open(beneath, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
            above = _descended(root, parts[:-1], stack)
            name = parts[-1]
            found = os.stat(name, dir_fd=above, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                directory = stack.enter_context(_fd(os.open(name, _DIRECTORY, dir_fd=above)))
                files = dict(_files(directory, place))
                files.pop(SIGNATURE, None)
                told = AdapterSource(place, directory, name, files, is_file=False)
            else:
                _refuse_strange(found.st_mode, place)
                told = AdapterSource(place.parent, above, name, {name: found.st_size}, is_file=True)
        yield told


def _parts(source: Path, beneath: Path) -> list[str]:
    """
    >>> _parts(Path("a/b"), Path("/srv")), _parts(Path("/srv/a"), Path("/srv"))
    (['a', 'b'], ['a'])
    >>> _parts(Path("/srv/../etc"), Path("/srv"))
    Traceback (most recent call last):
    hive.errors.AdapterUnsafe: '/srv/../etc' is not below /srv
    """
    whole = beneath / source
    parts = list(whole.relative_to(beneath).parts) if whole.is_relative_to(beneath) else []
    if not parts or ".." in parts or "\0" in str(source):
        raise AdapterUnsafe(
            f"{str(source)!r} is not below {beneath}",
            hint="copy it there: [adapters] dir is the one place they come from",
        )
    return parts


def _descended(directory: int, parts: list[str], stack: ExitStack) -> int:
    for part in parts:
        directory = stack.enter_context(_fd(os.open(part, _DIRECTORY, dir_fd=directory)))
    return directory


def _open_file(directory: int, name: str) -> int:
    """Raises AdapterUnsafe for what is no regular file. It is looked at before it is opened, as opening some devices
    does something, and after it, as somebody may have put another there."""
    _refuse_strange(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode, Path(name))
    fd = os.open(name, _FILE, dir_fd=directory)
    try:
        _refuse_strange(os.fstat(fd).st_mode, Path(name))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _files(directory: int, place: Path) -> Iterator[tuple[str, int]]:
    """Path and bytes of each file below. Raises AdapterUnsafe."""
    count, left = 0, [""]
    while left:
        above = left.pop()
        with ExitStack() as stack:
            fd = _descended(directory, above.split("/") if above else [], stack)
            for entry in sorted(os.scandir(fd), key=lambda entry: entry.name):
                path = f"{above}/{entry.name}" if above else entry.name
                if path in IGNORED:
                    continue
                if (count := count + 1) > FILES_MAX or path.count("/") >= DEPTH_MAX:
                    raise AdapterUnsafe(
                        f"{place} holds more than {FILES_MAX} files, or is {DEPTH_MAX} directories deep"
                    )
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    left.append(path)
                    continue
                _refuse_strange(found.st_mode, place / path)
                yield path, found.st_size


_STRANGE = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def _refuse_strange(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise _unsafe(path, _STRANGE.get(stat.S_IFMT(mode), "no file"))


def _unsafe(path: Path, what: str) -> AdapterUnsafe:
    return AdapterUnsafe(f"{path} is {what}; only files are taken", hint="cp -rL copies what links lead to")


@contextmanager
def _fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Translates the system's refusals of reading to Hive's errors."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"there is no {path}", hint="it has to be below [adapters] dir of this box") from None
    except PermissionError as error:
        raise NotPermitted(
            f"the daemon may not read {path}: {error.strerror}", hint="an installed daemon is the user hive"
        ) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _unsafe(path, "behind a link, or below what is no directory") from None
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from None
