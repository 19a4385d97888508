"""Hive's own errors in the dialect of the path, so that each client's own error class comes out of it."""

from __future__ import annotations

import math

import msgspec

from hive.domain import Dialect
from hive.errors import HiveError, MethodNotAllowed, Saturated, TooManyRequests

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


def render(error: HiveError, dialect: Dialect) -> bytes:
    """The JSON body of an error: a string for Ollama's clients, an object for OpenAI's; `src` says it is Hive's.

    >>> from hive.errors import NotFound
    >>> render(NotFound("no such model"), Dialect.OLLAMA)
    b'{"error":"no such model","src":"hive"}'
    """
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    if dialect is Dialect.OLLAMA:
        return _encode({"error": text, "src": "hive", **error.details})
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    told = {"message": text, "type": kind, "param": None, "code": error.code, "src": "hive", **error.details}
    return _encode({"error": told})


def error_fields(error: HiveError) -> bytes:
    """The head fields that go with an error: when to come again, or that it is of no use.

    >>> from hive.errors import BadRequest
    >>> error_fields(BadRequest()), error_fields(Saturated(retry_after_s=0.4))
    (b'x-should-retry: false\\r\\n', b'retry-after: 1\\r\\nretry-after-ms: 400\\r\\n')
    """
    if isinstance(error, Saturated | TooManyRequests):
        wait_s = min(MAX_RETRY_AFTER_S, max(0.0, error.retry_after_s if error.retry_after_s is not None else 1.0))
        return b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, math.ceil(wait_s)), math.ceil(wait_s * 1000))
    allow = b"allow: %b\r\n" % error.allow.encode() if isinstance(error, MethodNotAllowed) and error.allow else b""
    return allow + (b"x-should-retry: false\r\n" if error.status < 500 or error.status == 501 else b"")
