"""The secrets of a box: two in a file of their own each, made once, 0600, never overwritten; none is ever logged."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from hive.errors import ConfigError, NotPermitted
from hive.host.credentials import credential
from hive.host.files import translated

BOX_KEY_BYTES = 32
INTERNAL_TOKEN = "HIVE_INTERNAL_TOKEN"
TOKEN_MIN = 16
"""Least characters of a token set by an operator, so that it cannot be guessed."""


def box_key(path: Path, env: Mapping[str, str]) -> bytes:
    """32 random bytes, from which every agent's tokens are derived: the credential, else the file at `path`.

    Raises ConfigError, NotPermitted, StoreFull, WrongState, HiveError.
    """
    key = credential("box-key", env)
    if key is None:
        key = _kept(path, lambda: secrets.token_bytes(BOX_KEY_BYTES))
    if len(key) != BOX_KEY_BYTES:
        raise ConfigError(
            f"{path} is damaged: {len(key)} bytes, {BOX_KEY_BYTES} expected",
            hint="restore it, or remove it: a new one is made, and every agent gets other tokens at its next start",
        )
    return key


def internal_token(path: Path, env: Mapping[str, str]) -> str:
    """The operator's token at the proxy: the credential, else `HIVE_INTERNAL_TOKEN`, else the one in the file.

    Raises ConfigError, NotPermitted, StoreFull, WrongState, HiveError.
    """
    given = credential("internal-token", env)
    if given is None:
        given = env.get(INTERNAL_TOKEN, "").encode() or _kept(path, _new_token)
    is_set = bool(env.get(INTERNAL_TOKEN))
    return _checked(
        given,
        where=INTERNAL_TOKEN if is_set else str(path),
        hint="set another, or unset it" if is_set else "remove it: a new one is made",
    )


def api_token(env: Mapping[str, str]) -> str | None:
    """The first administrator's token at the API on TCP, which an installed Hive is handed. Raises ConfigError."""
    given = credential("api-token", env)
    if given is None:
        return None
    return _checked(given, where="the credential api-token", hint="sudo hive secrets rotate api-token")


def _checked(given: bytes, *, where: str, hint: str) -> str:
    token = given.decode("ascii", "replace").strip()
    if len(token) < TOKEN_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} is no token: at least {TOKEN_MIN} printable ASCII characters without spaces", hint=hint
        )
    return token


def _new_token() -> bytes:
    return f"hive_{secrets.token_urlsafe(32)}".encode()


def _kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of the file; where there is none it is made first, whole or not at all."""
    with translated(path, act="use"):
        try:
            return _read(path)
        except FileNotFoundError:
            _create(path, make())
            return _read(path)


def _read(path: Path) -> bytes:
    """Raises NotPermitted where it is a link, or somebody else may have read it or may change it; OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPermitted(f"{path} is a link; a secret is a file of its own", hint="remove it") from error
        raise
    with open(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NotPermitted(
                f"{path} is a secret, but others can get at it: it belongs to uid {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):o}",
                hint=f"remove it, and a new one is made; or keep it: chown {os.geteuid()} {path}; chmod 600 {path}",
            )
        return file.read(4096)


def _create(path: Path, content: bytes) -> None:
    """Written beside and linked into place: a crash leaves no half secret, and one that is there stays."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        beside.unlink()
