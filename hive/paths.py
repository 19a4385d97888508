"""The paths of a Hive's files and sockets, decided once for `hive up` and for the commands that look for it.

Standard library only: every command pays for what this module imports.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hive.errors import ConfigError, DependencyDown, NotPermitted

APPLIANCE_RUNTIME = Path("/run/hive")
"""The directory of an installed Hive's sockets."""
INSTALLED = Path("/etc/systemd/system/hive.target")
"""A unit that is there if Hive is installed."""
API_SOCKET = "hive.sock"
SUN_PATH_MAX = 107
"""Bytes a unix socket's path may have (`sun_path` holds 108 with its NUL, unix(7))."""
LONGEST_SOCKET = "a/.12345678.sock.4194304"
"""The longest name in a runtime directory: an agent's socket under its temporary name, with the highest pid."""


OTHER_RUNTIME = "remove it, or choose another place with XDG_RUNTIME_DIR"


def default_state_dir(uid: int, env: Mapping[str, str]) -> Path:
    """The directory of `hive up` of this user for all that survives, unless `--state-dir` says otherwise.

    >>> default_state_dir(0, {}).as_posix(), default_state_dir(1000, {"HOME": "/home/ann"}).as_posix()
    ('/var/lib/hive-up', '/home/ann/.local/state/hive')
    """
    if uid == 0:
        return Path("/var/lib/hive-up")
    if (given := env.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(given, "hive")
    return Path(env.get("HOME") or os.path.expanduser("~"), ".local/state/hive")


def runtime_dir(state_dir: Path | None, uid: int, env: Mapping[str, str]) -> Path:
    """The directory of the sockets that belong to this state directory; None is the user's default one.

    >>> runtime_dir(None, 0, {}).as_posix(), runtime_dir(None, 7, {"XDG_RUNTIME_DIR": "/run/user/7"}).as_posix()
    ('/run/hive-up', '/run/user/7/hive')
    >>> runtime_dir(None, 7, {}).as_posix(), runtime_dir(Path("/srv/h"), 0, {}).as_posix()
    ('/tmp/hive-7', '/run/hive-up-fd2b6cd5')
    """
    return _runtime_dirs(state_dir, uid, env)[0]


def _runtime_dirs(state_dir: Path | None, uid: int, env: Mapping[str, str]) -> list[Path]:
    """`runtime_dir`, then where the same Hive would be had it been started without XDG_RUNTIME_DIR."""
    temporary = env.get("TMPDIR", "")
    bases = [Path(temporary if temporary.startswith("/") else "/tmp", f"hive-{uid}")]
    if uid == 0:
        bases = [Path("/run/hive-up")]
    elif (given := env.get("XDG_RUNTIME_DIR", "")).startswith("/"):
        bases.insert(0, Path(given, "hive"))
    resolved = None if state_dir is None else state_dir.resolve()
    if resolved is None or resolved == default_state_dir(uid, env).resolve():
        return bases
    import hashlib  # 4 ms of start-up that only --state-dir pays

    tail = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:8]
    return [base.with_name(f"{base.name}-{tail}") for base in bases]


def check_length(runtime: Path) -> None:
    """Raises ConfigError where agents' sockets in `runtime` would have paths longer than the kernel takes."""
    longest = len(os.fsencode(runtime / LONGEST_SOCKET))
    if longest > SUN_PATH_MAX:
        raise ConfigError(
            f"the runtime directory {runtime} is too long: sockets in it would have paths of {longest} bytes, "
            f"{SUN_PATH_MAX} is the limit",
            hint="set XDG_RUNTIME_DIR (or TMPDIR) to a shorter directory",
        )


def make_private(directory: Path, *, uid: int, mode: int = 0o700, hint: str = OTHER_RUNTIME) -> None:
    """Makes `directory` (and its parents) for `uid` alone, or takes it if it already is.

    It is never followed as a link: in a shared temporary directory someone else may have put one there.
    Raises NotPermitted, DependencyDown, with `hint`.
    """
    try:
        _make_parents(directory, mode)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            refuse_strange(directory, uid=uid, hint=hint)
        directory.chmod(mode)
    except PermissionError as error:
        raise NotPermitted(f"cannot make {directory}: {error.strerror}", hint=hint) from None
    except OSError as error:
        raise DependencyDown(f"cannot make {directory}: {error.strerror}", hint=hint) from None


def _make_parents(directory: Path, mode: int) -> None:
    """Makes the missing parents, with `mode` under any umask: a user that may pass `directory` has to get there."""
    for parent in reversed(directory.parents):
        if not parent.is_dir():
            parent.mkdir(mode=0o700)
            parent.chmod(mode)


def refuse_strange(directory: Path, *, uid: int, hint: str = OTHER_RUNTIME) -> None:
    """Raises NotPermitted unless `directory` is a real directory that belongs to `uid`."""
    if _is_own(directory, uid):
        return
    found = directory.lstat()
    what = f"belongs to uid {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "is not a directory"
    raise NotPermitted(f"{directory} {what}", hint=hint)


def _is_own(directory: Path, uid: int) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def api_sockets(
    *, socket: Path | None = None, state_dir: Path | None = None, uid: int, env: Mapping[str, str]
) -> list[Path]:
    """The sockets the Hive that is meant may listen on, the likeliest first: all are tried until one answers.

    `--socket` > HIVE_SOCKET > the `hive up` of this user (or of `--state-dir`) > the appliance.
    Raises NotPermitted where the first directory is someone else's.
    """
    if socket is not None:
        return [socket]
    if state_dir is None and env.get("HIVE_SOCKET"):
        return [Path(env["HIVE_SOCKET"])]
    directories = _runtime_dirs(state_dir, uid, env)
    if state_dir is None:
        directories.append(APPLIANCE_RUNTIME)
    elif (written := _written_socket(state_dir)) is not None:
        return [written]
    if _exists(directories[0]):
        refuse_strange(directories[0], uid=uid)
    rest = [d for d in directories[1:] if d == APPLIANCE_RUNTIME or not _exists(d) or _is_own(d, uid)]
    return [directory / API_SOCKET for directory in [directories[0], *rest]]


def missing(state_dir: Path | None) -> str:
    """A sentence where the state directory that was named is not there, else nothing.

    >>> missing(Path("/no/such")), missing(None)
    ('there is no state directory /no/such', '')
    """
    is_missing = state_dir is not None and not os.path.lexists(state_dir)
    return f"there is no state directory {state_dir}" if is_missing else ""


def refuse_missing(state_dir: Path | None, sockets: list[Path]) -> None:
    """Raises DependencyDown where the state directory is not there, nor any socket of a Hive that began with it."""
    if (sentence := missing(state_dir)) and not any(map(_exists, sockets)):
        raise DependencyDown(sentence, hint=f"`hive up --state-dir {state_dir}` would make it")


def _written_socket(state_dir: Path) -> Path | None:
    """The path of the API socket that `hive up` wrote into `D/socket`."""
    try:
        text = (state_dir / "socket").read_text(errors="surrogateescape").strip()
    except PermissionError as error:
        raise NotPermitted(f"cannot read {state_dir / 'socket'}: {error.strerror}") from None
    except OSError:
        return None
    return Path(text) if text.startswith("/") else None
