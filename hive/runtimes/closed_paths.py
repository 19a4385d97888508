"""The paths in an agent's command that its user may not read: `python3 /root/x/agent.py` ends with 2 at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SIGNALLED = 128
"""Exit codes from here on are of a signal: no file's doing."""
ACCESS_LIST = "system.posix_acl_access"
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
"""Directories that `ProtectHome=` hides from an agent in a unit; the helper sees them."""
PUT_ELSEWHERE = "put it where every user may read, as below /srv/agents"


class PathRights(NamedTuple):
    """A file or directory by who may do what with it."""

    mode: int
    uid: int
    gid: int


def may(step: PathRights, uid: int, gid: int, right: int) -> bool:
    """Whether a user that is in one group has `right` (4 to read, 1 to enter): the first class that fits decides.

    >>> [may(PathRights(0o604, 7, 7), uid, gid, 4) for uid, gid in ((7, 7), (8, 7), (8, 8))]
    [True, False, True]
    """
    shift = 6 if uid == step.uid else 3 if gid == step.gid else 0
    return bool(step.mode >> shift & right)


def is_open(above: Sequence[PathRights], last: PathRights, uid: int, gid: int) -> bool:
    """Whether this user may read `last` and enter each directory above it.

    >>> closed, public, file = PathRights(0o700, 0, 0), PathRights(0o755, 0, 0), PathRights(0o644, 0, 0)
    >>> is_open([public, closed], file, 1001, 1001), is_open([public, public], file, 1001, 1001)
    (False, True)
    """
    return all(may(step, uid, gid, 1) for step in above) and may(last, uid, gid, 4)


def why_unread(
    command: Sequence[str], exit_code: int | None, uid: int | None, gid: int | None, *, hides_homes: bool = False
) -> str:
    """The sentence for an agent that ended with this code, empty where its files are no reason. Looks at the disk.

    `hides_homes`: of an agent that sees none of `HOMES`, whoever may read what is there.

    Where an access list grants what modes do not, nothing is said.
    """
    if uid is None or not exit_code or exit_code >= SIGNALLED:
        return ""
    for word in command[1:]:
        if not os.path.isabs(word):
            continue
        if _is_closed(word, uid, uid if gid is None else gid):
            return f"it runs as uid {uid}, which may not read {word}: {PUT_ELSEWHERE}"
        if hides_homes and any(home in Path(os.path.normpath(word)).parents for home in HOMES):
            return f"it runs as uid {uid}, which does not see {word} (its sandbox hides homes): {PUT_ELSEWHERE}"
    return ""


def _is_closed(word: str, uid: int, gid: int) -> bool:
    try:
        path = Path(os.path.realpath(word))
        last = path.stat()
        if not (stat.S_ISREG(last.st_mode) or stat.S_ISDIR(last.st_mode)):
            return False
        *above, found = [_step(each) for each in (*reversed(path.parents), path)]
        return not is_open(above, found, uid, gid) and not any(_has_access_list(each) for each in (path, *path.parents))
    except (OSError, ValueError):
        return False  # not there, or not seen from here


def _step(path: Path) -> PathRights:
    found = path.stat()
    return PathRights(found.st_mode, found.st_uid, found.st_gid)


def _has_access_list(path: Path) -> bool:
    try:
        return ACCESS_LIST in os.listxattr(path)
    except OSError:
        return False
