"""Supervises the server of one slot of the pool, as the main process of its unit or session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hive.backends.entries import ModelEntry, adapter_entries, entries_of, started_entries
from hive.backends.entry_launch import launch_entry
from hive.backends.entry_sleep import why_no_sleep
from hive.backends.launch import STATE, without_ram_cache
from hive.backends.slot_place import with_slot_place
from hive.backends.vllm_numba import check_numba
from hive.domain import BackendKind
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound
from hive.host.notify import Notifier
from hive.host.process import end_now
from hive.link.slots import SlotGrant, mark_of
from hive.settings.pool import slot_id
from hive.settings.table import Settings
from hive.worker.child import GRACE_S
from hive.worker.lifeline import Lifeline
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise
from hive.worker.waiting import is_awaited, wait_for_grant

log = logging.getLogger("hive.worker")
GRANT_MAX_BYTES = 64 * 1024


def supervised(
    slot: str,
    settings: Callable[[], Settings],
    *,
    grant: Path,
    socket: Path,
    state: Path,
    hive_state: Path | None = None,
) -> int:
    """The server's life; this process ends with it. `hive_state`: of the `hive up` it belongs to.

    Where the helper has marked the grant as one to come it waits for that, and reads `settings` only then: what is
    described meanwhile holds. Returns 0 where it is not wanted any more. Raises NotFound for a slot that no entry has,
    BadRequest for what is no grant, DependencyDown where program or model is missing.
    """
    notifier = Notifier(os.environ, pid=os.getpid())
    line = Lifeline.forked(grace_s=GRACE_S)  # as long as nothing here has a thread or a loop
    if is_awaited(grant, mark_of(grant)):
        with contextlib.suppress(HiveError):  # the second time takes 2 ms, the first 25
            settings()
        if not wait_for_grant(grant, mark_of(grant), warden=line.process.pid):
            return 0
    read, no_slots = with_slot_place(settings(), is_apart=hive_state is None, is_server=True)
    entry = entry_of(slot, read, hive_state)
    given = read_grant(grant)
    made = launch_entry(
        entry,
        given.accounts,
        given.context,
        without_ram_cache(read),
        os.environ,
        socket=socket,
        state=state,
        weights_bytes=_size(entry.path) + _size(entry.draft) if entry.kind == BackendKind.VLLM else 0,
        may_sleep=not why_no_sleep(entry, read.pool, given.accounts),
        max_rank=read.adapters.max_rank,
        most_audio_s=read.proxy.audio_max_s,
    )
    check_numba(entry.kind, read.inference, entry.row.speculative)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    if no_slots:
        log.warning("slots_not_kept reason=%r", no_slots)
    state.mkdir(parents=True, exist_ok=True)
    return end_now(asyncio.run(supervise(made, TimeoutProfile(), notifier, line=line)))


def entry_of(slot: str, settings: Settings, hive_state: Path | None) -> ModelEntry:
    """The entry with this slot; without a `hive_state` it is one of an installed Hive. The files of an adapter are
    hashed: they may be changed since it was loaded. Raises NotFound, SignatureMismatch."""
    found = started_entries(entries_of(settings))
    if slot not in found and settings.pool.found:
        from hive.backends.models_dir import ModelsDir, place_of  # on the way of every start otherwise

        setting = settings.inference.models_dir
        place = place_of(setting, is_installed=hive_state is None, state=hive_state or Path())
        found = started_entries(entries_of(settings, ModelsDir(place).paths()))
    if slot not in found:
        from hive.adapters.directory import AdapterDirectory

        adapters = AdapterDirectory((hive_state or STATE.parent) / "adapters")
        records = adapters.records()
        found = adapter_entries(found, [(record, adapters.path(record)) for record in records])
        for record in records:
            if slot in found and slot_id(record.engine_name) == slot:
                adapters.check(record)
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


def _size(path: Path | None) -> int:
    """Bytes of the model's files; 0 where there is none, or they cannot be read: its server says so then."""
    if path is None:
        return 0
    from hive.backends.model_files import find

    try:
        return find(path).size_bytes
    except (HiveError, OSError):
        return 0
