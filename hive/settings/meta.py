"""The description of one setting in its type: sentence, unit, names, bounds."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def setting_meta(
    sentence: str,
    *,
    unit: str = "",
    env: str = "",
    effect: bool = True,
    runtime: bool = False,
    expected: str = "",
    **bounds: Any,
) -> Meta:
    """One row: `env` is the environment name of the seed, `effect` is False for a key that only is checked so far.

    `runtime`: it may be changed while Hive runs (`PUT /api/config`). `expected` says in words what the bounds (or a
    pattern) mean, where they do not say it themselves.
    """
    extra = {"unit": unit, "env": env, "effect": effect, "runtime": runtime, "expected": expected}
    return Meta(description=sentence, extra=extra, **bounds)
