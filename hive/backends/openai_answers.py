"""Questions that servers of OpenAI's dialect answer alike: for one token, and for the names of their models. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from hive.backends.conversation import AskedServer, Conversation, shape
from hive.errors import BackendDown, BackendTimeout

ONE_TOKEN_PROMPT = "Hi"
MODELS = "/v1/models"


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    choices: list[_Choice] = []


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


def all_listed(server: AskedServer) -> Conversation[frozenset[str] | None]:
    """The models in its list, of a server that has all of them in memory; None where it does not answer."""
    try:
        return frozenset(row.id for row in (yield from shape(server, MODELS, _List)).data)
    except (BackendDown, BackendTimeout):
        return None


def completion(model: str, limit: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG001 - completions know one name
    """Path and body.

    >>> completion("m", "max_tokens")
    ('/v1/completions', {'model': 'm', 'prompt': 'Hi', 'max_tokens': 1})
    """
    return "/v1/completions", {"model": model, "prompt": ONE_TOKEN_PROMPT, "max_tokens": 1}


def tokens_in(body: bytes) -> int:
    """Number of tokens an answer says it generated; 0 where it does not say so.

    >>> tokens_in(b'{"usage":{"completion_tokens":1}}'), tokens_in(b'{"usage":{}}')
    (1, 0)
    """
    try:
        return msgspec.json.decode(body, type=_Answer).usage.completion_tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


def text_in(body: bytes) -> str:
    """The text of an answer to `completion`; empty where it has none.

    >>> text_in(b'{"choices":[{"text":" there"}],"usage":{"completion_tokens":1}}'), text_in(b'{}')
    (' there', '')
    """
    try:
        choices = msgspec.json.decode(body, type=_Answer).choices
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return choices[0].text if choices else ""
