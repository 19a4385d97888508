"""Forms with a file (`multipart/form-data`): their text fields as a JSON object, and back. Pure.

In between a form is judged like any other body, by the same table. What goes upstream is built anew: text fields that
the table knows, in its order, then the file, under a name of Hive's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from hive.bodies.json_object import MAX_NAMES, shown
from hive.errors import BadRequest

FILE = "file"
"""The field that has the file."""
FILE_HEAD = b'Content-Disposition: form-data; name="file"; filename="audio"\r\nContent-Type: application/octet-stream'
"""The file goes by one name: the client's would be one more text of a stranger's, with a path in it."""
_NUMBER = re.compile(r"-?((0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?|\.[0-9]{1,16})([eE][+-]?[0-9]{1,3})?")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, object]).decode


class Kind(StrEnum):
    """The kind of value that the text of a field is read as."""

    TEXT = "text"
    NUMBER = "number"
    SWITCH = "switch"
    LIST = "list"


_AUDIO = {"model": Kind.TEXT, "prompt": Kind.TEXT, "response_format": Kind.TEXT, "temperature": Kind.NUMBER}
FORMS: Mapping[str, Mapping[str, Kind]] = {
    "/v1/audio/transcriptions": {
        **_AUDIO,
        "language": Kind.TEXT,
        "timestamp_granularities": Kind.LIST,
        "stream": Kind.SWITCH,
    },
    "/v1/audio/translations": {**_AUDIO, "stream": Kind.SWITCH},
}
"""The text fields that go upstream, by endpoint, in that order."""


def as_object(target: str, fields: Sequence[tuple[str, bytes]]) -> bytes:
    """The text fields of a form as a JSON object. Raises BadRequest.

    `x[]` is an item of the list `x`, as clients write it. A field that is in no table stays a text.

    >>> as_object("/v1/audio/transcriptions", [("model", b"tiny"), ("temperature", b"0.2"), ("stream", b"true")])
    b'{"model":"tiny","temperature":0.2,"stream":true}'
    >>> as_object("/v1/audio/transcriptions", [("timestamp_granularities[]", b"word"), ("x", b"1")])
    b'{"timestamp_granularities":["word"],"x":"1"}'
    """
    kinds, found = FORMS[target], dict[str, object]()
    for name, raw in fields:
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise BadRequest(f'"{shown(name)}" is not UTF-8') from None
        plain = name.removesuffix("[]").casefold()
        if name.endswith("[]") or kinds.get(plain) is Kind.LIST:
            items = found.setdefault(plain, [])
            if not isinstance(items, list):
                raise _twice(name)
            items.append(text)
        elif plain in found:
            raise _twice(name)
        else:
            found[plain] = _value(name, text, kinds.get(plain, Kind.TEXT))
    if len(found) > MAX_NAMES:
        raise BadRequest(f"the form has more than {MAX_NAMES} fields")
    return _encode(found)


def _twice(name: str) -> BadRequest:
    return BadRequest(f'the form names "{shown(name)}" more than once')


def _value(name: str, text: str, kind: Kind) -> object:
    if kind is Kind.NUMBER:
        if not text.strip():
            return None
        if not _NUMBER.fullmatch(text.strip()):
            raise BadRequest(f'"{shown(name)}" must be a number')
        number = text.strip().encode()
        return msgspec.Raw(b"0" + number if number.startswith(b".") else number.replace(b"-.", b"-0."))
    if kind is Kind.SWITCH:
        switch = text.strip().lower()
        if switch not in ("true", "false", ""):
            raise BadRequest(f'"{shown(name)}" must be true or false')
        return switch == "true" if switch else None
    return text


def sent_form(target: str, judged: bytes, boundary: bytes) -> tuple[bytes, bytes]:
    """Makes the bytes before the file, and after it, in the form that goes upstream. `judged`: its text fields, as an
    object; what no table knows stays here.

    >>> before, after = sent_form("/v1/audio/translations", b'{"stream":false,"model":"tiny"}', b"XX")
    >>> before.split(b"\\r\\n")[:7]
    [b'--XX', b'Content-Disposition: form-data; name="model"', b'', b'tiny', b'--XX', \
b'Content-Disposition: form-data; name="stream"', b'']
    >>> before.endswith(b"octet-stream\\r\\n\\r\\n"), after
    (True, b'\\r\\n--XX--\\r\\n')
    """
    fields, pieces = _decode(judged), list[bytes]()
    for name, kind in FORMS[target].items():
        value = fields.get(name)
        if value is None:
            continue
        written = f"{name}[]" if kind is Kind.LIST else name
        for item in value if isinstance(value, list) else [value]:
            text = item.encode() if isinstance(item, str) else _encode(item)
            pieces.append(
                b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary, written.encode(), text)
            )
    pieces.append(b"--%b\r\n%b\r\n\r\n" % (boundary, FILE_HEAD))
    return b"".join(pieces), b"\r\n--%b--\r\n" % boundary
