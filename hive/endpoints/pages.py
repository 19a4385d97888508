"""A part of the list of models, by `limit`, `after_id` and `before_id` of `GET /v1/models`. Pure.

Anthropic's list has these parameters (anthropic-python 2.12 pages by them), OpenAI's has none. Without them it is all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

from hive.errors import BadRequest

MOST = 1000
"""Anthropic's own bound of `limit`."""
MOST_PARAMETERS = 64


class Page(NamedTuple):
    """A part of a list: at most `limit` (None: all), behind the name `after_id`, before the name `before_id`."""

    limit: int | None = None
    after_id: str = ""
    before_id: str = ""


EVERYTHING = Page()


class Cut(NamedTuple):
    """The part of a list, as `first` and `last` (behind it) in it. `has_more`: in the direction that was asked for."""

    first: int
    last: int
    has_more: bool


def page_of(target: bytes) -> Page:
    """The page that a target's query asks for; unknown and empty parameters are ignored. Of one that is there twice the
    last one counts. Raises BadRequest.

    >>> page_of(b"/v1/models?limit=2&x=1&after_id=meta%2Fx"), page_of(b"/v1/models")
    (Page(limit=2, after_id='meta/x', before_id=''), Page(limit=None, after_id='', before_id=''))
    """
    query = target.partition(b"?")[2]
    if not query:
        return EVERYTHING
    try:
        asked = dict(parse_qsl(query.decode("ascii", "replace"), max_num_fields=MOST_PARAMETERS))
    except ValueError:
        raise BadRequest(f"more than {MOST_PARAMETERS} parameters in the query") from None
    limit = asked.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST):
        raise BadRequest(f"limit is a whole number from 1 to {MOST}")
    return Page(None if limit is None else int(limit), asked.get("after_id", ""), asked.get("before_id", ""))


def cut(names: Sequence[str], page: Page) -> Cut:
    """The begin and end of the part in `names`. With `before_id` alone it is the last ones before that name.

    Raises BadRequest for a name that is not in the list.

    >>> names = ["a", "b", "c", "d"]
    >>> cut(names, Page(limit=2)), cut(names, Page(limit=2, after_id="b"))
    (Cut(first=0, last=2, has_more=True), Cut(first=2, last=4, has_more=False))
    >>> cut(names, Page(limit=2, before_id="d")), cut(names, Page(after_id="a", before_id="d"))
    (Cut(first=1, last=3, has_more=True), Cut(first=1, last=3, has_more=False))
    """
    first = _index(names, "after_id", page.after_id) + 1 if page.after_id else 0
    last = _index(names, "before_id", page.before_id) if page.before_id else len(names)
    last = max(first, last)
    if page.limit is None or last - first <= page.limit:
        return Cut(first, last, False)
    if page.before_id and not page.after_id:
        return Cut(last - page.limit, last, True)
    return Cut(first, first + page.limit, True)


def _index(names: Sequence[str], parameter: str, name: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise BadRequest(f"{parameter}: the list has no model {name[:80]!r}") from None
