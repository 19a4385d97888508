"""The secrets of a box: made once, never overwritten, never shown; one command changes one and restarts what reads it.

What a kill -9 leaves, and what ends it (`generate` runs at every boot, and at the beginning of every call here):

    generating: a secret is there whole or not at all; those missing are made by the next `generate`.
    rotating, before the new value is in place: the old one is in force; `ROTATING` names it.
    rotating, after that: what runs still has the old value, Redis too (both read at their start); `ROTATING` names it.

As long as `ROTATING` is there, the next call writes the ACL of Redis from the secrets that are there and restarts the
readers: from then on all have the same value, the old or the new one.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from hive.errors import ConfigError, DependencyDown, HiveError, NotFound
from hive.files import layout as places
from hive.files.backup_contents import installed
from hive.files.layout import Layout
from hive.files.offline_audit import noted
from hive.files.redis_acl import acl_file
from hive.host import program, systemd
from hive.host.files import KEEP, beside, create_whole, remove, sync, translated, write_whole

KEY_BYTES = 32
ROTATING = ".rotating"
"""Name in the directory of the secrets: the name of the one with a rotation not yet at its end."""
REDIS_GROUP = "hive-redis"
RESTART_S = 120.0


def _key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _token() -> bytes:
    return f"hive_{secrets.token_urlsafe(KEY_BYTES)}".encode()


def _password() -> bytes:
    return secrets.token_urlsafe(KEY_BYTES).encode()


class Secret(NamedTuple):
    """`readers`: the units that read it at their start. `warning`: what a rotation does beside restarting those."""

    name: str
    sentence: str
    make: Callable[[], bytes]
    readers: tuple[str, ...]
    redis_user: str = ""
    warning: str = ""


SECRETS: dict[str, Secret] = {
    secret.name: secret
    for secret in (
        Secret(
            "box-key",
            "What agents' tokens are derived from.",
            _key,
            ("hive-daemon.service",),
            warning="every agent gets other tokens; those that use theirs are refused until they are restarted",
        ),
        Secret("internal-token", "The operator's token at the proxy.", _token, ("hive-daemon.service",)),
        Secret(
            "redis-daemon",
            "The daemon's password at Redis.",
            _password,
            ("hive-redis.service", "hive-daemon.service"),
            redis_user="daemon",
        ),
        Secret(
            "api-token",
            "The first administrator's token at the API on TCP.",
            _token,
            ("hive-daemon.service",),
        ),
    )
}


RETIRED = ("redis-proxy",)
"""Secrets of earlier versions, which nothing reads any more."""


class FoundSecret(NamedTuple):
    """One secret as it is. `changed_at`: Unix time, None where it is not there. `problem`: empty where it is well."""

    secret: Secret
    changed_at: float | None
    problem: str


def directory(layout: Layout) -> Path:
    return layout.at(places.SECRETS)


def missing(layout: Layout) -> list[str]:
    """Names of those that are not there. Raises NotPermitted."""
    return [found.secret.name for found in listed(layout) if found.changed_at is None]


def listed(layout: Layout) -> list[FoundSecret]:
    """Every secret, without its value. Raises NotPermitted where this user may not look."""
    with translated(directory(layout), act="look into"):
        return [_look(directory(layout) / name, secret) for name, secret in SECRETS.items()]


def _look(path: Path, secret: Secret) -> FoundSecret:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return FoundSecret(secret, None, "not there")
    if not stat.S_ISREG(found.st_mode):
        return FoundSecret(secret, found.st_mtime, "not a file")
    exposed = found.st_mode & 0o077 or found.st_uid != os.geteuid()
    return FoundSecret(secret, found.st_mtime, "others can get at it" if exposed else "")


def retired(layout: Layout) -> list[str]:
    """Names of those of RETIRED that are there."""
    return [name for name in RETIRED if os.path.lexists(directory(layout) / name)]


def remove_retired(layout: Layout, names: Collection[str]) -> None:
    """Takes away these secrets of earlier versions. Raises NotPermitted."""
    for name in names:
        remove(directory(layout) / name)


def generate(layout: Layout) -> list[str]:
    """Makes those that are missing, finishes what was cut short, writes the ACL of Redis where it is not what follows
    from them. Returns the names of those that were made.

    Raises NotPermitted, StoreFull, ConfigError (the directory is somebody else's).
    """
    _make_directory(layout)
    for secret in SECRETS.values():
        _remove_beside(directory(layout) / secret.name)
    made = [
        secret.name
        for secret in SECRETS.values()
        if create_whole(directory(layout) / secret.name, secret.make(), mode=0o600)
    ]
    write_acl(layout)
    if (name := _rotating(layout)) is not None:
        # At boot the readers are started after this, and waiting for one here would be waiting for oneself.
        _finish(layout, SECRETS[name], wait=False)
    return made


def rotate(layout: Layout, name: str) -> list[str]:
    """Puts a new value in place of the old one; returns the units that were restarted for it.

    Raises NotFound (no such secret), NotPermitted, StoreFull, DependencyDown (a reader did not come back; the new value
    is in force).
    """
    with noted(installed(layout).database, "rotate_secret", target=name):
        return _rotate(layout, name)


def what_it_takes(layout: Layout, name: str) -> str:
    """Sentence about what a rotation interrupts and changes besides; empty where that is nothing, or there is none.

    >>> what_it_takes(Layout(Path("/srv/image")), "api-token")
    ''
    """
    secret = SECRETS.get(name)
    if secret is None or not (directory(layout) / name).exists():
        return ""
    restarted = ", ".join(unit.removesuffix(".service") for unit in secret.readers) if _restarts(layout) else ""
    told = (f"this restarts {restarted}" if restarted else "", secret.warning)
    sentence = "; ".join(filter(None, told))
    return sentence[:1].upper() + sentence[1:]


def _restarts(layout: Layout) -> bool:
    """Whether the readers run here, and not in an image's own time."""
    return layout.live and systemd.is_booted()


def _rotate(layout: Layout, name: str) -> list[str]:
    secret = SECRETS.get(name)
    if secret is None:
        raise NotFound(f"there is no secret {name}", hint=f"known are {', '.join(SECRETS)}")
    if not directory(layout).is_dir():
        raise NotFound(f"there are no secrets in {directory(layout)}", hint="hive secrets generate")
    generate(layout)
    write_whole(directory(layout) / ROTATING, secret.name.encode(), mode=0o600)
    write_whole(directory(layout) / secret.name, secret.make(), mode=0o600)
    write_acl(layout)
    return _finish(layout, secret, wait=True)


def write_acl(layout: Layout) -> None:
    """Writes the ACL of Redis, digests of the passwords that are there, unless it is so already.

    Raises NotPermitted, StoreFull.
    """
    if acl_is_right(layout):
        return
    path, gid = layout.at(places.REDIS_ACL), _redis_gid(layout)
    with translated(path):
        path.parent.mkdir(mode=0o755, exist_ok=True)
    write_whole(path, _acl(layout).encode(), mode=0o640, owner=KEEP if gid < 0 else (0, gid))


def acl_is_right(layout: Layout) -> bool:
    """Whether it is what follows from the secrets, and Redis can read it. False where a secret is missing."""
    path, gid = layout.at(places.REDIS_ACL), _redis_gid(layout)
    try:
        found = path.stat()
        right = path.read_bytes() == _acl(layout).encode()
    except OSError:
        return False
    return right and found.st_mode & 0o777 == 0o640 and gid in (-1, found.st_gid)


def _acl(layout: Layout) -> str:
    hashes = {
        secret.redis_user: hashlib.sha256((directory(layout) / secret.name).read_bytes()).hexdigest()
        for secret in SECRETS.values()
        if secret.redis_user
    }
    return acl_file(hashes)


def _redis_gid(layout: Layout) -> int:
    """-1 where there is no such group, as in an image: then the file stays its maker's."""
    try:
        return grp.getgrnam(REDIS_GROUP).gr_gid if layout.live else -1
    except KeyError:
        return -1


def _make_directory(layout: Layout) -> None:
    path = directory(layout)
    with translated(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"{path} is not a directory of uid {os.geteuid()}", hint="move it away")
        path.chmod(0o700)


def _remove_beside(path: Path) -> None:
    """Removes the remains of an interrupted write of a secret."""
    with translated(path), contextlib.suppress(FileNotFoundError):
        beside(path).unlink()


def _rotating(layout: Layout) -> str | None:
    try:
        name = (directory(layout) / ROTATING).read_text()
    except FileNotFoundError:
        return None
    return name if name in SECRETS else None


def _finish(layout: Layout, secret: Secret, *, wait: bool) -> list[str]:
    """The readers are restarted, where they run; then the rotation is over. Without `wait` they are only told to, and
    where they cannot be told, the next call does it."""
    restarted: list[str] = []
    failed = ""
    if _restarts(layout):
        restarted = list(secret.readers)
        try:
            ran = program.run(
                ["systemctl", "try-restart", *([] if wait else ["--no-block"]), *restarted], limit_s=RESTART_S
            )
        except HiveError:
            if wait:
                raise
            return []
        failed = ran.last_line if ran.code else ""
    remove(directory(layout) / ROTATING)
    sync(directory(layout))
    if failed and wait:
        raise DependencyDown(
            f"{secret.name} is changed, but not everything that reads it came back: {failed}",
            hint=f"systemctl status {' '.join(secret.readers)}",
        )
    return restarted


def remove_all(layout: Layout) -> None:
    """Takes away every secret and what an interrupted call left of one. Raises NotPermitted, StoreFull."""
    for name in (*SECRETS, *RETIRED, ROTATING):
        remove(directory(layout) / name)
