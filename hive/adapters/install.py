"""Installing an adapter: it is copied while it is hashed, its signature verified on what was copied, looked at, and put
in its place in one step. Until then nothing of it is anywhere, and nothing but what was signed ever is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hive.adapters import gguf, peft
from hive.adapters.base_model import BaseModel, check_base
from hive.adapters.directory import AdapterDirectory
from hive.adapters.keys import TrustedKeys
from hive.adapters.lora import LoraFile, check_rank
from hive.adapters.oms import BUNDLE_MAX_BYTES, SignedFiles, read_signed
from hive.adapters.record import (
    GGUF,
    SAFETENSORS,
    UNSIGNED,
    VERIFIED,
    AdapterFile,
    AdapterRecord,
    check_name,
    digest_of,
)
from hive.adapters.source import AdapterSource, Progress, opened
from hive.errors import AdapterUnsafe, KeyRevoked, SignatureUnverifiable, StoreFull, TooLarge, WrongState
from hive.host.files import free_bytes, sync, translated
from hive.settings.adapters import OFF, REQUIRED

FILE_MODE = 0o444
SPARE_BYTES = 64 * 1024 * 1024
"""Left free on the disk: other things of Hive's lie there."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Programs that only look like weights: who loads one runs it."""


class AdapterWeights(NamedTuple):
    """Facts that the files of one adapter say of it. `base`: as its maker names it, empty where he does not."""

    format: str
    rank: int
    lora: LoraFile
    base: str = ""


def _nothing(_: int) -> None:
    """Progress that nobody is told."""


def install(
    directory: AdapterDirectory,
    source: Path,
    name: str,
    base: BaseModel,
    *,
    beneath: Path,
    policy: str,
    keys: TrustedKeys,
    max_rank: int,
    max_mb: int,
    progress: Progress = _nothing,
    now: Callable[[], float] = time.time,
) -> AdapterRecord:
    """Installs the adapter at `source`, a directory or a GGUF file below `beneath`, as `name` (empty: as it is called).

    It is whole and on the disk when this returns; when it raises, nothing has changed. One that is installed already is
    the newest of its name again. It blocks: not for the loop. Raises NotFound, NotPermitted, AdapterUnsafe,
    SignatureUnverifiable, SignatureInvalid, SignatureMismatch, AdapterMismatch, TooLarge, StoreFull, WrongState,
    BadRequest, and what `progress` raises.
    """
    with opened(source, beneath=beneath) as found:
        name = check_name(name or found.name.removesuffix(".gguf"))
        signed = _signed(found, policy, keys)
        taken = chosen(tuple(found.files), is_file=found.is_file)
        _check_size(found, directory, max_mb)
        with directory.workplace() as work:
            files = _copied(found, taken, signed, work, progress)
            weights = look_at(work, files)
            check_rank(weights.rank, max_rank)
            check_base(base, weights.lora, weights.format, weights.base)
            record = AdapterRecord(
                name=name,
                digest=digest_of(files),
                base=base.name,
                format=weights.format,
                rank=weights.rank,
                bytes=sum(file.size for file in files),
                files=files,
                signature=UNSIGNED if signed is None else VERIFIED,
                key_id="" if signed is None else signed.key_id,
                installed_at=now(),
            )
            _refuse_another_base(directory, record)
            directory.put(work, record)
    return record


def _signed(found: AdapterSource, policy: str, keys: TrustedKeys) -> SignedFiles | None:
    """The files that its signature names; None where there is none, or nobody asks. A wrong signature is never passed
    over, nor one of a revoked key."""
    if policy == OFF:
        return None
    bundle = found.signature(BUNDLE_MAX_BYTES)
    try:
        if bundle is None:
            where = f"{found.name}.sig beside it" if found.is_file else "model.sig in it"
            raise SignatureUnverifiable(f"{found.name} is not signed: there is no {where}")
        return read_signed(bundle, keys)
    except KeyRevoked:
        raise
    except SignatureUnverifiable:
        if policy == REQUIRED:
            raise
        return None


def chosen(paths: tuple[str, ...], *, is_file: bool) -> tuple[str, ...]:
    """The files to install, of those that are there: one GGUF file, or PEFT's two kinds. Raises AdapterUnsafe.

    >>> chosen(("README.md", "adapter_config.json", "adapter_model.safetensors", "optimizer.pt"), is_file=False)
    ('adapter_config.json', 'adapter_model.safetensors')
    >>> chosen(("adapter_config.json", "adapter_model.bin"), is_file=False)
    Traceback (most recent call last):
    hive.errors.AdapterUnsafe: its weights are a pickle, adapter_model.bin: a program, which is not taken
    """
    top = [path for path in paths if "/" not in path]
    ggufs = [path for path in top if path.endswith(".gguf")]
    weights = [path for path in top if path.endswith(".safetensors")]
    pickles = [path for path in top if path.endswith(PICKLES)]
    if pickles and not ggufs and not weights:
        raise AdapterUnsafe(
            f"its weights are a pickle, {pickles[0][:80]}: a program, which is not taken",
            hint="save it again: PEFT's save_pretrained writes safetensors",
        )
    if is_file and not ggufs:
        raise AdapterUnsafe(f"{top[0][:80]} is no *.gguf; the other kind is a directory")
    if len(ggufs) > 1 or (ggufs and weights):
        raise AdapterUnsafe(f"it holds {ggufs[0][:80]} and other weights", hint="name the one file that is meant")
    if ggufs:
        return (ggufs[0],)
    for lacking in (peft.CONFIG, peft.WEIGHTS):
        if lacking not in top:
            raise AdapterUnsafe(f"it has no {lacking}, and no *.gguf")
    return tuple(sorted((peft.CONFIG, *weights)))


def _check_size(found: AdapterSource, directory: AdapterDirectory, max_mb: int) -> None:
    """Raises TooLarge, StoreFull."""
    if found.size_bytes > max_mb << 20:
        raise TooLarge(f"{found.size_bytes} bytes; at most {max_mb} MiB are taken", hint="[adapters] max_mb")
    root = directory.root if directory.root.exists() else directory.root.parent
    free = free_bytes(root)
    if free is not None and found.size_bytes + SPARE_BYTES > free:
        raise StoreFull(f"{found.size_bytes} bytes and some to spare do not fit: {free} are free at {root}")


def _copied(
    found: AdapterSource, taken: tuple[str, ...], signed: SignedFiles | None, work: Path, progress: Progress
) -> tuple[AdapterFile, ...]:
    """Copies the files to install. Of a signed adapter the others are read too, as they were signed with them.

    Raises SignatureMismatch, and what reading and writing do.
    """
    files: list[AdapterFile] = []
    digests: dict[str, str] = {}
    for path in found.files if signed is not None else taken:
        if path in taken:
            file = _copy(found, path, work / path, progress)
            files.append(file)
        else:
            file = found.copy(path, None, progress)
        digests[found.signed_as(path)] = file.sha256
    if signed is not None:
        signed.compare(digests)
        missing = [path for path in taken if found.signed_as(path) not in signed.digests]
        if missing:
            raise AdapterUnsafe(f"its signature leaves out {missing[0]}", hint="sign the whole directory")
    with translated(work):
        sync(work)
    return tuple(sorted(files, key=lambda file: file.path))


def _copy(found: AdapterSource, path: str, to: Path, progress: Progress) -> AdapterFile:
    with translated(to):
        fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as writing:
            file = found.copy(path, writing, progress)
            writing.flush()
            os.fchmod(fd, FILE_MODE)
            os.fsync(fd)
    return file


def look_at(place: Path, files: tuple[AdapterFile, ...]) -> AdapterWeights:
    """Format, rank and matrices of the files in `place`. Raises AdapterUnsafe, AdapterMismatch."""
    first = files[0].path
    if not first.endswith(".gguf"):
        read = peft.read_adapter(place)
        return AdapterWeights(SAFETENSORS, read.rank, read.lora, read.base)
    try:
        lora = gguf.read_adapter(place / first)
    except AdapterUnsafe as error:
        raise AdapterUnsafe(f"{first}: {error.message}", hint=error.hint) from None
    return AdapterWeights(GGUF, lora.rank, lora)


def _refuse_another_base(directory: AdapterDirectory, record: AdapterRecord) -> None:
    """Raises WrongState."""
    for there in directory.records():
        if (there.name, there.digest) == (record.name, record.digest) and there.base != record.base:
            raise WrongState(
                f"{record.engine_name} is installed already, as an adapter on {there.base}",
                hint=f"hive adapter remove {record.name}, or --name gives this one another name",
            )
