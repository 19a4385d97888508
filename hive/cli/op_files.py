"""The files of `hive op`: secret keys, and operations that are being signed."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hive.cli.op_options import FILE_MAX_BYTES, read
from hive.errors import BadRequest, NotPermitted, OpTokenInvalid, UsageError
from hive.governance.envelope import SIGNATURES_MAX, Signature, TokenEnvelope, envelope_of
from hive.governance.exact_json import read_object
from hive.governance.keys import SecretKey
from hive.governance.operation import Operation, operation_of

KEY_MAX_BYTES = 16 * 1024


def read_key(path: Path) -> SecretKey:
    """A signer's key. Raises NotFound, NotPermitted where others can read it, BadRequest where there is none in it."""
    pem = read(path, KEY_MAX_BYTES, "a key")
    found = path.stat()
    if found.st_mode & 0o077:
        raise NotPermitted(
            f"{path} is a secret, and others can get at it: mode {stat.S_IMODE(found.st_mode):o}",
            hint=f"chmod 600 {path}; if somebody may have read it, hive op keygen makes another",
        )
    try:
        return SecretKey(pem)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message}") from None


def read_operation(path: Path) -> tuple[TokenEnvelope, Operation]:
    """An operation, signed or not yet. Raises NotFound, NotPermitted, OpTokenInvalid."""
    data = read(path, FILE_MAX_BYTES, "an operation")
    try:
        envelope = envelope_of(read_object(data, "the file"))
        return envelope, operation_of(envelope.payload)
    except OpTokenInvalid as error:
        raise OpTokenInvalid(f"{path}: {error.message}") from None


def create(path: Path, data: bytes, mode: int) -> None:
    """A new file; one that is there stays as it is. Raises UsageError, NotPermitted."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise UsageError(f"{path} is there already, and stays as it is") from None
    except OSError as error:
        raise NotPermitted(f"cannot write {path}: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise NotPermitted(f"cannot write {path}: {error.strerror}") from None


def as_file(envelope: TokenEnvelope) -> bytes:
    """The content of its file. Raises UsageError where no box would take it as a token, as it is too long."""
    data = envelope.as_json() + b"\n"
    if len(data) > FILE_MAX_BYTES:
        raise UsageError(f"an operation with its signatures has {FILE_MAX_BYTES} bytes at most")
    return data


def add_signature(path: Path, payload: bytes, signature: Signature) -> TokenEnvelope:
    """The operation in the file with one more signature, beside those that came meanwhile.

    Where the file is a link, what it leads to is written. Raises UsageError where another operation is in it now,
    NotFound, NotPermitted, OpTokenInvalid.
    """
    with _alone_with(path) as real:
        found, _ = read_operation(real)
        if found.payload != payload:
            raise UsageError(f"another operation is in {path} by now", hint="sign it again")
        signed = found.with_signature(signature)
        if len(signed.signatures) > SIGNATURES_MAX:
            raise UsageError(f"an operation has {SIGNATURES_MAX} signatures at most")
        _put(real, as_file(signed))
    return signed


@contextmanager
def _alone_with(path: Path) -> Iterator[Path]:
    """Keeps other signers from the file, whose own name is yielded. Raises NotPermitted."""
    real, file = Path(os.path.realpath(path)), None
    try:
        while file is None:
            file = real.open("rb")
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(file.fileno()), real.stat()):  # somebody has put a new one there
                file.close()
                file = None
    except OSError as error:
        if file is not None:
            file.close()
        raise NotPermitted(f"cannot lock {path}: {error.strerror}") from None
    with file:
        yield real


def _put(path: Path, data: bytes) -> None:
    """The file with new content, whole or as it was. Raises UsageError, NotPermitted."""
    mode = stat.S_IMODE(path.stat().st_mode)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        create(beside, data, mode)
        beside.replace(path)
    except OSError as error:
        raise NotPermitted(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
