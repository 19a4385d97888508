"""Servers of the pool that run as sessions, on disk: what lets the next helper know them again."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from hive.host.files import storage_error
from hive.host.process import Identity
from hive.host.record_files import RecordFiles
from hive.link.slots import SlotGrant

log = logging.getLogger("hive.sandbox")

VERSION = 1


class SlotRecord(msgspec.Struct, kw_only=True):
    """One server from before its start until its end was seen. `main`: its supervisor, None until that was forked.

    `mark`: `NAME=value` in the supervisor's environment; by it one is found whose pid was never written down. `leaf`,
    `memory`: directories of its control groups, empty where it has none. `serves`: it said so. `grant`: None while its
    supervisor waits for one.
    """

    run: str
    mark: str
    socket: str
    grant: SlotGrant | None = None
    leaf: str = ""
    memory: str = ""
    main: Identity | None = None
    serves: bool = False
    version: int = VERSION


class SlotRecords:
    """The records of all slots, by the slot's id."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory, SlotRecord)

    def __repr__(self) -> str:
        return f"<SlotRecords {self._files}>"

    def load(self) -> dict[str, SlotRecord]:
        """All of them. One that cannot be understood is moved aside and told: what it was of is found no more."""
        return self._files.load(
            _why_wrong, lambda path, error: log.error("slot_record_not_read path=%s error=%s", path, error)
        )

    def save(self, slot: str, record: SlotRecord) -> None:
        """Survives a kill of the helper. Raises StoreFull, HiveError."""
        try:
            self._files.save(slot, record)
        except OSError as error:
            raise storage_error(error) from error

    def remove(self, slot: str) -> None:
        self._files.remove(slot)


def _why_wrong(_: str, record: SlotRecord) -> str:
    return "" if record.version == VERSION else f"it is of version {record.version}, this Hive reads {VERSION}"
