"""The files of Hive that are no code: where the package brings them, and what becomes of each on a box.

They are part of the package (`[tool.setuptools.data-files]`), so an installed environment needs no checkout.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hive.build import home
from hive.errors import HiveError, NotFound
from hive.files import layout
from hive.host import program

_PAGE = re.compile(r"(.+)\.([1-9])\.scd")
_OUTSIDE_UNITS = {"sysusers.d": "/etc/sysusers.d", "tmpfiles.d": "/etc/tmpfiles.d"}
"""Directories of systemd/ that are not for /etc/systemd/system."""


class Managed(NamedTuple):
    """A file the installer puts there and replaces with every version; `path` as the installed Hive sees it."""

    path: str
    content: bytes
    mode: int = 0o644


def directory() -> Path:
    """Directory of systemd/, conf/ and man/ of this very Hive (hive.build.home)."""
    return home()


def units(share: Path) -> list[Managed]:
    """Everything of systemd/: units and their drop-ins, users, directories. Raises NotFound where there is none."""
    top = share / "systemd"
    found = [path for path in sorted(top.rglob("*")) if path.is_file() and not path.name.startswith((".", "README"))]
    if not found:
        raise NotFound(f"there are no units in {top}", hint="install Hive again: this one is not complete")
    return [Managed(_unit_place(path.relative_to(top)), path.read_bytes()) for path in found]


def _unit_place(name: Path) -> str:
    """
    >>> _unit_place(Path("hive.target")), _unit_place(Path("tmpfiles.d/hive.conf"))
    ('/etc/systemd/system/hive.target', '/etc/tmpfiles.d/hive.conf')
    """
    outside = _OUTSIDE_UNITS.get(name.parts[0])
    return f"{layout.UNITS}/{name}" if outside is None else f"{outside}/{name.name}"


def redis_conf(share: Path) -> Managed:
    return Managed(layout.REDIS_CONF, (share / "conf" / "redis.conf").read_bytes())


def policy(share: Path) -> bytes:
    """The helper's policy that a new box begins with."""
    return (share / "conf" / "sandbox.toml").read_bytes()


def pages(share: Path) -> list[tuple[Path, str]]:
    """Sources of the manual, each with its place."""
    found = [(path, match) for path in sorted((share / "man").glob("*.scd")) if (match := _PAGE.fullmatch(path.name))]
    return [(path, f"{layout.MAN}/man{match[2]}/{match[1]}.{match[2]}") for path, match in found]


def manual(share: Path) -> list[Managed]:
    """The manual as `man` reads it; empty where scdoc is not installed. Raises HiveError where a page is not valid."""
    if not program.is_there("scdoc"):
        return []
    return [Managed(place, _formatted(path)) for path, place in pages(share)]


def _formatted(source: Path) -> bytes:
    """Dated as its source is: the same page is the same file."""
    env = {**program.PLAIN, "SOURCE_DATE_EPOCH": f"{source.stat().st_mtime:.0f}"}
    # scdoc reads its standard input only.
    made = program.run(["/bin/sh", "-c", 'exec scdoc <"$1"', "sh", str(source)], env=env)
    if made.code != 0:
        raise HiveError(f"scdoc does not take {source}: {made.last_line}")
    return made.text.encode()


def completions() -> list[Managed]:
    """The scripts each shell completes `hive` with: they ask the program itself."""
    from typer._completion_shared import get_completion_script

    return [
        Managed(
            place,
            get_completion_script(prog_name="hive", complete_var="_HIVE_COMPLETE", shell=shell).encode() + b"\n",
        )
        for shell, place in layout.COMPLETIONS.items()
    ]
