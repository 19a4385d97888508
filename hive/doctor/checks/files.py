"""Modes and owners of what Hive keeps: secrets, state, sockets."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hive.conditions import TABLE, Severity
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import AS_ROOT, NotFound, NotPermitted
from hive.files import share
from hive.files.directory_list import parse_tmpfiles
from hive.files.layout import CONF_FILE, CONFIGURATION, POLICY_FILE, REDIS_ACL, RUNTIMES, STATE
from hive.files.layout import SECRETS as SECRETS_PLACE
from hive.files.secrets import SECRETS
from hive.settings.table import Paths
from hive.terminal_text import counted


class PathRow(NamedTuple):
    """Mode and owner that one path has to have. `user`, `group`: None for any. `mode`: exactly; None if only
    `forbidden` bits count. `is_optional`: it may be missing."""

    path: Path
    user: str | None
    group: str | None
    mode: int | None
    forbidden: int = 0
    is_optional: bool = True


class FoundPath(NamedTuple):
    """Mode and owner of a path as found. `mode` None: nothing is there; `may_not`: this user cannot tell."""

    row: PathRow
    user: str = ""
    group: str = ""
    mode: int | None = None
    is_link: bool = False
    may_not: bool = False


# --- the contract ------------------------------------------------------------------------------------------------

RUN, INFERENCE, MODELS, JOBS = RUNTIMES
TMPFILES_SOURCE = "systemd/tmpfiles.d/hive.conf"
_FILES = (
    (f"{STATE}/daemon/hive.db", "hive", "hive", 0o600),
    (f"{STATE}/daemon/responses.db", "hive", "hive", 0o600),
    (f"{STATE}/daemon/jobs", "hive", "hive", 0o700),
    (CONFIGURATION, "root", "root", 0o755),
    (CONF_FILE, "root", "root", 0o644),
    (POLICY_FILE, "root", "root", 0o644),
)
_SOCKETS = {
    "hive.sock": ("hive", "hive", 0o660),
    "link.sock": ("hive", "hive-proxy", 0o660),
    "sandbox.sock": ("root", "hive-proxy", 0o660),
    "redis.sock": ("hive-redis", "hive", 0o770),
    "proxy.sock": ("hive-proxy", "hive", 0o660),
    "jobs.sock": ("hive-proxy", "hive-jobs", 0o660),
}
"""Owner, group and mode of each in /run/hive, whichever directory of it the socket is in."""
_BACKEND = ("hive-inference", "hive-inference", None, 0o007)
"""Its mode is what the server makes of the unit's UMask=."""
_AGENTS = "a"
_CHECK = {"secret": "files.secrets", "file": "files.state", "socket": "files.sockets"}


def directory_rows(subject: Subject, *, below: Sequence[str]) -> list[PathRow]:
    """The directories systemd makes for an appliance, by the very file that tells it to."""
    text = (share.directory() / TMPFILES_SOURCE).read_text()
    return [
        PathRow(subject.layout.at(one.path), one.user, one.group, one.mode, is_optional=False)
        for one in parse_tmpfiles(text)
        if any(one.path == top or one.path.startswith(f"{top}/") for top in below)
    ]


def secret_rows(subject: Subject) -> list[PathRow]:
    """Each that has to be there; every other file in their directory counts as one, too."""
    if not subject.is_appliance:
        return [_own(path, 0o077) for path in _secrets_of_up(subject.paths)]
    directory = subject.layout.at(SECRETS_PLACE)
    known = [directory / name for name in SECRETS]
    rows = [PathRow(directory, "root", "root", 0o700, is_optional=False)]
    rows += [PathRow(path, "root", "root", 0o600, is_optional=False) for path in known]
    rows += [PathRow(path, "root", "root", 0o600) for path in _entries(directory) if path not in known]
    return [*rows, PathRow(subject.layout.at(REDIS_ACL), "root", "hive-redis", 0o640)]


def _secrets_of_up(paths: Paths | None) -> list[Path]:
    return [] if paths is None else [paths.box_key, paths.internal_token]


def state_rows(subject: Subject) -> list[PathRow]:
    if subject.is_appliance:
        kept = [PathRow(subject.layout.at(path), user, group, mode) for path, user, group, mode in _FILES]
        return [*directory_rows(subject, below=(STATE, CONFIGURATION)), *kept]
    if (paths := subject.paths) is None:
        return []
    private = (
        paths.database,
        paths.responses,
        paths.jobs,
        paths.redis_dir,
        paths.spool,
        paths.log("x").parent,
        paths.sandbox_table,
    )
    # Agents of other uids pass through these two, and may list neither.
    return [_own(paths.state, 0o066), _own(paths.home("x").parent, 0o066), *(_own(path, 0o077) for path in private)]


def socket_rows(subject: Subject) -> list[PathRow]:
    if subject.is_appliance:
        return [*directory_rows(subject, below=RUNTIMES), *_appliance_sockets(subject)]
    if (paths := subject.paths) is None:
        return []
    sockets = [paths.api_socket, paths.link_socket, paths.sandbox_socket, paths.redis_socket, paths.admin_socket]
    sockets.append(paths.job_entry_socket)
    agents = [PathRow(path, None, None, None, 0o077) for path in _entries(paths.runtime / "a")]
    return [_own(paths.runtime, 0o066), *(_own(path, 0o077) for path in sockets), *agents]


def _appliance_sockets(subject: Subject) -> list[PathRow]:
    top = subject.layout.at(RUN)
    # In the directory above them is a link to one of them, by which people know it.
    directories = [path for path in _entries(top) if path.is_dir() and path.name != _AGENTS]
    found = [PathRow(path / name, *meant) for path in directories for name, meant in _SOCKETS.items()]
    backends = [PathRow(path, *_BACKEND) for path in _entries(subject.layout.at(INFERENCE)) if path.suffix == ".sock"]
    backends += [PathRow(path / "s.sock", *_BACKEND) for path in _entries(subject.layout.at(MODELS))]
    agents = [PathRow(path, None, None, None, 0o077) for path in _entries(top / _AGENTS)]
    jobs = PathRow(subject.layout.at(JOBS) / "link.sock", "hive", "hive", 0o600)
    return [*found, *backends, *agents, jobs]


def _own(path: Path, forbidden: int) -> PathRow:
    return PathRow(path, None, None, None, forbidden)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


# --- looking -----------------------------------------------------------------------------------------------------


def look_at(rows: Iterable[PathRow]) -> Iterator[FoundPath]:
    for row in rows:
        try:
            found = row.path.lstat()
        except PermissionError:
            yield FoundPath(row, may_not=True)
        except OSError:
            yield FoundPath(row)
        else:
            mode = stat.S_IMODE(found.st_mode)
            yield FoundPath(row, _user(found.st_uid), _group(found.st_gid), mode, stat.S_ISLNK(found.st_mode))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def look_at_secrets(subject: Subject) -> CheckVerdict:
    return judge(look_at(secret_rows(subject)), "secret")


def look_at_state(subject: Subject) -> CheckVerdict:
    return judge(look_at(state_rows(subject)), "file")


def look_at_sockets(subject: Subject) -> CheckVerdict:
    return judge(look_at(socket_rows(subject)), "socket")


# --- judging -----------------------------------------------------------------------------------------------------


class PathProblem(NamedTuple):
    """Fault of one path: a code of hive.conditions and its facts. An error where somebody may do more than
    meant."""

    code: str
    facts: dict[str, Any]


def problem_of(found: FoundPath) -> PathProblem | None:
    """
    >>> row = PathRow(Path("/k"), "root", "root", 0o600)
    >>> problem_of(FoundPath(row, "root", "root", 0o640)).code
    'file_mode_open'
    >>> problem_of(FoundPath(row, "root", "root", 0o600)) is None
    True
    """
    row, mode = found.row, found.mode
    if found.may_not:
        return None
    if mode is None:
        return None if row.is_optional else PathProblem("file_missing", {"path": row.path})
    if found.is_link:
        return PathProblem("file_is_link", {"path": row.path})
    for kind, wanted, is_one in (("user", row.user, found.user), ("group", row.group, found.group)):
        if wanted is not None and wanted != is_one:
            return PathProblem("file_owner", {"path": row.path, "kind": kind, "found": is_one, "wanted": wanted})
    facts = {"path": row.path, "mode": f"{mode:o}"}
    if row.mode is not None and mode != row.mode:
        code = "file_mode_open" if mode & ~row.mode else "file_mode_closed"
        return PathProblem(code, {**facts, "wanted": f"{row.mode:o}"})
    if mode & row.forbidden:
        return PathProblem("file_readable", {**facts, "do": "read or write" if row.forbidden == 0o077 else "list"})
    return None


def judge(found: Iterable[FoundPath], what: str) -> CheckVerdict:
    """The worst first. `what`: one of them is called so: `secret`, `file`, `socket`."""
    all_found = list(found)
    problems = [problem for one in all_found if (problem := problem_of(one)) is not None]
    problems.sort(key=lambda problem: TABLE[problem.code].severity is not Severity.ERROR)
    if problems:
        code, facts = problems[0]
        code = "secret_missing" if (code, what) == ("file_missing", "secret") else code
        return wrong(code, check=_CHECK[what], more=len(problems) - 1, **facts)
    there = [one for one in all_found if one.mode is not None]
    if closed := [one for one in all_found if one.may_not]:
        return unseen(f"{closed[0].row.path}: this user cannot tell", _CHECK[what])
    if not there:
        return skipped(f"no {what} is there yet")
    return passed(f"{counted(len(there), what)} with the right owner and mode")


# --- mending -----------------------------------------------------------------------------------------------------


def mend_secrets(subject: Subject) -> str:
    return mend(secret_rows(subject))


def mend_state(subject: Subject) -> str:
    return mend(state_rows(subject))


def mend_sockets(subject: Subject) -> str:
    return mend(socket_rows(subject))


def mend(rows: Sequence[PathRow]) -> str:
    """Gives each its owner and mode; what is missing or a link is left as it is.

    Raises NotPermitted, NotFound (no such user or group).
    """
    mended = 0
    for found in look_at(rows):
        problem = problem_of(found)
        if problem is None or found.mode is None or found.is_link:
            continue
        try:
            _mend(found.row, found.mode)
        except PermissionError as error:
            raise NotPermitted(f"cannot change {found.row.path}: {error.strerror}", hint=AS_ROOT) from None
        except KeyError as error:
            raise NotFound(f"cannot change {found.row.path}: {error.args[0]}", hint="sudo hive install") from None
        mended += 1
    return f"owner and mode of {mended} set"


def _mend(row: PathRow, mode: int) -> None:
    """By a descriptor: between looking and changing nobody may put a link there."""
    uid = -1 if row.user is None else pwd.getpwnam(row.user).pw_uid
    gid = -1 if row.group is None else grp.getgrnam(row.group).gr_gid
    fd = os.open(row.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        held = f"/proc/self/fd/{fd}"
        if (uid, gid) != (-1, -1):
            os.chown(held, uid, gid)
        os.chmod(held, mode & ~row.forbidden if row.mode is None else row.mode)
    finally:
        os.close(fd)


CHECKS = (
    Check("files.secrets", "Nobody but their owner may read the secrets.", look_at_secrets, mend_secrets),
    Check("files.state", "State and settings have the right owners and modes.", look_at_state, mend_state),
    Check("files.sockets", "Sockets let in whom they should.", look_at_sockets, mend_sockets),
)
