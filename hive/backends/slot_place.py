"""The directories in which llama-servers keep slots (`[inference] llama_slot_dir`), and why there are none.

Under `hive up` servers and daemon are one user: the directory is that user's alone. An installed Hive has one place for
it, made by systemd-tmpfiles in a directory of root's (decision 054).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.backends.launch import STATE
from hive.backends.llama import ENGINE
from hive.settings.table import InferenceSection, Settings

APART = STATE.parent / "slots"
"""Of an installed Hive."""
KEPT = "kept"
"""Directory in `APART` that is the daemon's alone."""
ENGINE_MODE = 0o1730
"""Of the servers' directory there. Its owner is the daemon. Its group, the servers', makes and opens files by names
that it is told, and lists none; whose a file is not may neither delete nor replace it."""
SHOWN_MODE = 0o640
"""Of a file that the daemon puts there: its group reads it."""


class SlotDirectories(NamedTuple):
    """`kept`: what Hive has taken in, its own alone; `engine`: where servers write and read. `is_apart`: servers are
    another user than the daemon."""

    kept: Path
    engine: Path
    is_apart: bool


def place_of(directory: Path, *, is_apart: bool) -> SlotDirectories:
    """
    >>> place_of(Path("/d"), is_apart=True).kept.as_posix(), place_of(Path("/d"), is_apart=False).kept.as_posix()
    ('/d/kept', '/d')
    """
    return SlotDirectories(directory / KEPT if is_apart else directory, directory / ENGINE, is_apart)


def with_slot_place(settings: Settings, *, is_apart: bool, is_server: bool) -> tuple[Settings, str]:
    """The settings, with the directory for slots made or found; and why they are without one, where it is wanted and
    cannot be: a llama-server would not start. `is_apart`: servers and daemon are not the same user; `is_server`: this
    process becomes or supervises a server, else it is the daemon."""
    directory = settings.inference.llama_slot_dir
    why = why_no_slots(settings.inference, is_apart=is_apart)
    if directory and not why:
        place = place_of(Path(directory), is_apart=is_apart)
        try:
            if not is_server or not is_apart:
                make_place(place)
            else:
                why = why_closed(place.engine)
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
    'an installed Hive keeps them in /var/lib/hive/slots and nowhere else'
    >>> why_no_slots(InferenceSection(llama_slot_dir="/var/lib/hive/slots"), is_apart=True)
    ''
    """
    if not inference.llama_slot_dir:
        return ""
    if is_apart and Path(inference.llama_slot_dir) != APART:
        return f"an installed Hive keeps them in {APART} and nowhere else"
    return "llama_cache_ram_mb has prompts kept in RAM instead" if inference.llama_cache_ram_mb else ""


def make_place(place: SlotDirectories) -> None:
    """Makes the directories, this user's alone; those of an installed Hive are there, and are looked at. One that was
    there is left as it is. Raises PermissionError for one that others may enter, or that is another user's, OSError."""
    if place.is_apart:
        if why := why_unfit_apart(place, os.geteuid()):
            raise PermissionError(why)
        return
    for wanted in (place.kept, place.engine):
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


def why_unfit_apart(place: SlotDirectories, owner: int) -> str:
    """The reason that the directories of an installed Hive are not used, a clause. `owner`: uid of the daemon."""
    for wanted, mode in ((place.kept, 0o700), (place.engine, ENGINE_MODE)):
        try:
            found = wanted.lstat()
        except OSError as error:
            return f"{wanted}: {error.strerror}: systemd-tmpfiles --create hive.conf makes it"
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or stat.S_IMODE(found.st_mode) != mode:
            return f"{wanted} is not a directory of the daemon's with mode {mode:04o}: hive doctor files --fix"
    return ""


def why_closed(engine: Path) -> str:
    """The reason that this process, a server's, cannot write there, or could do more than that, a clause."""
    try:
        found = engine.lstat()
    except OSError as error:
        return f"{engine}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid == os.geteuid():
        return f"{engine} is not a directory of the daemon's"
    return "" if os.access(engine, os.W_OK | os.X_OK) else f"{engine} may not be written to"
