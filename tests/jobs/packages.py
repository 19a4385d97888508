"""Installed packages for programs that other users run: in a directory that everybody may read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A package and all that it needs here, added to `found`."""
    if name not in found:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another system or another extra
            return found
        for requirement in found[name].requires or ():
            if "extra ==" not in requirement:
                needed(re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-"), found)
    return found


def files_of(packages: dict[str, Distribution]) -> Iterator[tuple[Path, str]]:
    """Each file, and its place among them."""
    for one in packages.values():
        for file in one.files or ():
            if file.parts[0] not in ("..", "__pycache__") and (path := Path(str(file.locate()))).is_file():
                yield path, str(file)


def copy_packages(names: list[str], target: Path) -> Path:
    """Copies them there, with what they need; what belongs on PYTHONPATH."""
    packages: dict[str, Distribution] = {}
    for name in names:
        needed(name, packages)
    for path, place in files_of(packages):
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / place)
    return target
