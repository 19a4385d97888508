"""The helper's own table: every agent defined, and who its main process is. Outlives the helper, not the boot.

What is frozen is not in it: the kernel knows that, and no disk stands in the way of a pause or a wake.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from hive.errors import ConfigError, HiveError, StoreFull
from hive.host import files
from hive.link.specs import SandboxSpec
from hive.sandbox.runtime import Run

VERSION = 1
MARK = "HIVE_MARK"


def _new_mark() -> str:
    return secrets.token_hex(16)


class Record(msgspec.Struct, kw_only=True):
    """One agent. `run` while its main process is believed to live; `last_pid`, `exit_code` and `why` of its last end.

    `mark` is in the environment of all it starts: an agent whose pid could not be written down any more, because
    the helper was killed right after the fork, is found by it.
    """

    spec: SandboxSpec
    mark: str = msgspec.field(default_factory=_new_mark)
    run: Run | None = None
    last_pid: int = 0
    exit_code: int | None = None
    why: str = ""

    @property
    def environment(self) -> str:
        return f"{MARK}={self.mark}"


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    agents: dict[str, Record]


class Table:
    """The records, in memory and in a 0600 file that is only ever replaced whole."""

    def __init__(self, path: Path, records: dict[str, Record]) -> None:
        self._path = path
        self.records = records
        self._changes = 0
        self._durable = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Table {self._path} {len(self.records)} agents>"

    @classmethod
    def load(cls, path: Path) -> Table:
        """The table at `path`, empty where there is none. Raises ConfigError where it cannot be understood."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return cls(path, {})
        except OSError as error:
            raise HiveError(f"cannot read {path}: {error.strerror}") from error
        try:
            file = msgspec.json.decode(content, type=_File)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path} is damaged: {error}", hint="Move it away: agents are then defined anew."
            ) from error
        if file.version != VERSION:
            raise ConfigError(f"{path} is of version {file.version}, this Hive reads {VERSION}")
        return cls(path, file.agents)

    def save(self) -> None:
        """Replaces the file; survives a kill of the helper, which is all that is asked of pids.

        Raises StoreFull, HiveError; the old file is whole then.
        """
        self._changes += 1
        temporary = self._path.with_suffix(".new")
        _translate(_write, temporary, self._encode(), False)
        _translate(temporary.replace, self._path)

    async def save_durably(self) -> None:
        """`save`, on the disk when it returns: for specs, which must survive a power cut.

        A disk takes its time (fsync), so a thread waits for it. The rename is done here and only if nothing was
        saved meanwhile, else the thread would bring old pids back.
        """
        async with self._durable:
            self._changes += 1
            temporary = self._path.with_suffix(".durable")
            while True:
                changes = self._changes
                await asyncio.to_thread(_translate, _write, temporary, self._encode(), True)
                if changes == self._changes:
                    break
            _translate(temporary.replace, self._path)
            await asyncio.to_thread(_translate, files.sync, self._path.parent)

    def _encode(self) -> bytes:
        return msgspec.json.encode(_File(agents=self.records))


def _write(path: Path, content: bytes, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(fd)


def _translate(work: Callable[..., object], *arguments: object) -> None:
    try:
        work(*arguments)
    except OSError as error:
        raise storage_error(error) from error


def storage_error(error: OSError) -> HiveError:
    """What an operating system error of a disk means here."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"the disk is full: {error.filename or 'the state directory'}")
    return HiveError(str(error))
