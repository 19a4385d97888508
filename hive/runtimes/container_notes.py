"""The facts of a container that the helper needs after its own death, in one directory of Hive's per agent."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


class Notes:
    """`asleep` is there from before Hive pauses the container until it is known to run again: a paused container
    without it was paused by somebody else. `container` is there while the engine may have one; `address`: where its
    port is; `log`: see container_log.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._asleep = directory / "asleep"
        self._container = directory / "container"
        self._address = directory / "address"

    def __repr__(self) -> str:
        return f"<Notes {self.directory.name}{' asleep' if self.asleep else ''}>"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def asleep(self) -> bool:
        return self._asleep.exists()

    @asleep.setter
    def asleep(self, so: bool) -> None:
        """Raises OSError (a full disk) only where it becomes so."""
        _mark(self._asleep, so)

    @property
    def has_container(self) -> bool:
        return self._container.exists()

    @has_container.setter
    def has_container(self, so: bool) -> None:
        """Raises OSError (a full disk) only where it becomes so."""
        _mark(self._container, so)

    def begin(self) -> None:
        """A container is about to be made. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.asleep = False
        self.has_container = True

    @property
    def address(self) -> str:
        try:
            return self._address.read_text()
        except OSError:
            return ""

    @address.setter
    def address(self, address: str) -> None:
        """Raises OSError."""
        self._address.write_text(address)

    def remove(self) -> None:
        """All of it. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


def _mark(note: Path, so: bool) -> None:
    if so:
        note.touch(mode=0o600)
    else:
        with contextlib.suppress(OSError):
            note.unlink()
