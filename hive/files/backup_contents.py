"""The parts of a Hive that are worth keeping: each file under its name in a backup, and the place it goes to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.errors import BadRequest, ConfigError, NotFound
from hive.files.layout import CONF_FILE, POLICY_FILE, RUNTIMES, SECRETS, STATE, TARGET, UNITS, Layout
from hive.files.ports import Remembered
from hive.host import policy_file
from hive.paths import default_state_dir, runtime_dir
from hive.settings.file import load_text
from hive.settings.table import Paths

DATABASE = "hive.db"
RESPONSES = "responses.db"
"""Responses that agents had kept."""
STORES = frozenset({DATABASE, RESPONSES})
"""SQLite's files, which are more than one file while they are open."""
PORTS = "ports.json"
BOX_KEY_BYTES = 32
SECRET_NAMES = ("box-key", "internal-token", "redis-daemon", "api-token")


class BackupPart(NamedTuple):
    """One part. `name`: in the backup. `path`: here. `mode`: where no file is there whose mode it takes over."""

    name: str
    path: Path
    mode: int
    check: Callable[[bytes], object]

    @property
    def is_secret(self) -> bool:
        return self.name.startswith("secrets/")


class HiveFiles(NamedTuple):
    """One Hive by its files. `layout`: of an installed one, None for a `hive up`."""

    paths: Paths
    parts: dict[str, BackupPart]
    layout: Layout | None = None

    @property
    def kind(self) -> str:
        return "up" if self.layout is None else "appliance"

    @property
    def database(self) -> Path:
        return self.parts[DATABASE].path


def place_of(*, state_dir: Path | None, prefix: Path, uid: int, env: Mapping[str, str]) -> HiveFiles:
    """The Hive that is meant: that of `state_dir`, the installed one, or this user's `hive up`.

    Raises NotFound where `prefix` holds no installed one.
    """
    layout = Layout(prefix)
    if state_dir is None and layout.at(UNITS).joinpath(TARGET).exists():
        return installed(layout)
    if state_dir is None and not layout.live:
        raise NotFound(f"no Hive is installed in {prefix}")
    state = Path(os.path.realpath(state_dir or default_state_dir(uid, env)))
    return of_up(Paths(state, runtime_dir(state_dir, uid, env)))


def installed(layout: Layout) -> HiveFiles:
    paths = Paths(layout.at(STATE), layout.at(RUNTIMES[0]), apart=True)
    found = [
        BackupPart("hive.conf", layout.at(CONF_FILE), 0o644, _check_conf),
        BackupPart("sandbox.toml", layout.at(POLICY_FILE), 0o644, _check_policy),
        *(_secret(name, layout.at(SECRETS) / name) for name in SECRET_NAMES),
    ]
    return HiveFiles(paths, _by_name(paths, found), layout)


def of_up(paths: Paths) -> HiveFiles:
    found = [
        BackupPart(PORTS, paths.state / PORTS, 0o600, _check_ports),
        _secret("box-key", paths.box_key),
        _secret("internal-token", paths.internal_token),
    ]
    return HiveFiles(paths, _by_name(paths, found))


def _by_name(paths: Paths, parts: list[BackupPart]) -> dict[str, BackupPart]:
    stores = (BackupPart(DATABASE, paths.database, 0o600, len), BackupPart(RESPONSES, paths.responses, 0o600, len))
    return {part.name: part for part in (*stores, *parts)}


def _secret(name: str, path: Path) -> BackupPart:
    return BackupPart(f"secrets/{name}", path, 0o600, _check_key if name == "box-key" else _check_token)


def _check_conf(content: bytes) -> None:
    try:
        load_text(content.decode(), env={})
    except (UnicodeDecodeError, ConfigError) as error:
        raise BadRequest(f"hive.conf in it is wrong: {error}") from None


def _check_policy(content: bytes) -> None:
    try:
        policy_file.parse(content.decode())
    except (UnicodeDecodeError, ConfigError) as error:
        raise BadRequest(f"sandbox.toml in it is wrong: {error}") from None


def _check_ports(content: bytes) -> None:
    try:
        msgspec.json.decode(content, type=Remembered)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"ports.json in it is wrong: {error}") from None


def _check_key(content: bytes) -> None:
    if len(content) != BOX_KEY_BYTES:
        raise BadRequest(f"box-key in it has {len(content)} bytes, not {BOX_KEY_BYTES}")


def _check_token(content: bytes) -> None:
    if not (16 <= len(content) <= 1024 and content.isascii() and content.decode().strip().isprintable()):
        raise BadRequest("a token in it is none")
