"""Errors of a backend that are in no dialect: a proxy's page, `Internal Server Error` as text, FastAPI's `detail`. They
become Hive's own, so that each client's error class comes out of them. Pure."""

from __future__ import annotations

import re

import msgspec

from hive.dialects.errors import MAX_RETRY_AFTER_S, without_host_paths
from hive.dialects.openai_answers import NONE, NOT_JSON, words_of
from hive.errors import BackendFailed, BackendRefused, HiveError, Saturated, TooManyRequests

SHOWN_MAX = 200
"""Characters of its own words that the client sees."""
NO_ROOM = frozenset({429, 503, 529})
"""Statuses by which a server takes no work on now; 529 is Anthropic's."""
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_NO_TEXT = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK = "Traceback (most recent call last)"


class _Said(msgspec.Struct):
    error: msgspec.Raw = NONE
    object: msgspec.Raw = NONE
    type: msgspec.Raw = NONE


_said = msgspec.json.Decoder(_Said).decode


def is_in_a_dialect(body: bytes) -> bool:
    """Whether an error is one of a dialect: OpenAI's, Ollama's, Anthropic's, or of a server that speaks one nearly.

    >>> [is_in_a_dialect(said) for said in (b'{"error":"no"}', b'{"object":"error","message":"no"}')]
    [True, True]
    >>> [is_in_a_dialect(said) for said in (b"Internal Server Error", b'{"detail":"Not Found"}', b'{"error":null}')]
    [False, False, False]
    """
    try:
        said = _said(body)
    except NOT_JSON:
        return False
    error = bytes(said.error)
    return error[:1] in (b"{", b'"') or b'"error"' in (bytes(said.object), bytes(said.type))


def told_of(status: int, body: bytes, retry_after: bytes = b"") -> HiveError:
    """The error for a backend's of this status, which is in no dialect. `retry_after`: its own field of that name.

    >>> error = told_of(500, b"Internal Server Error")
    >>> error.status, error.code, error.message
    (502, 'backend_failed', 'the backend failed (500): Internal Server Error')
    >>> error = told_of(503, b"<html><title>503 Busy</title><h1>503 Busy</h1></html>", b"7")
    >>> error.status, error.message, error.retry_after_s
    (503, 'the backend takes no request now (503): 503 Busy', 7.0)
    >>> told_of(413, b"").status, told_of(413, b"").message
    (413, 'the backend refused it (413) and did not say why')
    """
    words = shown(body)
    said = f"({status}): {words}" if words else f"({status}) and did not say why"
    wait_s = float(retry_after) if retry_after.isdigit() and len(retry_after) < 10 else None
    if wait_s is not None:
        wait_s = min(wait_s, MAX_RETRY_AFTER_S)
    if status in NO_ROOM:
        refusal = TooManyRequests if status == TooManyRequests.status else Saturated
        return refusal(f"the backend takes no request now {said}", retry_after_s=wait_s)
    if status >= 500 or status == 408:  # 408: the request was too slow for a proxy on the way, and it was Hive's
        return BackendFailed(f"the backend failed {said}")
    return BackendRefused(f"the backend refused it {said}", status)


def shown(body: bytes) -> str:
    r"""The words in an error's body, for a client: a page's title, else what stands in it; one line of at most 200
    characters, without the directories of the host and what would steer a terminal.

    >>> shown(b"<html><head><title>502 Bad Gateway</title></head><body><hr>nginx</body></html>")
    '502 Bad Gateway'
    >>> shown(b"<p>no &amp; <b>no</b></p><script>x()</script>"), shown(b'{"detail":"no"}'), shown(b"\x1b[31mno\n")
    ('no & no', 'no', 'no')
    >>> shown(b"Traceback (most recent call last):\n  File \"/opt/ray/a.py\"\nValueError: open /opt/m/x.bin\n")
    'ValueError: open x.bin'
    """
    text = _COLOUR.sub("", words_of(body))
    if text.startswith("<"):
        import html  # its table of entities is 0.4 MB, and few servers answer with a page

        title = _TITLE.search(text)
        text = html.unescape(_NO_TEXT.sub(" ", title[1] if title is not None else text))
    elif _TRACEBACK in text:
        text = text.rstrip().rpartition("\n")[2]
    text = without_host_paths(text.encode()).decode(errors="replace")
    words = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return words if len(words) <= SHOWN_MAX else f"{words[: SHOWN_MAX - 1]}…"
