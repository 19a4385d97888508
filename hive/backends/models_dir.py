"""Hive's own directory of models: what is put there, whole or not at all, and what is taken away from it.

What comes is written in a directory beside, synced and renamed: who is killed in between leaves only that, and `tidy`
takes it away. llama-server's router lists every `*.gguf` and every directory with one in it, hidden ones too (seen,
commit 0c1e570): so what is not whole yet lies two directories deep.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from hive.backends.model_files import GGUF, File, ModelOnDisk
from hive.errors import BadRequest, NotFound, NotPermitted, StoreFull, WrongState
from hive.host.files import sync, translated

BESIDE = ".hive"
PIECE_BYTES = 8 * 1024 * 1024
"""So much is copied between two looks at whether it was cancelled."""
READABLE = 0o755
SPARE_BYTES = 64 * 1024 * 1024
"""Left free on the disk, whatever is put there: other things of Hive's may lie on it."""
DEFAULT = Path("/var/lib/hive/models/pulled")
"""Of an installed Hive: the daemon's own, readable for the inference services. What lies beside it an administrator
put there."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
Progress = Callable[[int], None]
"""Told how many bytes are there. Raises Cancelled where no more shall come."""


def place_of(setting: str, *, is_installed: bool, state: Path) -> Path:
    """Directory of the models: the setting, else where the services look, else below the state of `hive up`."""
    return Path(setting) if setting else DEFAULT if is_installed else state / "models"


def name_for(model: ModelOnDisk, wanted: str, path: Path) -> str:
    """Name of `model`, found at `path`, in the directory: as `wanted`, else as its file or directory is.

    Raises BadRequest for a name that is none.

    >>> from hive.backends.model_files import Format
    >>> gguf = ModelOnDisk(Format.GGUF, (File("x.gguf", Path("/srv/x.gguf"), 9),))
    >>> name_for(gguf, "", Path("/srv/x.gguf")), name_for(gguf, "mine", Path("/srv/x.gguf"))
    ('x.gguf', 'mine.gguf')
    """
    name = (wanted or path.resolve().name).removesuffix(GGUF)
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name)
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise BadRequest(
            f"{name[:80]!r} is no name for a model here",
            hint="letters, digits and . _ + - (a letter or digit first), at most 128; --name gives it another one",
        )
    return name + GGUF if model.is_one_file else name


class ModelsDir:
    """The directory. Every method reads or writes the disk, so none is for the loop."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"<ModelsDir {self.root}>"

    @property
    def _beside(self) -> Path:
        return self.root / BESIDE

    # what is there ------------------------------------------------------------------------------------------------

    def holds(self, model: str) -> Path | None:
        """The file or directory that a model of this name is, by its file's name or without `.gguf`; None where there
        is none. A link that lies there counts, wherever it leads: it is the link that would be removed."""
        if not _NAME.fullmatch(model):
            return None
        found = [self.root / name for name in (model, model + GGUF) if os.path.lexists(self.root / name)]
        return found[0] if found else None

    def listed(self) -> dict[str, int]:
        """Name → bytes of all that lies there, names as one pulls and removes them; nothing where there is no directory
        or it may not be read."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(self.root), key=lambda entry: entry.name):
                if _NAME.fullmatch(entry.name):
                    found[entry.name.removesuffix(GGUF)] = _size_of(entry)
        return found

    def paths(self) -> dict[str, Path]:
        """Name → path of all that lies there, in order; see `listed`."""
        return {name: held for name in self.listed() if (held := self.holds(name)) is not None}

    def tidy(self) -> None:
        """Removes what somebody who was killed left. Never raises: there may be no directory, or it is not Hive's."""
        with contextlib.suppress(OSError):
            for left in self._beside.iterdir():
                if left.name.endswith(".old"):  # it was to be replaced, and what replaces it may not be there
                    self._put_back(left)
                shutil.rmtree(left, ignore_errors=True)
            self._beside.rmdir()

    def _put_back(self, old: Path) -> None:
        for entry in old.iterdir():
            if not os.path.lexists(self.root / entry.name):
                entry.rename(self.root / entry.name)

    # what comes ---------------------------------------------------------------------------------------------------

    def place(self, model: ModelOnDisk, name: str, *, link: bool, force: bool, progress: Progress) -> Path:
        """Copies `model` to where it is called `name`, or links it (hard: the same disk, no second copy).

        Whole, readable for everybody, and on the disk when this returns. Raises WrongState where something of that
        name is there (unless `force`), StoreFull, NotPermitted, and what `progress` raises; then nothing has changed.
        """
        target = self.root / name
        self.check_free(name, force=force)
        with translated(self.root):
            if not self.root.exists():
                self.root.mkdir()
                self.root.chmod(READABLE)
            if not link:
                self._check_room(model.size_bytes)
            work = self._beside / secrets.token_hex(8)
            work.mkdir(parents=True)
        try:
            with translated(self.root):
                self._fill(model, work / name, link=link, progress=progress)
                self._put(work / name, target, force=force)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._beside.rmdir()
        return target

    def check_free(self, name: str, *, force: bool) -> None:
        """Raises WrongState where something of that name is there, unless `force` and it can be replaced."""
        target = self.root / name
        others = {target, target.with_name(target.name.removesuffix(GGUF)), target.with_name(target.name + GGUF)}
        there = sorted(one.name for one in others if os.path.lexists(one))
        if there and not (force and there == [target.name]):
            hint = "--force replaces it, --name gives the new one another name"
            if there != [target.name]:
                hint = "that is another file by the same name: hive model remove it, or --name"
            raise WrongState(f"there is a model {there[0]} in {self.root} already", hint=hint)

    def _check_room(self, size: int) -> None:
        found = os.statvfs(self.root)
        free = found.f_bavail * found.f_frsize
        if size + SPARE_BYTES > free:
            raise StoreFull(
                f"{self.root} has {free >> 20} MiB free, and the model needs {(size + SPARE_BYTES) >> 20}",
                hint="hive model remove, or --link where it lies on the same disk",
            )

    def _fill(self, model: ModelOnDisk, at: Path, *, link: bool, progress: Progress) -> None:
        done = 0
        if not model.is_one_file:
            at.mkdir()
            at.chmod(READABLE)  # whatever the umask: the services read it as another user
        for file in model.files:
            to = at if model.is_one_file else at / file.name
            if not to.parent.exists():  # of a part of a pipeline
                to.parent.mkdir()
                to.parent.chmod(READABLE)
            if link:
                _link(file, to)
                progress(done := done + file.size)
            else:
                done = _copy(file, to, done, progress)
        if not model.is_one_file:
            for part in {(at / file.name).parent for file in model.files} - {at}:
                sync(part)
            sync(at)

    def _put(self, made: Path, target: Path, *, force: bool) -> None:
        """One rename, or none. Without `force` nothing that came meanwhile is replaced: a link to a name that is taken
        fails, and so does the rename of a directory onto one with something in it."""
        if force and os.path.lexists(target):
            old = self._beside / f"{secrets.token_hex(8)}.old"
            old.mkdir()
            target.rename(old / target.name)
            try:
                made.rename(target)
            except OSError:
                (old / target.name).rename(target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        elif made.is_dir():
            made.rename(target)
        else:
            os.link(made, target)
        sync(self.root)

    # what goes ----------------------------------------------------------------------------------------------------

    def remove(self, found: Path) -> int:
        """Removes what `holds` found; how many bytes that frees. Nothing outside of the directory goes: of a link only
        the link. Raises NotFound, NotPermitted, StoreFull."""
        if found.parent != self.root:
            raise NotFound(f"{found} does not lie in {self.root}")
        with translated(found):
            try:
                kind = found.lstat()
            except FileNotFoundError:
                raise NotFound(f"there is no {found}") from None
            if not stat.S_ISDIR(kind.st_mode):
                found.unlink()
                sync(self.root)
                return kind.st_size if kind.st_nlink == 1 else 0
            if not os.access(found, os.W_OK):
                raise NotPermitted(
                    f"{found} is not Hive's own: somebody else put it there", hint=f"sudo rm -r {found}, who put it"
                )
            freed = _bytes_in(found)
            gone = self._beside / secrets.token_hex(8)
            gone.mkdir(parents=True)
            found.rename(gone / found.name)
            sync(self.root)
            shutil.rmtree(gone)
            with contextlib.suppress(OSError):
                self._beside.rmdir()
        return freed


def _size_of(entry: os.DirEntry[str]) -> int:
    """Of a file, or of what is in a directory; of a link what the link itself takes."""
    if not entry.is_dir(follow_symlinks=False):
        return entry.stat(follow_symlinks=False).st_size
    return _bytes_in(Path(entry.path))


def _bytes_in(directory: Path) -> int:
    """Of the files in a directory, and in those in it: the parts of a pipeline."""
    size = 0
    for one in os.scandir(directory):
        if one.is_dir(follow_symlinks=False):
            size += sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(one) if file.is_file())
        elif one.is_file():
            size += one.stat(follow_symlinks=False).st_size
    return size


def _copy(file: File, to: Path, done: int, progress: Progress) -> int:
    """Copies one file; how many bytes are there in all then. Raises WrongState where it changed meanwhile."""
    came = 0
    with (
        os.fdopen(os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as source,
        os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb", buffering=0) as target,
    ):
        os.fchmod(target.fileno(), 0o644)  # the services read it as another user
        while piece := _piece(source.fileno(), target.fileno()):
            came += piece
            progress(done + came)
        os.fsync(target.fileno())
    if came != file.size:
        raise WrongState(f"{file.path} changed while it was copied", hint="pull it once it is written to its end")
    return done + came


def _piece(source: int, target: int) -> int:
    """Some bytes more, by the kernel alone where the file systems can; 0 at the end."""
    try:
        return os.copy_file_range(source, target, PIECE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
    data = memoryview(os.read(source, PIECE_BYTES))
    size = len(data)
    while data:
        data = data[os.write(target, data) :]
    return size


def _link(file: File, to: Path) -> None:
    """Raises BadRequest where it would not be the same file, or not one that the services may read."""
    try:
        os.link(file.path.resolve(), to)
    except OSError as error:
        why = "it lies on another disk" if error.errno == errno.EXDEV else error.strerror
        raise BadRequest(f"{file.path} cannot be linked: {why}", hint="without --link it is copied") from None
    if not stat.S_IMODE(to.stat().st_mode) & 0o004:
        raise BadRequest(f"{file.path} is not readable for everybody", hint=f"chmod a+r {file.path}, or without --link")
