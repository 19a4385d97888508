"""An object of JSON as name → raw text: names folded, and none twice. Pure.

`msgspec.Raw` keeps a value as it was written; a dict keeps the last of equal names, which some decoder down the line
might not, so an object that repeats one is refused instead.
"""

from __future__ import annotations

import re

import msgspec

from hive.errors import BadRequest

MAX_NAMES = 256
"""Names one object may have: the longest schema known (vLLM's chat) has 70, and each costs 0.3 µs on the loop."""
MAX_ITEMS = 100_000
"""Items of one list that are looked at, 0.2 µs each; a conversation has hundreds."""
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_text = msgspec.json.Decoder(str).decode


def read_object(
    data: bytes | msgspec.Raw, what: str, known: frozenset[str] = frozenset()
) -> tuple[dict[str, msgspec.Raw], bytes]:
    """The object and its text built anew. Raises BadRequest; `what` names it there. `known`: names folded already.

    >>> read_object(b'{"Model": "m", "n": 1e2}', "the body")[1]
    b'{"model":"m","n":1e2}'
    >>> read_object(b'{"model":"small","MODEL":"huge"}', "the body")
    Traceback (most recent call last):
    hive.errors.BadRequest: the body names "model" more than once
    """
    try:
        fields = _decode(data)
    except msgspec.ValidationError:
        raise BadRequest(f"{what} must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{what} is not JSON: {error}") from None
    if len(fields) > MAX_NAMES:
        raise BadRequest(f"{what} has more than {MAX_NAMES} fields")
    text = _encode(fields)
    if len(text) != len(memoryview(data)):  # equal lengths leave no room for a repeated name, nor for white space
        try:
            packed = msgspec.json.format(bytes(data), indent=-1)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"{what} is not JSON: {error}") from None
        fields = _decode(packed)  # the objects within have no white space any more either, so that each is packed once
        text = _encode(fields)
        if len(text) != len(packed):  # a dict keeps the last of equal names
            raise BadRequest(f"{what} has a field twice, or a field name written with escapes")
    for name in fields:
        if name not in known and (not name.isascii() or not name.islower()):
            folded = _fold(fields, what)
            return (fields, text) if folded is fields else (folded, _encode(folded))
    return fields, text


def read_list(data: bytes | msgspec.Raw, what: str) -> list[msgspec.Raw]:
    """The items of a list. Raises BadRequest."""
    try:
        items = _decode_list(data)
    except (msgspec.MsgspecError, RecursionError):
        raise BadRequest(f"{what} must be a list") from None
    if len(items) > MAX_ITEMS:
        raise BadRequest(f"{what} has more than {MAX_ITEMS} items")
    return items


def read_text(data: bytes | msgspec.Raw, what: str) -> str:
    """The string. Raises BadRequest."""
    try:
        return _text(data)
    except msgspec.MsgspecError:
        raise BadRequest(f"{what} must be a string") from None


def _fold(fields: dict[str, msgspec.Raw], what: str) -> dict[str, msgspec.Raw]:
    """The same dict where every name is folded already, else a new one. Raises BadRequest on a clash."""
    folded: dict[str, msgspec.Raw] = {}
    for name, value in fields.items():
        plain = name.casefold()
        if plain in folded:
            raise BadRequest(f'{what} names "{shown(plain)}" more than once')
        folded[plain] = value
    return fields if folded.keys() == fields.keys() else folded


def shown(name: str) -> str:
    """A client's name as a header field or a message may carry it.

    >>> shown("a\\r\\nX-Evil: 1"), shown("o,k"), shown("é")
    ('a??X-Evil:?1', 'o?k', '?')
    """
    return re.sub(r"[^!-+\--~]", "?", name[:60])
