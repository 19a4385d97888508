"""Records of a helper on disk, each in a 0600 file of its own that is only ever replaced whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Record = TypeVar("Record")


class RecordFiles(Generic[Record]):
    """The records of one kind in `directory`, by name. They survive a kill of the helper, which is all that is asked of
    pids: nothing waits for the disk."""

    def __init__(self, directory: Path, kind: type[Record]) -> None:
        self._directory = directory
        self._kind = kind

    def __repr__(self) -> str:
        return f"<RecordFiles {self._directory}>"

    def load(
        self, why_wrong: Callable[[str, Record], str], on_damaged: Callable[[Path, Exception], None]
    ) -> dict[str, Record]:
        """All of them by name. One that cannot be understood, or of which `why_wrong` has something to say, is moved
        aside and told."""
        found: dict[str, Record] = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=self._kind)
                if why := why_wrong(path.stem, record):
                    raise msgspec.ValidationError(why)
                found[path.stem] = record
            except (OSError, msgspec.MsgspecError) as error:
                on_damaged(path, error)
                with contextlib.suppress(OSError):
                    path.replace(path.with_suffix(".damaged"))
        return found

    def save(self, name: str, record: Record) -> None:
        """Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{name}.json"
        new = path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(record))
        new.replace(path)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / f"{name}.json").unlink(missing_ok=True)
