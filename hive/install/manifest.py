"""The things that the installer made on this box, so that it takes away exactly those (`/var/lib/hive/install.json`).

Intent first: a thing is written down before it is made. So a thing that is there and not in this list is somebody
else's, wherever an earlier run was cut off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hive.errors import ConfigError
from hive.files.layout import MANIFEST, Layout
from hive.host.files import translated, write_whole

FORMAT = 1


class InstallManifest(msgspec.Struct, kw_only=True):
    """`files`: path → SHA-256 of each content Hive may have put there (two while it is being replaced), a link's
    target for a link. `directories`: those that were not there before, in the order they were made. `running`: the
    version that was seen to work last, empty for none."""

    format: int = FORMAT
    files: dict[str, list[str]] = {}
    directories: list[str] = []
    users: list[str] = []
    groups: list[str] = []
    running: str = ""
    settled: bool = False
    """Set once the version that was put there last was also started."""

    @classmethod
    def load(cls, layout: Layout) -> InstallManifest:
        """The one of this root, an empty one where there is none. Raises ConfigError where it cannot be read."""
        path = layout.at(MANIFEST)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint="move it away, then run the installer") from None
        if found.format > FORMAT:
            raise ConfigError(f"{path} was written by a newer Hive", hint="use that one's installer")
        return found

    def save(self, layout: Layout) -> None:
        """Raises NotPermitted, StoreFull."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        path = layout.at(MANIFEST)
        with translated(path):
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(path, content, mode=0o644)

    def knows(self, path: str) -> bool:
        return path in self.files

    def expect(self, path: str, mark: str) -> None:
        """`path` is about to become what `mark` is of, and may be what it was so far until then."""
        marks = self.files.setdefault(path, [])
        if mark not in marks:
            self.files[path] = [*marks[-1:], mark]

    def add_directories(self, paths: Iterable[str]) -> None:
        self.directories.extend(path for path in paths if path not in self.directories)


def mark_of(content: bytes) -> str:
    """The mark by which a content is known again."""
    return hashlib.sha256(content).hexdigest()


def mark_at(path: Path) -> str:
    """The mark of what is at `path` now: of its content, a link's target; empty where nothing is."""
    if path.is_symlink():
        return str(path.readlink())
    try:
        return mark_of(path.read_bytes())
    except OSError:
        return ""


def missing_directories(layout: Layout, directory: str) -> list[str]:
    """The directories above and including `directory` that are not there, outermost first."""
    chain = [Path(directory), *Path(directory).parents]
    return [path.as_posix() for path in reversed(chain) if not layout.at(path.as_posix()).exists()]
