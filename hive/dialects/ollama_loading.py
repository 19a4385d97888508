"""Answers to requests of Ollama's clients to load, unload or fetch a model. Pure.

An empty prompt loads a model and, with a `keep_alive` of 0, unloads it (server/routes.go of 0.32): the first thing that
`ollama run` asks. The answers are Ollama's own, in one piece with any value of `stream`; only a fetch comes as lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

LOAD, UNLOAD = "load", "unload"
PROMPTS = {"/api/generate": "prompt", "/api/chat": "messages"}
"""The field that holds the prompt of either endpoint."""
_NOTHING = re.compile(rb'null|""|\[[ \t\r\n]*\]')
_LONGEST = 64
"""Bytes of a value that may be nothing, or a time."""
_PARTS = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_encode = msgspec.json.Encoder().encode
_time = msgspec.json.Decoder(float | str | None, strict=True).decode


def asks(fields: Mapping[str, msgspec.Raw], prompt: str) -> str:
    """`load` or `unload` where the field that holds the prompt is absent or empty; else nothing.

    >>> asks({}, "prompt"), asks({"messages": msgspec.Raw(b"[ ]"), "keep_alive": msgspec.Raw(b"0")}, "messages")
    ('load', 'unload')
    >>> asks({"prompt": msgspec.Raw(b'" "'), "keep_alive": msgspec.Raw(b"0")}, "prompt")
    ''
    """
    raw = fields.get(prompt)
    if raw is not None and not (len(memoryview(raw)) <= _LONGEST and _NOTHING.fullmatch(raw)):
        return ""
    return UNLOAD if _is_none(fields.get("keep_alive")) else LOAD


def _is_none(keep_alive: msgspec.Raw | None) -> bool:
    """Whether that is less than a second: a number of them, or a duration as Go writes it. Below 0 is for ever.

    >>> [_is_none(msgspec.Raw(raw)) for raw in (b"0", b"0.9", b'"0"', b'"0h0m"', b'"900ms"')]
    [True, True, True, True, True]
    >>> [_is_none(msgspec.Raw(raw)) for raw in (b"1", b"-1", b'"-1s"', b'"5m"', b'"0.5m"', b'"soon"', b"null", b"[]")]
    [False, False, False, False, False, False, False, False]
    """
    if keep_alive is None or len(memoryview(keep_alive)) > _LONGEST:
        return False
    try:
        told = _time(keep_alive)
    except msgspec.MsgspecError:
        return False
    if not isinstance(told, str):
        return told is not None and 0 <= told < 1
    if told == "0":
        return True
    parts = _PARTS.findall(told)
    is_duration = bool(parts) and "".join(number + unit for number, unit in parts) == told
    return is_duration and sum(float(number) * _SECONDS[unit] for number, unit in parts) < 1


def done(endpoint: str, model: str, reason: str, now: float) -> bytes:
    """The answer to a prompt that is empty. `now`: Unix seconds.

    >>> done("/api/generate", "tiny", "load", 0.0)
    b'{"model":"tiny","created_at":"1970-01-01T00:00:00.000000Z","response":"","done":true,"done_reason":"load"}'
    """
    said = {"response": ""} if endpoint == "/api/generate" else {"message": {"role": "assistant", "content": ""}}
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return _encode({"model": model, "created_at": at, **said, "done": True, "done_reason": reason})


def fetched(*, stream: bool) -> bytes:
    """The answer to `POST /api/pull` of a model that is there, or its last line.

    >>> fetched(stream=True), fetched(stream=False)
    (b'{"status":"success"}\\n', b'{"status":"success"}')
    """
    return b'{"status":"success"}' + (b"\n" if stream else b"")
