"""Supervises the server of one slot of the pool, as the main process of its unit or session."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from hive.backends.entries import ModelEntry, entries_of
from hive.backends.entry_launch import launch_entry
from hive.backends.model_files import find
from hive.backends.models_dir import ModelsDir, place_of
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound
from hive.host.notify import Notifier
from hive.link.slots import SlotGrant
from hive.settings.table import Settings
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise

log = logging.getLogger("hive.worker")
GRANT_MAX_BYTES = 64 * 1024


def supervised(
    slot: str, settings: Settings, *, grant: Path, socket: Path, state: Path, models_dir: Path | None
) -> int:
    """The server's life; the exit code. Raises NotFound for a slot that no entry has, BadRequest for what is no grant,
    DependencyDown where program or model is missing."""
    notifier = Notifier(os.environ, pid=os.getpid())
    entry = entry_of(slot, settings, models_dir)
    given = read_grant(grant)
    made = launch_entry(
        entry,
        given.accounts,
        given.context,
        settings.inference,
        os.environ,
        socket=socket,
        state=state,
        weights_bytes=_size(entry.path),
    )
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    state.mkdir(parents=True, exist_ok=True)
    return asyncio.run(supervise(made, TimeoutProfile(), notifier))


def entry_of(slot: str, settings: Settings, models_dir: Path | None = None) -> ModelEntry:
    """The entry with this slot. `models_dir`: where files of models lie if no setting says so;
    None for the place of an installed Hive.

    Raises NotFound.
    """
    found = entries_of(settings)
    if slot not in found and settings.pool.found:
        setting = settings.inference.models_dir or str(models_dir or "")
        place = place_of(setting, is_installed=True, state=Path())
        found = entries_of(settings, ModelsDir(place).paths())
    if slot not in found:
        raise NotFound(f"no model of the pool has the slot {slot[:60]!r}", hint="hive pool --json lists them")
    return found[slot]


def read_grant(path: Path) -> SlotGrant:
    """Raises BadRequest for a file that is no grant, DependencyDown where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(GRANT_MAX_BYTES + 1)
    except OSError as error:
        raise DependencyDown(
            f"{path}: {error.strerror}", hint="the helper writes it before it starts a server"
        ) from None
    try:
        return msgspec.json.decode(data[: GRANT_MAX_BYTES + 1], type=SlotGrant)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{path} is no grant: {error}") from None


def _size(path: Path) -> int:
    """Bytes of the model's files; 0 where they cannot be read: its server says so then."""
    try:
        return find(path).size_bytes
    except (HiveError, OSError):
        return 0
