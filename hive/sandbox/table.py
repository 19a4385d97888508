"""The helper's own table: every agent defined, and its main process. Outlives the helper, not the boot.

What is frozen is not in it: the kernel knows that, and no disk stands in the way of a pause or a wake.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hive.errors import ConfigError, HiveError
from hive.host import files
from hive.link.specs import SandboxSpec
from hive.runtimes.runtime import Run

VERSION = 2
WHOLE_VERSION = 1
MARK = "HIVE_MARK"


def _new_mark() -> str:
    return secrets.token_hex(16)


class Record(msgspec.Struct, kw_only=True):
    """One agent. `run` while its main process is believed to live; `last_pid`, `exit_code` and `why` of its last end.

    `mark` is in the environment of all it starts. By it an agent is found whose pid was never written down, because the
    helper was killed right after the fork.
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


class _Version(msgspec.Struct):
    version: int


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    agent: Record


class _Whole(msgspec.Struct, kw_only=True):
    """The first form of Hive's table: every agent in one file, written anew for each of them."""

    version: int = WHOLE_VERSION
    agents: dict[str, Record]


class AgentRecords:
    """The records, in memory and each in a 0600 file of its own that is only ever replaced whole.

    What is written for one agent does not grow with the number of the others.
    """

    def __init__(self, directory: Path, records: dict[str, Record]) -> None:
        self._directory = directory
        self.records = records

    def __repr__(self) -> str:
        return f"<AgentRecords {self._directory} {len(self.records)} agents>"

    @classmethod
    def load(cls, directory: Path) -> AgentRecords:
        """The table in `directory`, which is made where it is missing; what an older Hive kept beside it is taken over.

        Raises ConfigError for a file that cannot be understood, StoreFull, HiveError.
        """
        _translate(directory.mkdir, 0o700, False, True)
        table = cls(
            directory, {path.stem: _read(path, _File, VERSION).agent for path in sorted(directory.glob("*.json"))}
        )
        if table._whole.exists() and _stamp(table._whole) != table._taken_over():
            table._take_over()
        return table

    @property
    def _whole(self) -> Path:
        """The file of an older Hive. It stays for one that comes back (an upgrade that is undone) until the first agent
        is removed, of which it would keep the environment."""
        return self._directory.with_suffix(".json")

    @property
    def _mark(self) -> Path:
        """Says which state of that was taken over: what an older Hive writes later is, once more."""
        return self._directory / "taken_over"

    def _taken_over(self) -> bytes:
        return self._mark.read_bytes() if self._mark.exists() else b""

    def _take_over(self) -> None:
        """Begun anew where it was cut short: until all is on the disk the mark is not."""
        stamp, before = _stamp(self._whole), self.records
        self.records = _read(self._whole, _Whole, WHOLE_VERSION).agents
        for agent in before.keys() - self.records.keys():
            _translate(self._path(agent).unlink)
        for agent in self.records:
            self.save(agent)
        os.sync()
        _translate(_write, self._mark, stamp, True)

    def save(self, agent: str) -> None:
        """Replaces the agent's file; survives a kill of the helper, which is all that is asked of pids.

        Raises StoreFull, HiveError; the old file is whole then.
        """
        temporary = self._path(agent, ".new")
        _translate(_write, temporary, _encode(self.records[agent]), False)
        _translate(temporary.replace, self._path(agent))

    async def save_durably(self, agent: str) -> None:
        """`save`, on the disk when it returns: for specs, which must survive a power cut.

        A disk takes its time (fsync), so a thread waits for it. The rename is done here and only if nothing was
        changed meanwhile, else the thread would bring an old pid back.
        """
        temporary, content = self._path(agent, ".durable"), b""
        while content != (content := _encode(self.records[agent])):
            await asyncio.to_thread(_translate, _write, temporary, content, True)
        _translate(temporary.replace, self._path(agent))
        await asyncio.to_thread(_translate, files.sync, self._directory)

    async def remove(self, agent: str) -> None:
        """Forgets the agent; on the disk when it returns. Raises StoreFull, HiveError."""
        del self.records[agent]
        for suffix in (".json", ".new", ".durable"):
            _translate(self._path(agent, suffix).unlink, True)
        _translate(self._whole.unlink, True)
        await asyncio.to_thread(_translate, files.sync, self._directory)

    def _path(self, agent: str, suffix: str = ".json") -> Path:
        return self._directory / f"{agent}{suffix}"


Kept = TypeVar("Kept", _File, _Whole)


def _read(path: Path, shape: type[Kept], version: int) -> Kept:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HiveError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(content, type=_Version).version
        if found != version:
            raise ConfigError(f"{path} is of version {found}, this Hive reads {version}")
        return msgspec.json.decode(content, type=shape)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is damaged: {error}", hint="Move it away: what is in it is then defined anew."
        ) from error


def noted_runs(directory: Path) -> dict[str, Run | None]:
    """Agent → its run, as the helper noted it; for who looks while no helper runs. Raises HiveError."""
    return {path.stem: _read(path, _File, VERSION).agent.run for path in directory.glob("*.json")}


def _stamp(path: Path) -> bytes:
    found = path.stat()
    return f"{found.st_ino} {found.st_mtime_ns}".encode()


def _encode(record: Record) -> bytes:
    return msgspec.json.encode(_File(agent=record))


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
        raise files.storage_error(error) from error
