"""JSON in which every member is there once, and values that are compared as JSON means them."""

from __future__ import annotations

import json
import math
from typing import Any

from hive.errors import OpTokenInvalid


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """The object in `data`. Raises OpTokenInvalid: no JSON, no object, a member that is there twice, NaN, infinity.

    >>> read_object(b'{"a": 1}', "it")
    {'a': 1}
    >>> read_object(b'{"a": 1, "a": 2}', "it")
    Traceback (most recent call last):
    hive.errors.OpTokenInvalid: it is no JSON: 'a' is there more than once
    """
    try:
        found = json.loads(
            data.decode("utf-8", "strict"), object_pairs_hook=_once, parse_constant=_none_such, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise OpTokenInvalid(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OpTokenInvalid(f"{what} is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:40]!r} is there more than once")
        found[name] = value
    return found


def _none_such(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def members(found: dict[str, Any], names: frozenset[str], what: str) -> None:
    """Raises OpTokenInvalid unless `found` has these members and no others."""
    if found.keys() != names:
        odd = sorted(found.keys() ^ names)
        raise OpTokenInvalid(f"{what} has not the members it must have: {', '.join(name[:40] for name in odd)}")


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 5 and 5.0 are one number, and true is none.

    >>> is_same({"a": [5]}, {"a": [5.0]}), is_same(1, True), is_same({"a": None}, {})
    (True, False, False)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return type(one) is type(other) and bool(one == other)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the members that are not the same in both."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not is_same(one[name], other[name])]
