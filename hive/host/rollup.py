"""Figures of /proc/PID/smaps_rollup, for which the kernel walks all memory of a process: 10 ms for some gigabytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hive.host.memory import KIB


def parse_rollup(text: str) -> dict[str, int]:
    """Each figure in bytes; the first line, which names an address, has none.

    >>> parse_rollup("55-7f ---p 00000000 00:00 0    [rollup]\\nPss:  9 kB\\nPss_Anon:  4 kB\\n")
    {'Pss': 9216, 'Pss_Anon': 4096}
    """
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows if len(row) == 3 and row[1].isdigit()}


def read_rollups(pids: Iterable[int], *, wanted: Iterable[str]) -> list[dict[str, int]] | None:
    """The figures of each of these processes, those that are gone left out.

    None where one of them may not be looked at, or does not tell all that is wanted.
    """
    names, found = set(wanted), []
    for pid in pids:
        try:
            sizes = parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        if not names <= sizes.keys():
            return None
        found.append(sizes)
    return found
