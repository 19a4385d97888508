"""Adapters as they are configured: from where they may come, whose signatures hold, and who may change either."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from hive.adapters.keys import TRUSTED, TrustedKeys
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import ConfigError
from hive.settings.adapters import REQUIRED

OFF = "[adapters] dir is empty: no adapter can be brought"


class FoundDirectory(NamedTuple):
    """A directory as it was found. `why`: what is wrong with it, a clause; `mode`: 0 where it is not there."""

    path: Path
    why: str = ""
    mode: int = 0
    uid: int = 0


def found(path: Path) -> FoundDirectory:
    """Looks; follows no link. Raises PermissionError."""
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return FoundDirectory(path, "it is not there")
    except NotADirectoryError:
        return FoundDirectory(path, "something above it is no directory")
    if not stat.S_ISDIR(seen.st_mode):
        return FoundDirectory(path, "it is no directory")
    return FoundDirectory(path, mode=stat.S_IMODE(seen.st_mode), uid=seen.st_uid)


def look_at_dir(subject: Subject) -> CheckVerdict:
    section = subject.settings.adapters
    if not section.dir:
        return skipped(OFF)
    return judge_dir(found(Path(section.dir)), section.signatures)


def judge_dir(source: FoundDirectory, policy: str) -> CheckVerdict:
    """
    >>> judge_dir(FoundDirectory(Path("/srv/a"), mode=0o755), "required").reason
    'adapters are brought from /srv/a, if they are signed'
    >>> judge_dir(FoundDirectory(Path("/srv/a"), "it is not there"), "required").reason
    'adapters may be brought from /srv/a, and it is not there'
    """
    if source.why:
        return wrong("adapters_no_dir", path=source.path, why=source.why)
    if policy != REQUIRED:
        return wrong("adapters_unsigned", policy=policy, path=source.path)
    if source.mode & stat.S_IWOTH:
        return wrong("adapters_dir_open", path=source.path)
    return passed(f"adapters are brought from {source.path}, if they are signed")


def look_at_keys(subject: Subject) -> CheckVerdict:
    """Reads every key that is trusted."""
    section, paths = subject.settings.adapters, subject.paths
    if not section.dir:
        return skipped(OFF)
    if paths is None:
        return skipped("there is no Hive whose keys could be looked at")
    place = paths.adapter_keys(section.keys_dir)
    place = subject.layout.at(str(place)) if subject.is_appliance and not section.keys_dir else place
    owners = {0} if subject.is_appliance else {0, os.geteuid()}
    if others := judge_writers(found(place), owners):
        return others
    keys = TrustedKeys(place)
    try:
        listed = keys.listed()
        trusted = [key.id for key in listed if key.state == TRUSTED and keys.find(key.id) is not None]
    except ConfigError as error:
        if isinstance(error.__cause__, PermissionError) and not subject.is_root:
            return unseen(f"this user may not read {place}", "adapters.keys")
        return wrong("adapter_keys_wrong", why=error.message, hint=error.hint)
    return judge_keys(place, len(trusted), len(listed) - len(trusted), section.signatures)


def judge_writers(place: FoundDirectory, owners: set[int]) -> CheckVerdict | None:
    """Fails where others than the `owners` may write there, else None.

    >>> judge_writers(FoundDirectory(Path("/k"), mode=0o755), {0}) is None
    True
    >>> print(judge_writers(FoundDirectory(Path("/k"), mode=0o775), {0}).status)
    fail
    """
    if place.why or (not place.mode & 0o022 and place.uid in owners):
        return None
    return wrong("adapter_keys_open", path=place.path, owner="root" if owners == {0} else "this user")


def judge_keys(place: Path, trusted: int, revoked: int, policy: str) -> CheckVerdict:
    """
    >>> judge_keys(Path("/k"), 2, 1, "required").reason
    '2 keys are trusted and 1 is revoked, in /k'
    """
    if not trusted and policy == REQUIRED:
        return wrong("adapter_keys_none", path=place)
    said = f"{trusted} {'key is' if trusted == 1 else 'keys are'} trusted"
    return passed(f"{said} and {revoked} {'is' if revoked == 1 else 'are'} revoked, in {place}")


def look_at_installed(subject: Subject) -> CheckVerdict:
    """Looks whether servers of another user can read what is installed."""
    paths = subject.paths
    if paths is None:
        return skipped("there is no Hive whose adapters could be looked at")
    return judge_installed(found(paths.adapters), is_apart=paths.apart)


def judge_installed(place: FoundDirectory, *, is_apart: bool) -> CheckVerdict:
    """`is_apart`: the servers are another user's.

    >>> judge_installed(FoundDirectory(Path("/s/adapters"), "it is not there"), is_apart=True).reason
    'no adapter was ever brought'
    """
    if place.why == "it is not there":
        return skipped("no adapter was ever brought")
    if place.why or (is_apart and place.mode & 0o005 != 0o005):
        return wrong("adapters_unreadable", path=place.path)
    if place.mode & 0o022:
        return wrong("adapter_keys_open", path=place.path, owner="Hive")
    return passed(f"installed adapters are in {place.path}, readable for inference servers")


CHECKS = (
    Check("adapters.dir", "The directory that adapters are brought from is there, and not everybody's.", look_at_dir),
    Check("adapters.keys", "There is a key to verify adapters with, and nobody else can add one.", look_at_keys),
    Check("adapters.installed", "Inference servers can read what is installed.", look_at_installed),
)
