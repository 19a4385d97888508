"""All codes, and how one is found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from hive.conditions import TABLE
from hive.errors import NotFound
from hive.explain.box import BOX
from hive.explain.calls import CALLS
from hive.explain.code_text import CodeText, carried
from hive.explain.engines import ENGINES
from hive.explain.models import MODELS
from hive.explain.operations import OPERATIONS

CHAPTERS: Mapping[str, Mapping[str, CodeText]] = {
    "Commands, settings and services": BOX,
    "Requests, and who makes them": CALLS,
    "Models, servers, adapters and leases": MODELS,
    "Operations that need signatures": OPERATIONS,
    "Sound, images and jobs": ENGINES,
}
BOOK: Mapping[str, CodeText] = {code: told for chapter in CHAPTERS.values() for code, told in chapter.items()}
EXITS: Mapping[int, str] = {
    0: "it is done",
    1: "it failed",
    2: "the command line, a request or a setting is wrong",
    3: "it was not found",
    4: "it is not permitted",
    5: "something that it needs does not answer, or has no room",
    6: "it failed, and what was there before is in force again",
    7: "it did not happen in time",
    125: "`hive agent exec`, `hive lease run`: Hive failed, not the program",
    126: "`hive agent exec`, `hive lease run`: the program may not be executed",
    127: "`hive agent exec`, `hive lease run`: there is no such program",
    130: "it was interrupted, as by Ctrl-C",
}
"""Exit codes of `hive`, and of no other program."""
NEAR = 3


def every_code() -> list[str]:
    """
    >>> "not_found" in every_code(), "redis_down" in every_code()
    (True, True)
    """
    return list(dict.fromkeys([*BOOK, *TABLE]))


def find(word: str) -> list[str]:
    """The codes that a word means: itself, those with this HTTP status, or those with this exit code; of an exit code
    or a status that no code has, none. Raises NotFound.

    >>> find("[not_found]"), find("414"), find("6"), find("130")
    (['not_found'], ['target_too_long'], ['rolled_back'], [])
    """
    code = word.strip().strip("[]`'\"").lower().replace("-", "_")
    if code in BOOK or code in TABLE:
        return [code]
    if (number := number_of(code)) is not None:
        return _with_number(number)
    raise NotFound(f"there is no code {word[:64]!r}", hint=_hint(code))


def number_of(word: str) -> int | None:
    """
    >>> number_of(" 503"), number_of("not_found"), number_of("²")
    (503, None, None)
    """
    return int(word) if re.fullmatch("[0-9]{1,3}", word := word.strip()) else None


def _with_number(number: int) -> list[str]:
    of_exit = number < 100 or number in EXITS
    both = ((code, carried(code, told)) for code, told in BOOK.items())
    found = [code for code, has in both if number in (has.exit_codes if of_exit else has.statuses)]
    if not found and number not in EXITS:
        raise NotFound(f"no code of Hive's has the {'exit code' if of_exit else 'HTTP status'} {number}", hint=_ALL)
    return found


_ALL = "hive explain lists all"


def _hint(code: str) -> str:
    near = [*get_close_matches(code, every_code(), n=NEAR), *_with_its_words(code, every_code())][:NEAR]
    if not near:
        return f"{_ALL}; a code of an inference server's own is explained by that server"
    return f"did you mean {' or '.join(f'`{one}`' for one in dict.fromkeys(near))}?"


def _with_its_words(code: str, known: Iterable[str]) -> list[str]:
    """
    >>> _with_its_words("token", ["stale_token", "op_token_invalid", "busy"])
    ['stale_token', 'op_token_invalid']
    """
    return [one for one in known if len(code) > 2 and code in one.split("_")]
