"""Files that say what may be done here: read only where nobody else could have written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from hive.errors import ConfigError

MAX_BYTES = 1024 * 1024
LINKS_MAX = 40
"""The kernel follows no more."""


def read_trusted(path: Path, what: str, owners: Collection[int], *, is_secret: bool = False) -> bytes:
    """The content of a file that one of `owners` has, in a directory of theirs, and nobody else can write.

    `is_secret`: nobody else can read it either. Raises ConfigError, FileNotFoundError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.lexists(path):
            raise ConfigError(f"{path} is a link that leads nowhere") from None
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what} {path} is no file")
        _check(path, found, owners)
        for directory in _directories(path):
            _check(directory, os.stat(directory), owners)
        if is_secret and found.st_mode & 0o007:
            raise ConfigError(f"{path} is a secret, and everybody can read it", hint=f"chmod o-rwx {path}")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes")
    return content


def _directories(path: Path) -> set[Path]:
    """Those of the name, of each link on the way, and of the file that they lead to."""
    found = {path.parent, path.resolve().parent}
    for _ in range(LINKS_MAX):
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
        found.add(path.parent)
    return found


def _check(path: Path, found: os.stat_result, owners: Collection[int]) -> None:
    if found.st_uid not in owners:
        raise ConfigError(f"{path} belongs to uid {found.st_uid}", hint=f"chown root: {path}")
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # of a file that bit means nothing
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise ConfigError(f"{path} can be written by others than its owner", hint=f"chmod go-w {path}")
