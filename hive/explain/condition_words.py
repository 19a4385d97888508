"""The templates of conditions in words: each fact is its name in capitals."""

from __future__ import annotations

from typing import Any

from hive.conditions import TABLE, Row, Where


class FactName(str):
    """A fact's name, whatever its format."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec.startswith("?"):
            return f"[{spec[1:].replace('*', self)}]"
        return spec.split("/")[2] if spec.startswith("/") else str(self)


class FactNames(dict[str, Any]):
    """Every fact is its own name."""

    def __missing__(self, name: str) -> FactName:
        return FactName(name.upper())


def in_words(template: str, where: Where) -> str:
    """
    >>> in_words("Redis at {at} is down{why:? (*)}", Where())
    'Redis at AT is down[ (WHY)]'
    """
    return template.format_map(FactNames(where.named())).replace("\n", " ")


def fixes(row: Row) -> list[str]:
    """The commands, of an installed Hive first, then of a `hive up` where it is another one."""
    told = [in_words(row.fix, Where(installed=True))]
    told.append(in_words(row.fix if row.up_fix is None else row.up_fix, Where()))
    return [fix for fix in dict.fromkeys(told) if fix]


def severities(row: Row) -> str:
    return f"{row.severity} / {row.up_severity}" if row.up_severity else str(row.severity)


def means(code: str) -> str:
    return in_words(TABLE[code].text, Where(installed=True))
