"""The Hive whose keys and adapters are meant, found without its daemon."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hive.adapters.directory import AdapterDirectory
from hive.adapters.keys import TrustedKeys

Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", help="The directory of trusted keys, instead of that Hive's.", show_default=False
    ),
]


class OfflineAdapters(NamedTuple):
    """Places of one Hive. `policy`: its [adapters] signatures. `database`: None where nobody knows its own."""

    keys: TrustedKeys
    adapters: AdapterDirectory
    policy: str
    database: Path | None

    def noted(self, act: str, target: str) -> AbstractContextManager[dict[str, Any]]:
        """Notes an act for the audit table of that Hive."""
        from hive.files.offline_audit import noted

        return noted(self.database, act, target=target)


def place_of(state_dir: Path | None, keys_dir: Path | None) -> OfflineAdapters:
    """The Hive that is meant: `state_dir`, else the one that answers or is installed, else this user's `hive up`."""
    from hive.doctor.checks.target import find
    from hive.paths import default_state_dir, runtime_dir
    from hive.settings.table import Paths

    uid = os.geteuid()
    found = find(state_dir=state_dir, uid=uid, env=os.environ)
    state = state_dir or default_state_dir(uid, os.environ)
    paths = found.paths or Paths(state, runtime_dir(state_dir, uid, os.environ))
    settings = found.settings.adapters
    keys = TrustedKeys(keys_dir or paths.adapter_keys(settings.keys_dir))
    database = None if found.paths is None or keys_dir is not None else found.database
    return OfflineAdapters(keys, AdapterDirectory(paths.adapters), settings.signatures, database)
