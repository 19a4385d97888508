"""The rows of the table of settings, read from its structs: kind, bounds, unit, sentence, names in the environment."""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import Meta


class SettingRow(msgspec.Struct, frozen=True):
    """One setting as the table has it. `annotation` carries the bounds; `expected` says them in words."""

    section: str
    key: str
    annotation: Any
    kind: type
    default: Any
    unit: str
    env: str
    in_effect: bool
    at_runtime: bool
    sentence: str
    expected: str

    @property
    def variables(self) -> list[str]:
        """The environment's names for it; the later one counts where both are set.

        >>> from hive.settings.table import InferenceSection, TenantRow
        >>> tenant = rows_of("tenant acme", TenantRow)
        >>> rows_of("inference", InferenceSection)["port"].variables, tenant["weight"].variables
        (['INFERENCE_PORT', 'HIVE_INFERENCE_PORT'], ['TENANT_WEIGHT_acme'])

        Of a model, a task or a template there are none: the name of the first two holds what no variable's can.

        >>> from hive.settings.pool import ModelRow
        >>> rows_of("model qwen3:8b", ModelRow)["pin"].variables
        []
        """
        kind, _, name = self.section.partition(" ")
        if kind in ("model", "task", "template"):
            return []
        if name:
            return [f"TENANT_{self.key.upper()}_{name}"]
        own = f"HIVE_{kind}_{self.key}".upper()
        return [self.env, own] if self.env else [own]


def rows_of(section: str, struct: type[msgspec.Struct]) -> dict[str, SettingRow]:
    """The rows of one section by key, in the order they are written above.

    >>> from hive.settings.table import Proxy
    >>> rows_of("proxy", Proxy)["port"].expected
    'a whole number from 0 to 65535'
    """
    defaults = struct()
    rows: dict[str, SettingRow] = {}
    for key, annotation in _annotations(struct).items():
        kind: type = annotation.__origin__
        meta: Meta = annotation.__metadata__[0]
        extra: dict[str, Any] = meta.extra or {}
        rows[key] = SettingRow(
            section,
            key,
            annotation,
            kind,
            getattr(defaults, key),
            extra["unit"],
            extra["env"],
            extra["effect"],
            extra["runtime"],
            meta.description or "",
            extra["expected"] or _expected(kind, meta),
        )
    return rows


@cache
def _annotations(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Those of its fields; read once, as each is an expression to be compiled: 10 ms for all sections."""
    return get_type_hints(struct, include_extras=True)


def _expected(kind: type, meta: Meta) -> str:
    if kind is bool:
        return "true or false"
    if kind is str:
        return "one of " + ", ".join(meta.pattern[2:-2].split("|")) if meta.pattern else "text"
    bounds = [f"at least {meta.ge}"] if meta.ge is not None else []
    bounds += [f"above {meta.gt}"] if meta.gt is not None else []
    bounds += [f"at most {meta.le}"] if meta.le is not None else []
    noun = "a whole number" if kind is int else "a number"
    if meta.ge is not None and meta.le is not None:
        return f"{noun} from {meta.ge} to {meta.le}"
    return " ".join([noun, " and ".join(bounds)]) if bounds else noun
