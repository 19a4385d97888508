"""The parts of a Hive that are worth keeping: each file under its name in a backup, and the place it goes to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.errors import BadRequest, ConfigError, NotFound
from hive.files.layout import (
    CONF_FILE,
    CONFIGURATION,
    MODELS_D,
    POLICY_FILE,
    RULES_FILE,
    RUNTIMES,
    SECRETS,
    STATE,
    TARGET,
    TEMPLATES_D,
    UNITS,
    Layout,
)
from hive.files.ports import Remembered
from hive.governance import rules
from hive.host import policy_file
from hive.paths import default_state_dir, runtime_dir
from hive.settings.file import load_text, model_files
from hive.settings.table import Paths

DATABASE = "hive.db"
RESPONSES = "responses.db"
"""Responses that agents had kept."""
STORES = frozenset({DATABASE, RESPONSES})
"""SQLite's files, which are more than one file while they are open."""
PORTS = "ports.json"
BOX_KEY_BYTES = 32
DESCRIBED = (MODELS_D, TEMPLATES_D)
"""Directories whose files are parts by their own names: the only parts that are not in a table of ours."""
_MODEL_FILE = re.compile(r"(?:models|templates)\.d/(?!\.)[^/\\\x00-\x1f\x7f]+\.toml")
NAME_MAX_BYTES = 100
"""Of a file in a tar."""
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

    @property
    def describes_models(self) -> bool:
        """Whether it is a file of models.d, or of templates.d."""
        return is_model_file(self.name)


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

    def part(self, name: str) -> BackupPart | None:
        """The part of this name; None for what has no place here."""
        if self.layout is None or not is_model_file(name):
            return self.parts.get(name)
        return BackupPart(name, self.layout.at(CONFIGURATION) / name, 0o644, len)

    def models(self) -> list[BackupPart]:
        """The files of models.d and templates.d that are there now. Raises BadRequest for a name that no backup
        takes."""
        layout = self.layout
        found = [] if layout is None else [path for place in DESCRIBED for path in model_files(layout.at(place))]
        for path in found:
            if not is_model_file(f"{path.parent.name}/{path.name}"):
                raise BadRequest(f"{path}: no backup takes a file of that name", hint="rename it")
        parts = [self.part(f"{path.parent.name}/{path.name}") for path in found]
        return [part for part in parts if part is not None]


def is_model_file(name: str) -> bool:
    """Whether a part of this name is a file of models.d, or of templates.d. It names nothing outside of these.

    >>> [is_model_file(f"models.d/{name}") for name in ("seed.toml", "../x.toml", ".x.toml", "a/b.toml", "x.conf")]
    [True, False, False, False, False]
    >>> is_model_file("modelsxd/seed.toml")
    False
    """
    try:
        is_short = len(name.encode()) <= NAME_MAX_BYTES
    except UnicodeEncodeError:
        return False
    return is_short and _MODEL_FILE.fullmatch(name) is not None


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
        BackupPart("governance.toml", layout.at(RULES_FILE), 0o644, _check_rules),
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


def _check_rules(content: bytes) -> None:
    try:
        rules.parse(content.decode())
    except (UnicodeDecodeError, ConfigError) as error:
        raise BadRequest(f"governance.toml in it is wrong: {error}") from None


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
