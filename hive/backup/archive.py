"""The file a backup is: a tar of plain files, first `manifest.json`, which names every other with size and SHA-256.

Nothing in it says where a file goes: names are taken from a table of ours (`backup_contents.py`), or are plain names of
files of models.d and templates.d, so no path of an archive is ever used. Reading it trusts nothing: an unknown name,
anything but a plain file, another size or sum, a second file of one name, and an end that comes too early are all
refused before anything is touched.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from hive.errors import AS_ROOT, BadRequest, NotFound, NotPermitted, WrongState
from hive.host.files import beside, sync, translated

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_MAX_BYTES = 1024 * 1024
PIECE_BYTES = 1024 * 1024


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the archive."""

    name: str
    bytes: int
    sha256: str


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of an archive. `hive`: the version that wrote it. `schema`, `readable_from`: of its database
    (migrations.py). `kind`: `appliance` or `up`; `source`: the state directory. `made_at`: Unix time."""

    format: int = FORMAT
    hive: str
    schema: int
    readable_from: int
    kind: str
    source: str
    made_at: float
    secrets: bool
    files: list[Packed]


def write(
    target: Path, contents: Mapping[str, Path | bytes], describe: Callable[[list[Packed]], ArchiveManifest]
) -> ArchiveManifest:
    """Writes the archive: whole or not at all, for its user alone, never over something. Returns its manifest.

    Raises WrongState (there is something at `target`), NotPermitted, StoreFull.
    """
    if os.path.lexists(target):
        raise WrongState(f"{target} is there already", hint="name another file: a backup is never written over one")
    manifest = describe([_measured(name, content) for name, content in contents.items()])
    with translated(target):
        beside(target).unlink(missing_ok=True)
        fd = os.open(beside(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                _pack(file, manifest, contents)
                file.flush()
                os.fsync(fd)
            os.link(beside(target), target)
        finally:
            beside(target).unlink(missing_ok=True)
        sync(target.parent)
    return manifest


def _measured(name: str, content: Path | bytes) -> Packed:
    digest, size = hashlib.sha256(), 0
    with _opened(content) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return Packed(name, size, digest.hexdigest())


def _opened(content: Path | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def _pack(file: IO[bytes], manifest: ArchiveManifest, contents: Mapping[str, Path | bytes]) -> None:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content, size in [
            (MANIFEST, text, len(text)),
            *((packed.name, contents[packed.name], packed.bytes) for packed in manifest.files),
        ]:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = size, 0o600, int(manifest.made_at)
            with _opened(content) as opened:
                tar.addfile(info, opened)


def read(source: Path, place: Callable[[ArchiveManifest], Mapping[str, Path]]) -> ArchiveManifest:
    """Puts the archive's files where `place` says, those it does not name nowhere, and returns the manifest.

    `place` sees the manifest first and may refuse it. What it names must not be there yet; each is 0600, on the disk
    when this returns. Raises BadRequest where the archive is not whole, NotFound, NotPermitted, StoreFull.
    """
    try:
        with source.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            manifest = _manifest_of(tar)
            _check(manifest, os.fstat(file.fileno()).st_size)
            targets = place(manifest)
            for packed in manifest.files:
                _unpack(tar, packed, targets.get(packed.name))
            if (more := tar.next()) is not None:
                raise _broken(f"{more.name[:60]!r} is not in its manifest")
    except FileNotFoundError:
        raise NotFound(f"there is no {source}") from None
    except PermissionError as error:
        raise NotPermitted(f"{source} cannot be read: {error.strerror}", hint=AS_ROOT) from None
    except (tarfile.TarError, EOFError) as error:
        raise _broken(str(error)) from None
    except IsADirectoryError:
        raise _broken("it is a directory") from None
    return manifest


def _manifest_of(tar: tarfile.TarFile) -> ArchiveManifest:
    text = _content(tar, MANIFEST, most=MANIFEST_MAX_BYTES)
    try:
        return msgspec.json.decode(text, type=ArchiveManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"its manifest: {error}") from None


def _check(manifest: ArchiveManifest, size: int) -> None:
    if manifest.format != FORMAT:
        raise WrongState(f"it was written by Hive {manifest.hive}, in another format", hint="restore with that version")
    names = [packed.name for packed in manifest.files]
    if len(names) != len(set(names)) or MANIFEST in names:
        raise _broken("a name comes twice")
    # A claim of more than the file holds would fill the disk.
    if any(packed.bytes < 0 for packed in manifest.files) or sum(packed.bytes for packed in manifest.files) > size:
        raise _broken("it is shorter than its manifest says")


def _content(tar: tarfile.TarFile, name: str, *, most: int) -> bytes:
    with _next(tar, name) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise _broken(f"{name} is too large")
    return text


def _next(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """The next file, which must be this one."""
    found = tar.next()
    if found is None or found.name != name or found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _broken(f"{name} is missing" if found is None else f"{found.name[:60]!r} where {name} should be")
    opened = tar.extractfile(found)
    assert opened is not None
    return opened


def _unpack(tar: tarfile.TarFile, packed: Packed, target: Path | None) -> None:
    digest, size = hashlib.sha256(), 0
    with _next(tar, packed.name) as file, _target(target) as out:
        while piece := file.read(min(PIECE_BYTES, packed.bytes + 1 - size)):
            digest.update(piece)
            size += len(piece)
            if size > packed.bytes:
                break
            if target is not None:
                with translated(target):
                    out.write(piece)
        if (size, digest.hexdigest()) != (packed.bytes, packed.sha256):
            raise _broken(f"{packed.name} is not what was written")
        if target is not None:
            with translated(target):
                out.flush()
                os.fsync(out.fileno())


def _target(target: Path | None) -> IO[bytes]:
    if target is None:
        return io.BytesIO()
    with translated(target):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(target, flags, 0o600), "wb")


def _broken(why: str) -> BadRequest:
    return BadRequest(f"this is no whole backup of Hive: {why}")
