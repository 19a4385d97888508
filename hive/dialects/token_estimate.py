"""An estimate of the tokens of a prompt in Anthropic's dialect, for backends that do not count them. Pure.

OpenAI's dialect has no endpoint that counts the tokens of messages, and each model counts in its own way. Clients that
often ask for the length of a conversation (Claude Code) need a number all the same; it is marked as an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hive.errors import BadRequest

Raw = msgspec.Raw
BYTES_A_TOKEN = 3.5
"""Bytes of UTF-8 per token: English has about 4, source code 3 to 3.5, Chinese about one token a character, which has
3."""
A_MESSAGE = 4
AN_IMAGE = 1600
"""The most that one costs at Anthropic's: an estimate that is too low lets a context run over."""
_UNREAD = frozenset({"type", "id", "tool_use_id", "signature", "cache_control", "encrypted_content", "encrypted_index"})
_BRACE = b"{"[0]
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def estimate(fields: Mapping[str, Raw]) -> int:
    """The estimate for the fields of a request: `system`, `messages` and `tools`, with the schemas as they stand.

    Raises BadRequest for what cannot be read.

    >>> estimate({"messages": Raw(b'[{"role":"user","content":"How many bees are there in a hive?"}]')})
    15
    """
    try:
        system, messages = (_decode(fields.get(name, b"null")) for name in ("system", "messages"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("system and messages cannot be read") from None
    said, images = _sizes(system)
    turns = messages if isinstance(messages, list) else []
    for turn in turns:
        more, seen = _sizes(turn)
        said, images = said + more, images + seen
    said += len(bytes(fields.get("tools", b"")))
    return math.ceil(said / BYTES_A_TOKEN) + A_MESSAGE * len(turns) + AN_IMAGE * images


def reckoned(raw: Raw) -> int:
    """Tokens of one value: blocks of content, or the arguments of a tool. Raises BadRequest for what cannot be read.

    >>> reckoned(Raw(b'"How many bees are there in a hive?"')), reckoned(Raw(b'{"n":1}'))
    (10, 2)
    """
    if memoryview(raw)[0] == _BRACE:
        return math.ceil(len(bytes(raw)) / BYTES_A_TOKEN)
    try:
        said, images = _sizes(_decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("messages cannot be read") from None
    return math.ceil(said / BYTES_A_TOKEN) + AN_IMAGE * images


def told(fields: Mapping[str, Raw]) -> bytes:
    """An answer of `/v1/messages/count_tokens`, marked as an estimate.

    >>> told({"messages": Raw(b"[]")})
    b'{"input_tokens":0,"estimated":true}'
    """
    return _encode({"input_tokens": estimate(fields), "estimated": True})


def _sizes(value: Any) -> tuple[int, int]:
    """Bytes of text, and how many images."""
    said = images = 0
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            said += len(one.encode(errors="replace"))
        elif isinstance(one, list):
            pending.extend(one)
        elif isinstance(one, dict):
            if one.get("type") == "image":
                images += 1
            elif one.get("type") == "tool_use":
                said += len(_encode(one.get("input"))) + len(str(one.get("name")))
            elif one.get("type") != "base64":  # of a document, which no server here reads
                pending.extend(inner for name, inner in one.items() if name not in _UNREAD)
    return said, images
