"""Amounts as people write them on a command line: times and memory. Pure."""

from __future__ import annotations

import re

from hive.errors import UsageError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(?:[0-9]{1,6}[smhd])+")
_MEMORY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([MGT])(?:i?B)?", re.IGNORECASE)
_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


def seconds_in(text: str, option: str) -> float:
    """Seconds of a time with its units, or of plain seconds. `option`: named in the error. Raises UsageError.

    >>> seconds_in("1h30m", "--max"), seconds_in("90", "--max"), seconds_in("0", "--wait")
    (5400.0, 90.0, 0.0)
    """
    if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,3})?", text):
        return float(text)
    if _TIME.fullmatch(text) is None:
        raise UsageError(f"{option} {text[:40]!r} is no time", hint="such as 90s, 10m, 1h30m, 2d")
    return float(sum(int(piece[:-1]) * _UNITS_S[piece[-1]] for piece in re.findall("[0-9]+[smhd]", text)))


def mib_in(text: str, option: str) -> int:
    """MiB of an amount of memory with its unit, in powers of 1024, rounded up. Raises UsageError.

    >>> mib_in("8G", "--vram"), mib_in("1.5GiB", "--vram"), mib_in("700M", "--vram"), mib_in("700mb", "--vram")
    (8192, 1536, 700, 700)
    >>> mib_in("8", "--vram")
    Traceback (most recent call last):
    ...
    hive.errors.UsageError: --vram '8' is no amount of memory
    """
    found = _MEMORY.fullmatch(text)
    amount = 0.0 if found is None else float(found[1]) * _MIB[found[2].upper()]
    if not amount:
        raise UsageError(f"{option} {text[:40]!r} is no amount of memory", hint="such as 8G, 1.5G, 700M")
    return -int(-amount // 1)
