"""A code's text, for a terminal and for docs/reference/errors.md: the same lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from hive.conditions import TABLE
from hive.explain.book import BOOK, CHAPTERS, EXITS
from hive.explain.code_text import CodeText, carried
from hive.explain.condition_words import fixes, means, severities

WIDTH = 100
_SPAN = re.compile(r"`[^`]*`")


def text_of(code: str, width: int = WIDTH) -> str:
    """Lines of at most `width`, where none is a command.

    >>> print(text_of("target_too_long"))
    The first line of the request, with path and query, is longer than Hive takes.
    <BLANKLINE>
    Usual causes:
    <BLANKLINE>
    - data in the query of a URL that belongs into the body
    <BLANKLINE>
    What to do:
    <BLANKLINE>
    - send it as the body of a POST
    <BLANKLINE>
    HTTP status 414; exit code 2. Try again: no.
    """
    parts = [_told(code, BOOK[code], width)] if code in BOOK else []
    if code in TABLE:
        parts.append(_condition(code, width))
    return "\n\n".join(parts)


def sentence_of(code: str) -> str:
    """One line: its first sentence.

    >>> sentence_of("redis_of_url_down")
    'Redis at AT is down[ (WHY)]: its keys get old, all else works'
    """
    return first_sentence(BOOK[code].means) if code in BOOK else means(code)


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("It is so, as hive.conf(5) says. And more.")
    'It is so, as hive.conf(5) says.'
    """
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text, maxsplit=1)[0]


def as_json(code: str) -> dict[str, Any]:
    """The same for programs."""
    told = BOOK.get(code)
    row = TABLE.get(code)
    has = None if told is None else carried(code, told)
    return {
        "code": code,
        "sentence": sentence_of(code),
        "text": text_of(code),
        "means": means(code) if told is None else told.means,
        "causes": [] if told is None else list(told.causes),
        "remedies": fixes(TABLE[code]) if told is None else list(told.cures),
        "again": None if told is None else told.again,
        "statuses": [] if has is None else list(has.statuses),
        "exit_codes": [] if has is None else list(has.exit_codes),
        "severity": None if row is None else str(row.severity),
    }


def _told(code: str, told: CodeText, width: int) -> str:
    parts = [
        _wrapped(told.means, width),
        "Usual causes:",
        _listed(told.causes, width),
        "What to do:",
        _listed(told.cures, width),
        _wrapped(f"{_carried(code, told)}. Try again: {told.again}.", width),
    ]
    return "\n\n".join(parts)


def _carried(code: str, told: CodeText) -> str:
    """
    >>> _carried("backend_refused", BOOK["backend_refused"])
    "HTTP status: the server's own, below 500; exit code 4"
    >>> _carried("lease_ended", BOOK["lease_ended"])[:39]
    'In `hive lease list --ended 20`, `hive '
    """
    has = carried(code, told)
    if code == "backend_refused":
        status = "HTTP status: the server's own, below 500"
    elif has.statuses:
        status = f"HTTP status {_either(has.statuses)}"
    else:
        return f"In {told.told_in}; exit code {_either(has.exit_codes)}"
    return f"{status}; exit code {_either(has.exit_codes)}"


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _condition(code: str, width: int) -> str:
    """The words of `hive status` and `hive doctor` under this code, with the names of the facts in them."""
    row = TABLE[code]
    parts = [
        _wrapped(f"A condition ({severities(row)}), which `hive status` or `hive doctor` tells as:", width),
        _wrapped(f"> {means(code)}", width, after="> "),
    ]
    if found := fixes(row):
        which = ", in an installed Hive and under `hive up`" if len(found) > 1 else ""
        parts += [f"What to type{which}:", "\n".join(f"    {fix}" for fix in found)]
    return "\n\n".join(parts)


def _listed(items: Sequence[str], width: int) -> str:
    return "\n".join(_wrapped(f"- {item}", width, after="  ") for item in items)


def _wrapped(text: str, width: int, *, after: str = "") -> str:
    """Lines of at most `width`, where no command between backticks is broken.

    >>> _wrapped("a " * 45 + "`hive agent list --all`", WIDTH).count("\\n")
    1
    """
    held = _SPAN.sub(lambda found: found[0].replace(" ", "\x00"), text)
    lines = textwrap.wrap(held, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\x00", " ")


# --- all of them --------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Errors: cause and cure

Every error of Hive has a code, which stays. A command prints it in brackets behind the first line of its error,
and in `code` with `--json`; the API, the runner API and the proxy have it in `code` of their errors, `/metrics`
counts refusals by it, and `hive status` and `hive doctor` show it behind each condition. `hive explain CODE` prints
what stands here, without a Hive that runs; `hive explain 503` lists the codes with an HTTP status or an exit code,
`hive explain` all.

```console
$ hive agent show alicia
hive: there is no agent 'alicia'  [not_found]
hint: did you mean `alice`?
$ hive explain not_found
```

An inference server's own errors are passed on with its own codes: those are explained by that server. What
`Try again` says is for the same request: SDKs do it by themselves where `Retry-After` comes with the answer.

Made of the tables in `hive/explain` and `hive/conditions.py` by `python tests/test_explain.py`.
"""


def document() -> str:
    """docs/reference/errors.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "## Exit codes\n"
    yield "| exit code | meaning |\n|---|---|"
    yield from (f"| {number} | {said} |" for number, said in EXITS.items())
    for title, chapter in CHAPTERS.items():
        yield f"\n## {title}"
        for code in chapter:
            yield f"\n### {code}\n\n{text_of(code)}"
    yield "\n## Conditions\n"
    yield "The same as a table, which is quicker to look through: [conditions](../conditions.md). Words in capitals"
    yield "stand for what was found, what is in brackets is told where there is something to tell, and a severity after"
    yield "a slash is that under `hive up`."
    for code in TABLE:
        if code not in BOOK:
            yield f"\n### {code}\n\n{text_of(code)}"
