"""The steps of an installation that change the running system: users, directories, secrets, versions, services."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hive.errors import HiveError
from hive.files import layout, secrets, share
from hive.files.directory_list import Directory, parse_tmpfiles
from hive.host import program, zram
from hive.host.files import give_tree, remove, remove_tree, remove_tree_below_mounts
from hive.host.memory import read_memory
from hive.install.steps import SAVED, Box, QuietStep

NO_SWAP = "this host has no swap, so sleeping agents keep all of their RAM; "
SWAP_OFFER = (
    "`sudo hive doctor memory.swap --fix` makes one of compressed RAM, until the next boot; a swap file works, too"
)
MANIFEST_NAME = os.path.basename(layout.MANIFEST)


def call(command: Sequence[str], *, limit_s: float = program.LIMIT_S) -> str:
    """The output of the command. Raises HiveError where it fails."""
    ran = program.run(command, limit_s=limit_s)
    if ran.code != 0:
        raise HiveError(f"`{' '.join(command)}` failed ({ran.code}): {ran.last_line}")
    return ran.text


# --- users -------------------------------------------------------------------------------------------------------


class Names(NamedTuple):
    """Users and groups a sysusers.d file makes."""

    users: list[str]
    groups: list[str]


def parse_sysusers(text: str) -> Names:
    """A user brings a group of its name along.

    >>> parse_sysusers('u hive - "Hive"\\ng hive-admin -\\nm hive systemd-journal\\n')
    Names(users=['hive'], groups=['hive', 'hive-admin'])
    """
    words = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    users = [word[1] for word in words if word[0].rstrip("!") == "u"]
    return Names(users, [*users, *(word[1] for word in words if word[0] == "g")])


def _users_there(names: Sequence[str]) -> list[str]:
    return [entry.pw_name for entry in pwd.getpwall() if entry.pw_name in names]


def _groups_there(names: Sequence[str]) -> list[str]:
    return [entry.gr_name for entry in grp.getgrall() if entry.gr_name in names]


class Users(QuietStep):
    """Users and groups of systemd/sysusers.d. An image gets them from its own systemd-sysusers when it boots."""

    name = "users"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan(self) -> list[str]:
        if not self._box.layout.live:
            return []
        names, missing = self._names(), self._missing()
        created = [f"create user {name}" for name in missing.users]
        created += [f"create group {name}" for name in missing.groups if name not in names.users]
        return [*created, f"run systemd-sysusers {layout.SYSUSERS}"] if created else []

    def do(self) -> None:
        missing = self._missing()
        manifest = self._box.manifest
        manifest.users = [*manifest.users, *(name for name in missing.users if name not in manifest.users)]
        manifest.groups = [*manifest.groups, *(name for name in missing.groups if name not in manifest.groups)]
        self._box.intend({})
        call(["systemd-sysusers", layout.SYSUSERS])

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        manifest = self._box.manifest
        groups = [f"remove group {name}" for name in manifest.groups if name not in manifest.users]
        return [*(f"remove user {name}" for name in manifest.users), *groups]

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        manifest = self._box.manifest
        for name in _users_there(manifest.users):
            call(["userdel", name])
        for name in _groups_there(manifest.groups):
            if members := grp.getgrnam(name).gr_mem:
                self._box.say(f"group {name} had members: {', '.join(members)}")
            call(["groupdel", name])
        if manifest.users or manifest.groups:
            manifest.users, manifest.groups = [], []
            manifest.save(self._box.layout)

    def _names(self) -> Names:
        found = [unit for unit in share.units(self._box.share) if unit.path.startswith("/etc/sysusers.d/")]
        return parse_sysusers("\n".join(unit.content.decode() for unit in found))

    def _missing(self) -> Names:
        names = self._names()
        users, groups = _users_there(names.users), _groups_there(names.groups)
        return Names([n for n in names.users if n not in users], [n for n in names.groups if n not in groups])


# --- directories -------------------------------------------------------------------------------------------------


class Directories(QuietStep):
    """Directories of systemd/tmpfiles.d, and the state an earlier Hive left in them: it gets its owners back."""

    name = "directories"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan(self) -> list[str]:
        if not self._box.layout.live:
            return []
        wrong = [directory.path for directory in self._directories() if not _is_right(directory)]
        return (
            [*(f"make {path}" for path in wrong), f"run systemd-tmpfiles --create {layout.TMPFILES}"] if wrong else []
        )

    def do(self) -> None:
        # Those of the state go with it, those in /run with the boot.
        elsewhere = [one.path for one in self._directories() if not one.path.startswith((layout.STATE, "/run/"))]
        self._box.intend({}, directories=elsewhere)
        for directory in self._owned():
            if Path(directory.path).is_dir():
                give_tree(
                    Path(directory.path), _owner_of(directory), only=lambda found: found.st_uid == found.st_gid == 0
                )
        # The directories themselves last: by their owners it is seen that this is done.
        call(["systemd-tmpfiles", "--create", layout.TMPFILES])

    def plan_undo(self, *, purge: bool) -> list[str]:
        kept = f"remove {layout.STATE}" if purge else f"keep {layout.STATE} (it belongs to root then)"
        slots = [f"remove what is in {place}" for place in layout.SLOTS if not purge and self._kept_slots(place)]
        return [kept, *slots, *(f"remove {path}" for path in layout.RUNTIMES if self._box.at(path).exists())]

    def undo(self, *, purge: bool) -> None:
        for path in layout.RUNTIMES:
            remove_tree(self._box.at(path))
        state = self._box.at(layout.STATE)
        if purge:
            for entry in state.iterdir() if state.is_dir() else ():
                if entry.name != MANIFEST_NAME:
                    for mount in remove_tree_below_mounts(entry):
                        self._box.say(f"note: {mount} is a mount point: it is emptied, and stays")
        elif self._box.layout.live:
            for entry in [one for place in layout.SLOTS for one in self._kept_slots(place)]:
                remove_tree(entry)
            # A user that gets these numbers next, when these users are gone, must not get their files.
            uids, gids = _ids_of(self._box.manifest.users, self._box.manifest.groups)
            for directory in self._directories():
                there = Path(directory.path)
                if directory.path.startswith(f"{layout.STATE}/") and there.is_dir():
                    give_tree(there, (0, 0), only=lambda found: found.st_uid in uids or found.st_gid in gids)
                    os.chown(there, 0, 0)

    def _kept_slots(self, place: str) -> list[Path]:
        try:
            return list(self._box.at(place).iterdir())
        except OSError:  # there is none, or a user who is not root asks for the plan
            return []

    def _owned(self) -> list[Directory]:
        """The directories of the state with content of a service. Content that all may read is not a service's."""
        found = [one for one in self._directories() if one.path.startswith(f"{layout.STATE}/")]
        return [one for one in found if one.user != "root" or (one.group != "root" and not one.mode & 0o005)]

    def _directories(self) -> list[Directory]:
        found = [unit for unit in share.units(self._box.share) if unit.path.startswith("/etc/tmpfiles.d/")]
        return [one for unit in found for one in parse_tmpfiles(unit.content.decode())]


def _is_right(directory: Directory) -> bool:
    try:
        found = os.lstat(directory.path)
        owner = _owner_of(directory)
    except (OSError, KeyError):
        return False
    return (found.st_uid, found.st_gid) == owner and found.st_mode & 0o7777 == directory.mode


def _owner_of(directory: Directory) -> tuple[int, int]:
    return pwd.getpwnam(directory.user).pw_uid, grp.getgrnam(directory.group).gr_gid


def _ids_of(users: Sequence[str], groups: Sequence[str]) -> tuple[set[int], set[int]]:
    """Never root's, whatever is in the manifest."""
    uids = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_name in users}
    return uids - {0}, {entry.gr_gid for entry in grp.getgrall() if entry.gr_name in groups} - {0}


# --- secrets -----------------------------------------------------------------------------------------------------


class Secrets(QuietStep):
    """The secrets and the ACL of Redis. An image gets them at its first boot: each box has its own."""

    name = "secrets"

    def __init__(self, box: Box) -> None:
        self._box = box

    def plan(self) -> list[str]:
        if not self._box.layout.live:
            return []
        missing = secrets.missing(self._box.layout)
        made = [f"generate {layout.SECRETS}/{name}" for name in missing]
        return made if secrets.acl_is_right(self._box.layout) else [*made, f"write {layout.REDIS_ACL}"]

    def do(self) -> None:
        self._box.intend({}, directories=[layout.SECRETS, layout.REDIS])
        secrets.generate(self._box.layout)

    def notices(self) -> list[str]:
        return [] if self._box.layout.live else ["secrets are made at the first boot (hive-first-boot.service)"]

    def plan_undo(self, *, purge: bool) -> list[str]:
        return [f"{'remove' if purge else 'keep'} {layout.SECRETS}", f"remove {layout.REDIS_ACL}"]

    def undo(self, *, purge: bool) -> None:
        if self._box.at(layout.REDIS).is_dir():
            remove(self._box.at(layout.REDIS_ACL))
        if purge and secrets.directory(self._box.layout).is_dir():
            secrets.remove_all(self._box.layout)


class EarlierSecrets(QuietStep):
    """The secrets and the ACL of Redis as an earlier version wants them, which is put back: it writes them itself."""

    name = Secrets.name

    def __init__(self, box: Box) -> None:
        self._box = box
        self._command = [str(box.venv / "bin" / "hive"), "secrets", "generate"]

    def plan(self) -> list[str]:
        return [" ".join(self._command)] if self._box.layout.live else []

    def do(self) -> None:
        ran = program.run(self._command)
        if ran.code:
            raise HiveError(f"{' '.join(self._command)}: {ran.last_line}")


# --- versions ----------------------------------------------------------------------------------------------------


class Leftovers(QuietStep):
    """Files that an earlier version had and this one has not. What was kept of a changed one stays until the end."""

    name = "leftovers"

    def __init__(self, box: Box, wanted: Callable[[], set[str]]) -> None:
        self._box = box
        self._wanted = wanted

    def plan(self) -> list[str]:
        unread = [f"{layout.SECRETS}/{name}" for name in self._unread()]
        return [f"remove {path}" for path in (*self._outdated(), *unread)]

    def do(self) -> None:
        self._box.take_away(self._outdated())
        secrets.remove_retired(self._box.layout, self._unread())

    def plan_undo(self, *, purge: bool) -> list[str]:  # noqa: ARG002
        return [f"remove {path}" for path in self._left()]

    def undo(self, *, purge: bool) -> None:  # noqa: ARG002
        self._box.take_away(self._left())

    def _unread(self) -> list[str]:
        """Retired secrets that no unit of this version reads; an earlier one, which is put back, has some that do."""
        units = "".join(unit.content.decode(errors="replace") for unit in share.units(self._box.share))
        return [name for name in secrets.retired(self._box.layout) if f"LoadCredential={name}:" not in units]

    def _outdated(self) -> list[str]:
        return [path for path in self._left() if not path.endswith(SAVED)]

    def _left(self) -> list[str]:
        wanted = self._wanted()
        return [path for path in self._box.manifest.files if path not in wanted]


class OldVersions(QuietStep):
    """Environments that are not needed any more: of earlier versions, of some that failed, or never were complete."""

    def __init__(self, box: Box, name: str, *, kept: Callable[[], set[str]]) -> None:
        self.name = name
        self._box = box
        self._kept = kept

    def plan(self) -> list[str]:
        return [f"remove {self._box.layout.version(name)}" for name in self._versions()]

    def do(self) -> None:
        for name in self._versions():
            remove_tree(self._box.at(self._box.layout.version(name)))

    def _versions(self) -> list[str]:
        top = self._box.at(layout.VERSIONS)
        kept = self._kept()
        return sorted(path.name for path in top.iterdir() if path.name not in kept) if top.is_dir() else []


class SwapOffer(QuietStep):
    """Changes nothing: what memory of an agent that sleeps deep goes to is for a person to decide."""

    name = "swap"

    def __init__(self, box: Box) -> None:
        self._box = box

    def notices(self) -> list[str]:
        if not self._box.layout.live or read_memory().swap_total_bytes != 0:
            return []
        return [NO_SWAP + (zram.why_not() or SWAP_OFFER)]


def remove_code(box: Box) -> None:
    """Takes away the environments, also the one this runs from: nothing more is imported after this."""
    remove_tree(box.at(layout.CODE))


def previous(box: Box) -> str:
    """The version to go back to: the one that was seen to work last, where it is another and still there."""
    name = box.manifest.running
    if not name or name == box.version or not (box.at(box.layout.version(name)) / "bin" / "hive").exists():
        return ""
    return name


def version_links(box: Box) -> dict[str, str]:
    return {layout.CURRENT: f"versions/{box.version}", layout.PROGRAM: f"{layout.CURRENT}/bin/hive"}
