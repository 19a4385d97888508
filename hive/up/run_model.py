"""Supervises the server of one slot of the pool, as the main process of its unit or session."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from hive.backends.entries import ModelEntry, entries_of, started_entries
from hive.backends.entry_launch import launch_entry
from hive.domain import BackendKind
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound
from hive.host.notify import Notifier
from hive.link.slots import SlotGrant
from hive.settings.table import Settings
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise

log = logging.getLogger("hive.worker")
GRANT_MAX_BYTES = 64 * 1024


def supervised(
    slot: str, settings: Settings, *, grant: Path, socket: Path, state: Path, hive_state: Path | None = None
) -> int:
    """The server's life; the exit code. `hive_state`: of the `hive up` it belongs to.

    Raises NotFound for a slot that no entry has, BadRequest for what is no grant, DependencyDown where program or model
    is missing.
    """
    notifier = Notifier(os.environ, pid=os.getpid())
    entry = entry_of(slot, settings, hive_state)
    given = read_grant(grant)
    made = launch_entry(
        entry,
        given.accounts,
        given.context,
        settings.inference,
        os.environ,
        socket=socket,
        state=state,
        weights_bytes=_size(entry.path) if entry.kind == BackendKind.VLLM else 0,
    )
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    state.mkdir(parents=True, exist_ok=True)
    return asyncio.run(supervise(made, TimeoutProfile(), notifier))


def entry_of(slot: str, settings: Settings, hive_state: Path | None) -> ModelEntry:
    """The entry with this slot; without a `hive_state` it is one of an installed Hive. Raises NotFound."""
    found = started_entries(entries_of(settings))
    if slot not in found and settings.pool.found:
        from hive.backends.models_dir import ModelsDir, place_of  # on the way of every start otherwise

        setting = settings.inference.models_dir
        place = place_of(setting, is_installed=hive_state is None, state=hive_state or Path())
        found = started_entries(entries_of(settings, ModelsDir(place).paths()))
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
    if len(data) > GRANT_MAX_BYTES:
        raise BadRequest(f"{path} is larger than {GRANT_MAX_BYTES} bytes, so it is no grant")
    try:
        return msgspec.json.decode(data, type=SlotGrant)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{path} is no grant: {error}") from None


def _size(path: Path) -> int:
    """Bytes of the model's files; 0 where they cannot be read: its server says so then."""
    from hive.backends.model_files import find

    try:
        return find(path).size_bytes
    except (HiveError, OSError):
        return 0
