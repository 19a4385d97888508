"""The directories an installed Hive has, by the very file that tells systemd to make them."""

from __future__ import annotations

from typing import NamedTuple


class Directory(NamedTuple):
    path: str
    mode: int
    user: str
    group: str


def parse_tmpfiles(text: str) -> list[Directory]:
    """The directories a tmpfiles.d file makes.

    >>> parse_tmpfiles("d /var/lib/hive/daemon 0700 hive hive -\\nz /etc/hive - - -\\n")
    [Directory(path='/var/lib/hive/daemon', mode=448, user='hive', group='hive')]
    """
    words = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        Directory(word[1], int(word[2].lstrip("~:"), 8), *word[3:5])
        for word in words
        if word[0][0] in "dD" and len(word) >= 5 and word[2] != "-"
    ]
