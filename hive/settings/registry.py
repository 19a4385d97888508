"""The settings of the registry: `[registry]`, what was ordered to be loaded."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s


class RegistrySection(msgspec.Struct, frozen=True, kw_only=True):
    """`[registry]`: the models that were ordered to be loaded (hive model deployed)."""

    restore: Annotated[bool, _s("Those that were loaded when Hive ended are loaded again at its start.")] = False
