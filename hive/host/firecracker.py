"""The virtual machine monitor as a program of this host: which version it is, and what that version cannot do."""

from __future__ import annotations

import re
from pathlib import Path

from hive.host.program import run

VERSION_S = 2.0
"""`--version` says it in milliseconds."""
OLDEST = (1, 14, 0)
"""Its API is what Hive is written for: the balloon reports free pages from here on (firecracker CHANGELOG, 1.14)."""

Version = tuple[int, int, int]


def parse_version(text: str) -> Version | None:
    """The numbers in what a VMM calls its version; None where there are none.

    >>> parse_version("1.15.1"), parse_version("Firecracker v1.17.0-dev"), parse_version("main")
    ((1, 15, 1), (1, 17, 0), None)
    """
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


VSOCK_LOST_AT_PAUSE = frozenset({(1, 16, 0), (1, 16, 1)})
"""Every resume makes the vsock device wait for an answer its guest never gives (firecracker PR 6100, issue 6074)."""


def why_not_pause(version: str, *, has_vsock: bool) -> str:
    """The reason that a machine of this VMM version must not be paused, as a sentence; empty where it may be.

    >>> why_not_pause("1.15.1", has_vsock=True), why_not_pause("1.16.1", has_vsock=False)
    ('', '')
    >>> why_not_pause("1.16.1", has_vsock=True)
    'Firecracker 1.16.1 loses vsock at every pause (firecracker PR 6100): use 1.15.1, or 1.17'
    """
    if not has_vsock or (numbers := parse_version(version)) not in VSOCK_LOST_AT_PAUSE:
        return ""
    assert numbers is not None
    return f"Firecracker {_plain(numbers)} loses vsock at every pause (firecracker PR 6100): use 1.15.1, or 1.17"


def why_too_old(version: str) -> str:
    """The reason that no machine of this VMM version can start, as a sentence; empty where one can.

    >>> why_too_old("1.13.1"), why_too_old("1.15.1"), why_too_old("main")
    ('Firecracker 1.13.1 is too old: Hive needs 1.14.0 or newer', '', '')
    """
    numbers = parse_version(version)
    if numbers is None or numbers >= OLDEST:
        return ""
    return f"Firecracker {_plain(numbers)} is too old: Hive needs {_plain(OLDEST)} or newer"


def _plain(version: Version) -> str:
    return ".".join(map(str, version))


def ask_version(program: Path) -> str:
    """The first line printed by `program --version`. Blocks. Raises NotFound, NotPermitted, TimedOut, HiveError."""
    said = run([str(program), "--version"], limit_s=VERSION_S).text.strip().splitlines()
    return said[0] if said else ""
