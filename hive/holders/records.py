"""Leases on disk, a file for each: what lets the next helper know their holders again."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import msgspec

from hive.errors import HiveError, StoreFull
from hive.host.process import Identity
from hive.host.record_files import RecordFiles
from hive.link.leases import HolderState, LeaseGrant

log = logging.getLogger("hive.sandbox")

VERSION = 1


class HolderPlace(msgspec.Struct, frozen=True):
    """The means by which a holder's processes are known. `held_by`: as in `LeaseHolder`. `group`: directory of their
    control group, `memory`: of the one that counts their memory (it may be of v1); both empty where there is none."""

    held_by: str
    group: str = ""
    memory: str = ""


class HolderRecord(msgspec.Struct, kw_only=True):
    """One lease from before its holder may come in until its end was booked. Times are seconds since the boot `boot`.

    `mark`: `NAME=value` in the environment of the holder. `main` and `place`: set before the holder is moved, so that a
    helper that was killed between the two is understood. `enter_until`: nobody comes in any more then; `since`: it is
    in. `kill_at`: SIGKILL follows then, None where nobody ends it. `why`: the reason of an end that the helper caused.
    """

    grant: LeaseGrant
    state: HolderState
    mark: str
    boot: str
    enter_until: float
    main: Identity | None = None
    place: HolderPlace | None = None
    enforced: str = ""
    since: float | None = None
    kill_at: float | None = None
    why: str = ""
    version: int = VERSION


class HolderRecords:
    """The records of all leases, by the lease's id."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory, HolderRecord)

    def __repr__(self) -> str:
        return f"<HolderRecords {self._files}>"

    def load(self) -> dict[str, HolderRecord]:
        """All of them. One that cannot be understood is moved aside and told."""
        return self._files.load(
            _why_wrong, lambda path, error: log.error("lease_record_not_read path=%s error=%s", path, error)
        )

    def save(self, record: HolderRecord) -> None:
        """Survives a kill of the helper. Raises StoreFull, HiveError."""
        try:
            self._files.save(record.grant.id, record)
        except OSError as error:
            kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else HiveError
            raise kind(f"cannot write down the lease {record.grant.id}: {error.strerror}") from error

    def remove(self, id: str) -> None:
        self._files.remove(id)


def _why_wrong(name: str, record: HolderRecord) -> str:
    is_right = record.version == VERSION and record.grant.id == name
    return "" if is_right else f"it is of version {record.version}, of lease {record.grant.id}"
