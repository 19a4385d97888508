"""The wording of figures in the sentences of the deciders."""

from __future__ import annotations


def mib(size: int) -> str:
    """Bytes, as people count memory.

    >>> mib(314_572_800)
    '300 MiB'
    """
    return f"{size / (1 << 20):.0f} MiB"


def spoken(seconds: float) -> str:
    """A time in its largest fitting unit.

    >>> spoken(89.6), spoken(540), spoken(9000)
    ('90 s', '9 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
