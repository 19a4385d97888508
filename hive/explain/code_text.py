"""The form of one explanation, and what its code's classes carry."""

from __future__ import annotations

from typing import NamedTuple

from hive.errors import HiveError, all_errors


class CodeText(NamedTuple):
    """One code in words. Commands and codes stand between backticks.

    `told_in`: where it is found if no answer has it, with a status. `statuses`, `exit_codes`: of a code without a class
    in hive/errors.py; all others have those of their classes (`carried`), but no status where they are `told_in`.
    """

    means: str
    causes: tuple[str, ...]
    cures: tuple[str, ...]
    again: str
    told_in: str = ""
    statuses: tuple[int, ...] = ()
    exit_codes: tuple[int, ...] = (1,)


class Carried(NamedTuple):
    """HTTP statuses and exit codes that go with a code."""

    statuses: tuple[int, ...]
    exit_codes: tuple[int, ...]


def carried(code: str, found: CodeText) -> Carried:
    """
    >>> from hive.explain.book import BOOK
    >>> carried("not_found", BOOK["not_found"])
    Carried(statuses=(404,), exit_codes=(3,))
    >>> carried("not_ready", BOOK["not_ready"]), carried("no_image", BOOK["no_image"])
    (Carried(statuses=(409, 503), exit_codes=(1, 5)), Carried(statuses=(502,), exit_codes=(1,)))
    """
    classes = [one for one in all_errors() if one.code == code]
    if not classes:
        return Carried(found.statuses, found.exit_codes)
    statuses, exits = (tuple(sorted(set(each))) for each in zip(*map(_of_class, classes), strict=True))
    return Carried(() if found.told_in else statuses, exits)


def _of_class(cls: type[HiveError]) -> tuple[int, int]:
    return cls.status, cls.exit_code
