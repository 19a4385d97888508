"""The directory in which llama-servers keep slots (`[inference] llama_slot_dir`)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from hive.backends.llama import ENGINE
from hive.settings.table import Settings


def with_slot_place(settings: Settings, *, is_apart: bool) -> tuple[Settings, str]:
    """The settings, with the directory for slots made; and why they are without one, where it is wanted and cannot be:
    a llama-server would not start. `is_apart`: servers and daemon are not the same user."""
    directory = settings.inference.llama_slot_dir
    why = "an installed Hive does not keep slots" if is_apart and directory else ""
    if directory and not why:
        try:
            make_place(Path(directory))
        except OSError as error:
            why = str(error)
    if not why:
        return settings, ""
    return msgspec.structs.replace(
        settings, inference=msgspec.structs.replace(settings.inference, llama_slot_dir="")
    ), why


def make_place(directory: Path) -> None:
    """Makes the directory and the engines' in it, this user's alone. One that was there is left as it is. Raises
    PermissionError for one that others may enter, or that is another user's, OSError."""
    for wanted in (directory, directory / ENGINE):
        wanted.parent.mkdir(parents=True, exist_ok=True)
        try:
            wanted.mkdir(mode=0o700)
        except FileExistsError:
            found = wanted.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError(f"{wanted} is not a directory of this user's own") from None
            if found.st_mode & 0o077:
                raise PermissionError(f"{wanted} is open to other users: chmod 0700 if it is for Hive alone") from None
