"""Secrets that systemd hands to a service and to nobody else (`LoadCredential=`, systemd.exec(5))."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hive.errors import ConfigError

MAX_BYTES = 64 * 1024


def credential(name: str, env: Mapping[str, str]) -> bytes | None:
    """The credential of that name, None where this service was given none. Raises ConfigError where it cannot be read.

    Its directory is private to the service (0500, on a file system without a disk), so its mode is not looked at.
    """
    directory = env.get("CREDENTIALS_DIRECTORY", "")
    if not directory.startswith("/"):
        return None
    path = Path(directory, name)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read the credential {name}: {error.strerror}") from error
