"""Servers of the pool that run as sessions, on disk: what lets the next helper know them again."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from hive.host.process import Identity
from hive.link.slots import SlotGrant
from hive.sandbox.table import storage_error

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
    """The records, each in a 0600 file of its own that is only ever replaced whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __repr__(self) -> str:
        return f"<SlotRecords {self._directory}>"

    def load(self) -> dict[str, SlotRecord]:
        """All of them. One that cannot be understood is moved aside and told: what it was of is found no more."""
        found: dict[str, SlotRecord] = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=SlotRecord)
                if record.version != VERSION:
                    raise msgspec.ValidationError(f"it is of version {record.version}, this Hive reads {VERSION}")
                found[path.stem] = record
            except (OSError, msgspec.MsgspecError) as error:
                log.error("slot_record_not_read path=%s error=%s", path, error)
                with contextlib.suppress(OSError):
                    path.replace(path.with_suffix(".damaged"))
        return found

    def save(self, slot: str, record: SlotRecord) -> None:
        """Survives a kill of the helper, which is all that is asked of pids. Raises StoreFull, HiveError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._directory / f"{slot}.json"
            new = path.with_suffix(".new")
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(record))
            new.replace(path)
        except OSError as error:
            raise storage_error(error) from error

    def remove(self, slot: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / f"{slot}.json").unlink(missing_ok=True)
