"""The box's word on how far requests may go (`[inference] cloud`): its seed at the first start, and what the API says
of it in the words of the original specification.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping

from hive.domain import CloudUse
from hive.settings.rows import rows_of
from hive.settings.runtime import variable_of
from hive.settings.table import InferenceSection
from hive.store import runtime_settings

SETTING = "inference.cloud"
SEEDED = "cloud.seeded"
"""Runtime setting: Hive has started here before, so the seed counts no more."""
SEED = "MODEL_BOSS_ALLOW_CLOUD_FALLBACK"
_NO = frozenset({"false", "no", "off", "0"})


def word_of(allows_fallback: bool, now: CloudUse = CloudUse.ASKED) -> CloudUse:
    """The setting for `allowCloudFallback`; without it a far model is asked where a request names it. `now`: as it is
    set; who says no to what is narrower than that already widens nothing.

    >>> word_of(True), word_of(False, CloudUse.FALLBACK), word_of(False, CloudUse.NEVER)
    (<CloudUse.FALLBACK: 'fallback'>, <CloudUse.ASKED: 'asked'>, <CloudUse.NEVER: 'never'>)
    """
    if allows_fallback:
        return CloudUse.FALLBACK
    return CloudUse.NEVER if now is CloudUse.NEVER else CloudUse.ASKED


def seed_of(env: Mapping[str, str]) -> CloudUse | None:
    """The setting's first value by the environment; None where that says nothing.

    >>> seed_of({SEED: "True"}), seed_of({SEED: "0"}), seed_of({SEED: ""})
    (<CloudUse.FALLBACK: 'fallback'>, <CloudUse.ASKED: 'asked'>, None)
    """
    said = env.get(SEED, "").strip().lower()
    return word_of(said not in _NO) if said else None


def is_seeded(conn: sqlite3.Connection) -> bool:
    return runtime_settings.get(conn, SEEDED) is not None


def note_seeded(conn: sqlite3.Connection) -> None:
    runtime_settings.put(conn, SEEDED, "1", actor="hive", now=time.time())


def is_set_by_environment(env: Mapping[str, str]) -> bool:
    """Whether the setting has a variable of its own, which goes before any seed."""
    return bool(variable_of(rows_of("inference", InferenceSection)["cloud"], env))
