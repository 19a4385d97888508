"""A check that no message makes a server fetch or run anything. Pure.

vLLM and llama-server fetch `image_url`, `audio_url`, `video_url`, `input_audio` (its `data` too, where it begins with
`http`), `input_image`, `input_video` and Anthropic's `source`, from any address they can reach. So only `data:` URLs
pass. The check looks where a server looks: at the parts of a `content` list, never at the arguments of a tool call,
which may well hold the address of a page. Names are folded and unique here as everywhere.
"""

from __future__ import annotations

import re

import msgspec

from hive.bodies.json_object import read_list, read_object, read_text, shown
from hive.errors import BadRequest

_QUIET = frozenset({"role", "name", "type", "text", "id", "tool_calls", "tool_call_id", "tool_use_id", "cache_control"})
"""Names of messages and parts that carry no media, so that they cost one look."""
_MEDIA = frozenset({"image", "audio", "video", "file", "source", "media"})
_LABELS = frozenset({"detail", "format", "type", "media_type", "filename", "file_id", "id", "title", "context", "text"})
"""Names inside media that are no address."""
_NEVER = {
    "uuid": "vLLM looks media up by it in a cache that all callers share",
    "image_embeds": "a tensor is decoded with what can run code",
    "audio_embeds": "a tensor is decoded with what can run code",
}
_TENSORS = ("_embeds", "_pil")
_MAX_OBJECTS = 100_000
"""Objects and lists in messages that are looked through, some µs each."""
_MAX_SOURCES = 1000
"""Items of a list of media."""
_REMOTE = re.compile(rb"[\s\\]*(?:https?|file|[a-z][a-z0-9+.-]*:)", re.IGNORECASE)
_LOOKED_AT = 64
"""Bytes at a value's beginning that say whether it is an address."""
_NESTED = 16
"""Objects within objects: a tool's result holds parts, a document in it too."""


class _Plain(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A message of text only."""

    role: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    name: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: msgspec.Raw = msgspec.Raw()


_decode_plain = msgspec.json.Decoder(list[_Plain]).decode
_encode = msgspec.json.Encoder().encode


def is_text(raw: msgspec.Raw) -> bool:
    """Whether this is text, or messages of text, as nearly all are: cheaper than looking at each name.

    >>> is_text(msgspec.Raw(b'[{"role":"user","content":"see http://x/ [1]"}]')), is_text(msgspec.Raw(b'"hi"'))
    (True, True)
    >>> is_text(msgspec.Raw(b'[{"role":"user","content":[]}]')), is_text(msgspec.Raw(b'[{"content":[],"content":""}]'))
    (False, False)
    """
    data = bytes(raw)
    return data[0] == _QUOTE or _is_plain(data) or _reads_like_none(data)


def _is_plain(data: bytes) -> bool:
    """True if messages are written plainly: with white space, escapes in names or a name twice they are longer than
    here."""
    try:
        messages = _decode_plain(data)
    except (msgspec.MsgspecError, RecursionError):
        return False
    for message in messages:
        if memoryview(message.content or b'"')[0] != _QUOTE:
            return False
    return len(_encode(messages)) == len(data)


def _reads_like_none(data: bytes) -> bool:
    """True if nothing in messages reads like media, whatever other names they have."""
    look = data.find  # `in` raises and catches a TypeError first: 0.3 µs each time
    if look(b"\\u") >= 0 or look(b'_url"') >= 0 or look(b'"source"') >= 0 or look(b'"image"') >= 0:
        return False  # media may be given as a text too
    if look(b"[", 1) >= 0:
        return False
    at = look(b"{")  # no list within: anything but plain text would be an object behind a colon
    while at > 0 and data[at - 1] in b"[,":
        at = look(b"{", at + 1)
    return at < 0


def check_media(raw: msgspec.Raw, what: str, *, depth: int = 0) -> None:
    """Messages, or the parts of one. Raises BadRequest where they name media that would have to be fetched.

    >>> part = b'{"type":"image_url","image_url":{"url":"%b"}}'
    >>> check_media(msgspec.Raw(b'[{"content":[%b]}]' % (part % b"data:image/png;base64,aa")), "messages")
    >>> check_media(msgspec.Raw(b'[{"content":[%b]}]' % (part % b"http://x/")), "messages")
    Traceback (most recent call last):
    hive.errors.BadRequest: "image_url" in "messages" must be a data: URL; nothing is fetched from here
    """
    if depth > _NESTED:
        raise BadRequest(f'"{what}" nests content too deeply')
    if not depth and (text := bytes(raw)).count(b"{") + text.count(b"[") > _MAX_OBJECTS:
        raise BadRequest(f'"{what}" has more than {_MAX_OBJECTS} objects and lists')
    first = memoryview(raw)[0]
    if first == _BRACE:
        _check_part(raw, what, depth)
    elif first == _BRACKET:
        for item in read_list(raw, f'"{what}"'):
            if memoryview(item)[0] in (_BRACE, _BRACKET):
                check_media(item, what, depth=depth + 1)


_BRACE, _BRACKET, _QUOTE = b'{["'


def _check_part(part: msgspec.Raw, what: str, depth: int) -> None:
    fields = read_object(part, f'a part of "{what}"')[0]
    is_found = bytes(fields.get("type", b"")) == b'"search_result"'  # its source is a label
    for name, value in fields.items():
        if name == "type" and memoryview(value)[0] == _QUOTE and read_text(value, "a type").endswith(_TENSORS):
            raise BadRequest(f'tensors in "{what}" are not taken: {_NEVER["image_embeds"]}')
        if name in _QUIET:
            continue
        if name == "content":
            check_media(value, what, depth=depth + 1)
        elif name == "source" and is_found and memoryview(value)[0] == _QUOTE:
            continue
        elif name in _NEVER or name.endswith(_TENSORS):
            if bytes(value) != b"null":
                why = _NEVER.get(name, _NEVER["image_embeds"])
                raise BadRequest(f'"{shown(name)}" in "{what}" is not taken: {why}')
        elif name in _MEDIA or name.endswith("_url") or name.startswith("input_"):
            _check_source(name, name, value, what, depth + 1)


def _check_source(name: str, key: str, value: msgspec.Raw, what: str, depth: int) -> None:
    """A value under `key` in the media field `name`: text must be the media itself, an object is looked through."""
    if depth > _NESTED:
        raise BadRequest(f'"{what}" nests content too deeply')
    first = memoryview(value)[0]
    if first == _BRACE:
        inner = read_object(value, f'"{name}"')[0]
        is_text = name == "source" and bytes(inner.get("type", b"")) == b'"text"'  # its data is what it says
        for inner_key, raw in inner.items():
            if inner_key == "content":
                check_media(raw, what, depth=depth + 1)
            elif inner_key not in _LABELS and not (is_text and inner_key == "data"):
                _check_source(name, inner_key, raw, what, depth + 1)
    elif first == _BRACKET:
        items = read_list(value, f'"{name}"')
        if len(items) > _MAX_SOURCES:
            raise BadRequest(f'"{shown(name)}" in "{what}" has more than {_MAX_SOURCES} items')
        for item in items:
            _check_source(name, key, item, what, depth + 1)
    elif first == _QUOTE and not _is_local(key == "url" or key.endswith("_url"), value):
        raise BadRequest(f'"{shown(name)}" in "{what}" must be a data: URL; nothing is fetched from here')


def _is_local(is_url: bool, value: msgspec.Raw) -> bool:
    """Whether a string is media, not an address. Ten megabytes of base64 are not decoded for it."""
    begin = bytes(memoryview(value)[1:_LOOKED_AT])
    if begin.startswith(b"data:"):
        return True
    if b"\\" in begin:
        begin = read_text(value, "a URL")[:_LOOKED_AT].encode()
    return begin[:5] in (b"data:", b"", b'"') if is_url else _REMOTE.match(begin) is None


def check_tools(data: bytes) -> None:
    """Ollama itself runs `web_search…` for /v1/messages: it asks ollama.com. Raises BadRequest.

    >>> check_tools(b'[{"name":"look","input_schema":{}}]')
    >>> check_tools(b'[{"type":"web_search_20250305","name":"web_search"}]')
    Traceback (most recent call last):
    hive.errors.BadRequest: "tools" names "web_search_20250305", which would run on the server
    """
    if data.find(b"web_search") < 0 and data.find(b"\\u") < 0:
        return
    for item in read_list(data, '"tools"'):
        if memoryview(item)[0] == _BRACE and (kind := read_object(item, "a tool")[0].get("type")) is not None:
            name = read_text(kind, 'the "type" of a tool')
            if name.startswith("web_search"):
                raise BadRequest(f'"tools" names "{name[:60]}", which would run on the server')
