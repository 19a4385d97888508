"""The directory in which llama-servers keep slots (`[inference] llama_slot_dir`)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from hive.backends.llama import ENGINE
from hive.settings.table import InferenceSection, Settings


def with_slot_place(settings: Settings, *, is_apart: bool) -> tuple[Settings, str]:
    """The settings, with the directory for slots made; and why they are without one, where it is wanted and cannot be:
    a llama-server would not start. `is_apart`: servers and daemon are not the same user."""
    directory = settings.inference.llama_slot_dir
    why = why_no_slots(settings.inference, is_apart=is_apart)
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


def why_no_slots(inference: InferenceSection, *, is_apart: bool) -> str:
    """The reason, a clause, that slots are not kept although a directory for them is named; empty where there is none.

    >>> named = InferenceSection(llama_slot_dir="/d")
    >>> why_no_slots(named, is_apart=False), why_no_slots(InferenceSection(), is_apart=True)
    ('', '')
    >>> why_no_slots(named, is_apart=True)
    'an installed Hive keeps none, as its servers run as another user than the daemon'
    """
    if not inference.llama_slot_dir:
        return ""
    if is_apart:
        return "an installed Hive keeps none, as its servers run as another user than the daemon"
    return "llama_cache_ram_mb has prompts kept in RAM instead" if inference.llama_cache_ram_mb else ""


def make_place(directory: Path) -> None:
    """Makes the directory and the engines' in it, this user's alone. One that was there is left as it is. Raises
    PermissionError for one that others may enter, or that is another user's, OSError."""
    for wanted in (directory, directory / ENGINE):
        wanted.parent.mkdir(parents=True, exist_ok=True)
        try:
            wanted.mkdir(mode=0o700)
        except FileExistsError:
            if why := why_unfit(wanted):
                raise PermissionError(why) from None


def why_unfit(wanted: Path) -> str:
    """The reason that a directory that is there is not used, a clause; empty where it is, or there is none."""
    try:
        found = wanted.lstat()
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return f"{wanted} is not a directory of this user's own"
    return f"{wanted} is open to other users: chmod 0700 if it is for Hive alone" if found.st_mode & 0o077 else ""
