"""The Hive that is checked: the one that answers, the installed one, one that was started by hand, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hive.client.client import Client
from hive.conditions import FoundCondition, Where, where_is
from hive.errors import ConfigError, HiveError, NotPermitted
from hive.files import up_flags
from hive.files.layout import CONF_FILE, STATE, TARGET, UNITS, Layout
from hive.paths import API_SOCKET, APPLIANCE_RUNTIME, api_sockets, default_state_dir, missing
from hive.settings.file import load, load_text
from hive.settings.table import Paths, Settings

LIVE = Layout()
HEALTH_S = 0.3
"""A daemon that does not answer within this hangs, as far as a person who waits can tell."""


class TargetKind(StrEnum):
    """Start of the Hive."""

    APPLIANCE = "appliance"
    UP = "hive up"
    NONE = "none"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the checks are told. Nothing of it changes while they run.

    `paths`: None where there is no Hive, or nobody knows its places. `socket`: where it listens. `named`: the user said
    which one is meant, by `state_dir` or `named_socket`. `health`: what its daemon answers; None where it does not:
    `silence` says why, `may_not` whether this user may not ask, `is_missing` whether the state directory that was named
    is not there, `up_flags` how a `hive up` of it was started last, and `offline` what is wrong by what can be seen all
    the same (hive.doctor.offline_status). `config_error`: what is wrong with the configuration, then `settings` are the
    defaults. `layout`: where an appliance's files are. `uid`: of whoever looks. `limit_s`: how long one check may take.
    """

    kind: TargetKind
    paths: Paths | None = None
    socket: Path | None = None
    named: bool = False
    state_dir: Path | None = None
    named_socket: str = ""
    health: dict[str, Any] | None = None
    silence: str = ""
    may_not: bool = False
    is_missing: bool = False
    up_flags: str = ""
    offline: list[FoundCondition] = []
    settings: Settings = Settings()
    config_file: Path | None = None
    config_error: str = ""
    layout: Layout = Layout()
    uid: int = 0
    env: dict[str, str] = {}
    limit_s: float = 1.0

    @property
    def where(self) -> Where:
        """The form of commands about it, for this user."""
        return where_is(
            apart=self.is_appliance,
            state_dir=self.state_dir,
            socket=self.named_socket,
            is_root=self.is_root,
            flags=self.up_flags,
        )

    @property
    def is_appliance(self) -> bool:
        return self.kind is TargetKind.APPLIANCE

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    @property
    def is_stopped(self) -> bool:
        """Whether nothing of it runs: what only fails because of that is told once, by hive.answers."""
        return any(one.code == "not_running" for one in self.offline)

    @property
    def client(self) -> Client | None:
        """None where nobody answers."""
        return None if self.health is None or self.socket is None else Client(self.socket)

    @property
    def database(self) -> Path | None:
        return None if self.paths is None else self.paths.database

    @property
    def redis_socket(self) -> Path | None:
        return None if self.paths is None else self.paths.redis_socket


def find(
    *,
    socket: Path | None = None,
    state_dir: Path | None = None,
    config: Path | None = None,
    uid: int,
    env: Mapping[str, str],
    layout: Layout = LIVE,
    limit_s: float = 1.0,
) -> Subject:
    """Asks at the sockets the other commands use; raises nothing."""
    named = bool(socket or state_dir or env.get("HIVE_SOCKET"))
    told: dict[str, Any] = {"named": named, "layout": layout, "uid": uid, "env": dict(env), "limit_s": limit_s}
    told |= {"state_dir": state_dir, "named_socket": str(socket or env.get("HIVE_SOCKET", ""))}
    configured = _configured(config, layout, env)
    try:
        sockets = api_sockets(socket=socket, state_dir=state_dir, uid=uid, env=env)
    except NotPermitted as error:
        return Subject(kind=TargetKind.UP, silence=error.message, **told, **configured)
    guess = state_dir or (None if named else default_state_dir(uid, env))
    for path in sockets:
        if (answered := _ask(path)) is not None:
            health = answered.get("health")
            if config is None and isinstance(file := (health or {}).get("config_file"), str):
                configured = _as_in_force(file, env)
            told |= configured
            return Subject(socket=path, **_place(path, guess, layout, health), **answered, **told)
    no_state = missing(None if socket else state_dir)
    told |= {"is_missing": bool(no_state)}
    silence = no_state or f"no Hive answers at {' or '.join(map(str, sockets))}"
    if named:
        place = _place(sockets[0], guess, layout, None)
    elif layout.at(f"{UNITS}/{TARGET}").exists():
        place = _place(APPLIANCE_RUNTIME / API_SOCKET, None, layout, None)
    elif guess is not None and (guess / "hive.db").exists():
        place = _place(sockets[0], guess, layout, None)
    else:
        place = {"kind": TargetKind.NONE}
    paths: Paths | None = place.get("paths")
    told |= {"up_flags": "" if paths is None else up_flags.kept(paths.state / up_flags.NAME, uid)}
    return Subject(silence=silence, **place, **told, **configured)


def _configured(config: Path | None, layout: Layout, env: Mapping[str, str]) -> dict[str, Any]:
    installed = layout.at(CONF_FILE)
    return _read(config or (installed if installed.exists() else None), env)


def _as_in_force(file: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The configuration that the daemon says it reads; empty: no file."""
    if file:
        return _read(Path(file), env)
    try:
        return {"settings": load_text("", env=env).settings}
    except ConfigError as error:
        return {"config_error": error.message}


def _read(file: Path | None, env: Mapping[str, str]) -> dict[str, Any]:
    try:
        return {"settings": load(file, env=env).settings, "config_file": file}
    except ConfigError as error:
        return {"config_error": error.message, "config_file": file}


def _ask(path: Path) -> dict[str, Any] | None:
    """Facts about the Hive that listens at `path`; None if none does."""
    client = Client(path)
    try:
        return {"health": client.get("/api/health", timeout_s=HEALTH_S)}
    except NotPermitted as error:
        return {"silence": error.message, "may_not": True}
    except HiveError as error:
        return {"silence": error.message} if client.answers(within_s=HEALTH_S) else None


def _place(path: Path, state: Path | None, layout: Layout, health: dict[str, Any] | None) -> dict[str, Any]:
    """Kind and places of the Hive with this API socket: by what it says of itself, else by where that socket is.

    `state`: where its state is as far as one can guess; None where that would be guesswork.
    """
    if path.is_relative_to(APPLIANCE_RUNTIME):
        paths = Paths(layout.at(STATE), layout.at(str(APPLIANCE_RUNTIME)), apart=True)
        return {"kind": TargetKind.APPLIANCE, "paths": paths}
    with contextlib.suppress(KeyError, TypeError):
        return {
            "kind": TargetKind.UP,
            "paths": Paths(Path((health or {})["state_dir"]), Path((health or {})["runtime_dir"])),
        }
    guessed = None if state is None else Paths(Path(os.path.realpath(state)), path.parent)
    return {"kind": TargetKind.UP, "paths": guessed}
