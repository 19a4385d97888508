"""The settings of adapters: `[adapters]`, LoRA weights that are loaded beside a model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s

REQUIRED, WARN, OFF = "required", "warn", "off"
"""Values of `signatures`."""


class AdaptersSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[adapters]`: LoRA weights that are loaded beside a model (docs/adapters.md)."""

    dir: Annotated[
        str,
        _s(
            "The one directory from which adapters are installed; empty: none is.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    signatures: Annotated[
        str,
        _s(
            "`required`: only what a trusted key has signed is installed; `warn`: also what has no signature, which is "
            "told; `off`: signatures are not looked at.",
            pattern="^(required|warn|off)$",
        ),
    ] = REQUIRED
    keys_dir: Annotated[
        str,
        _s(
            "Directory of the public keys that are trusted; empty: /etc/hive/adapter-keys, or `adapter-keys` in the "
            "state directory of `hive up`.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    max_rank: Annotated[int, _s("Highest rank of an adapter.", ge=1, le=512)] = 64
    max_mb: Annotated[int, _s("Largest adapter, all its files together.", unit="MiB", ge=1)] = 4096
    fallback: Annotated[
        str,
        _s(
            "What answers a request for an adapter that is not loaded: nothing (`refuse`: 404); `base`, its model "
            "without it; `previous`, the one of its name that was loaded before.",
            pattern="^(refuse|base|previous)$",
        ),
    ] = "refuse"
