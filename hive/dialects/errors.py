"""Hive's own errors in the dialect of the path, so that each client's own error class comes out of it."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from hive.dialects.openai_answers import kind_of, status_of, words_of
from hive.domain import Dialect
from hive.errors import BackendGaveUp, BudgetExceeded, HiveError, MethodNotAllowed, Saturated, TooManyRequests

_encode = msgspec.json.Encoder().encode
MAX_RETRY_AFTER_S = 120
"""openai-python does not retry at all beyond this (measured with 3.51.0)."""

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "not_supported_error",
    503: "overloaded_error",
    505: "invalid_request_error",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",  # Anthropic's own status for it is 529, which no other client knows
    504: "timeout_error",
}
"""The rest is `invalid_request_error` where the request is to blame, else `api_error`."""


_STATUS_OF = {
    "invalid_request_error": 400,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
"""Status by the type of an error in a stream, or in an answer under 200, that tells only its type."""


class GaveUp(msgspec.Struct, frozen=True):
    """A backend's error when it gave up in its answer: in the form of the client's dialect, empty if the backend gave
    none, and the status for an answer that has not begun."""

    body: bytes = b""
    status: int = 502


def gave_up_saying(told: bytes) -> GaveUp:
    """An error that a backend told inside an answer of status 200, in its own words and with its own status. Its text
    about a key (401) is not for the client: servers repeat a part of it.

    >>> gave_up_saying(b'{"error":{"message":"too long","code":400}}').status
    400
    >>> gave_up_saying(b'{"type":"error","error":{"type":"overloaded_error"}}').status, gave_up_saying(b"{}").status
    (503, 502)
    """
    status = status_of(told) or _STATUS_OF.get(kind_of(told), 502)
    return GaveUp(told, status) if status != 401 else GaveUp()


_PATH = re.compile(
    rb"(?:(?<![\w/.~-])|(?<=\\[nrt]))/(?!v\d+/|api/)(?:[\w.@+~%-]+/)+([\w.@+~%-]*)"
    rb"|(?<![\\\w/.~-])[A-Za-z]:(?:\\\\[^\s\\\"':;,]+)*\\\\([^\s\\\"':;,]*)"
)
"""The name of a file with its directories, of either kind, as JSON has it; none of an API's paths, and no URL."""


def without_host_paths(told: bytes) -> bytes:
    r"""A server's error text without the directories of its host: an agent must not learn the places of its files.

    >>> without_host_paths(b'{"error":"open /root/.ollama/models/blobs/sha256-ab: no such file"}')
    b'{"error":"open sha256-ab: no such file"}'
    >>> without_host_paths(b'{"error":"ask /v1/chat/completions at http://h/a/b, and/or registry.ai/library/tiny"}')
    b'{"error":"ask /v1/chat/completions at http://h/a/b, and/or registry.ai/library/tiny"}'
    >>> without_host_paths(rb'{"error":"open C:\\Users\\me\\blobs\\sha256-ab: no"}')
    b'{"error":"open sha256-ab: no"}'
    """
    return _PATH.sub(lambda found: found[1] or found[2] or b"", told)


def render(error: HiveError, dialect: Dialect, request_id: str = "") -> bytes:
    """The JSON body of an error, as the dialect's own clients take it; `src` says that it is Hive's. What a backend
    said when it gave up stays as it said it.

    A string for Ollama's, an object for OpenAI's and Anthropic's; only the last has a place for `request_id`.

    >>> from hive.errors import NotFound
    >>> render(NotFound("no such model"), Dialect.OLLAMA)
    b'{"error":"no such model","code":"not_found","src":"hive"}'
    >>> render(NotFound("no such model"), Dialect.ANTHROPIC, "e-7")[:73]
    b'{"type":"error","error":{"type":"not_found_error","message":"no such mode'
    """
    if isinstance(error, BackendGaveUp) and error.told:
        return error.told
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    if dialect is Dialect.OLLAMA:
        return _encode({"error": text, "code": error.code, "src": "hive", **error.details})
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        why = {"type": kind, "message": text, "code": error.code, "src": "hive", **error.details}
        return _encode({"type": "error", "error": why, "request_id": request_id or None})
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    told = {"message": text, "type": kind, "param": None, "code": error.code, "src": "hive", **error.details}
    return _encode({"error": told})


def as_event(told: bytes, dialect: Dialect) -> bytes:
    """An error's body, which has to be one line, as the last event of a stream that has begun; goes where the bytes so
    far end between two events.

    >>> as_event(b'{"error":"no"}', Dialect.OPENAI)
    b'data: {"error":"no"}\\n\\n'
    """
    if dialect is Dialect.OLLAMA:
        return told + b"\n"
    return (b"event: error\n" if dialect is Dialect.ANTHROPIC else b"") + b"data: " + told + b"\n\n"


def as_response_error(told: bytes, number: int) -> bytes:
    """An error's body of OpenAI's dialect as an event of a stream of Responses, which are numbered. It is there twice,
    as OpenAI's schema has it and as OpenAI's server sends it: clients look for either.

    >>> as_response_error(b'{"error":{"message":"no","type":"x","code":null}}', 3)[13:85]
    b'data: {"type":"error","code":"x","message":"no","param":null,"sequence_n'
    """
    try:
        error = msgspec.json.decode(told, type=_Told).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = {"message": words_of(told)}
    message, code = error.get("message"), error.get("code") or error.get("type")
    schema = {"type": "error", "code": code and str(code), "message": message, "param": None, "sequence_number": number}
    return b"event: error\ndata: %b\n\n" % _encode({**schema, "error": error})


class _Told(msgspec.Struct):
    error: dict[str, Any]


def heartbeat(dialect: Dialect, target: bytes, model: str) -> bytes:
    """A sign of life inside a stream that says nothing: a comment, or an NDJSON chunk without text.

    NDJSON has no comments, and ollama-python 0.6.3 fails on an empty line. The chunk has all fields of a real one; its
    time is Go's zero time, which Ollama itself writes where it has none.

    >>> heartbeat(Dialect.OPENAI, b"/v1/chat/completions", "m")
    b': waiting\\n\\n'
    >>> heartbeat(Dialect.OLLAMA, b"/api/generate", "m")
    b'{"model":"m","created_at":"0001-01-01T00:00:00Z","response":"","done":false}\\n'
    """
    if dialect is not Dialect.OLLAMA:
        return b": waiting\n\n"
    chunk: dict[str, object] = {"model": model, "created_at": "0001-01-01T00:00:00Z"}
    if target == b"/api/chat":
        chunk["message"] = {"role": "assistant", "content": ""}
    else:
        chunk["response"] = ""
    return _encode({**chunk, "done": False}) + b"\n"


def error_fields(error: HiveError) -> bytes:
    """The head fields that go with an error: when to come again, or that it is of no use.

    >>> from hive.errors import BadRequest
    >>> error_fields(BadRequest()), error_fields(Saturated(retry_after_s=0.4))
    (b'x-should-retry: false\\r\\n', b'retry-after: 1\\r\\nretry-after-ms: 400\\r\\n')
    """
    if isinstance(error, BudgetExceeded):  # nobody is to come again before: the whole time, and the word not to
        wait_s = max(0.0, error.retry_after_s or 0.0)
        return b"retry-after: %d\r\nx-should-retry: false\r\n" % max(1, math.ceil(wait_s))
    if isinstance(error, Saturated | TooManyRequests):
        wait_s = min(MAX_RETRY_AFTER_S, max(0.0, error.retry_after_s if error.retry_after_s is not None else 1.0))
        return b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, math.ceil(wait_s)), math.ceil(wait_s * 1000))
    allow = b"allow: %b\r\n" % error.allow.encode() if isinstance(error, MethodNotAllowed) and error.allow else b""
    return allow + (b"x-should-retry: false\r\n" if error.status < 500 or error.status == 501 else b"")
