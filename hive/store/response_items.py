"""The items of kept responses, as JSON text: given ids, joined, found by id, cut into pages. Pure.

Items are taken over as their client or Hive wrote them; only what a question needs of them is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from hive.errors import BadRequest, NotFound

PAGE_MOST = 100
"""OpenAI's own bound of `limit`; 20 is what it takes where none is named."""
PAGE_USUAL = 20
ID_MAX = 256
"""Characters of an item's id that are looked at."""

_encode = msgspec.json.Encoder().encode
_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Head(msgspec.Struct):
    """The fields that are read of each item."""

    id: str | None = None
    type: str | None = None


class _Answered(msgspec.Struct):
    output: msgspec.Raw = msgspec.Raw(b"[]")


class ItemPage(NamedTuple):
    """A part of a list: at most `limit` items behind the one named `after`, the newest first unless `ascending`."""

    limit: int = PAGE_USUAL
    after: str = ""
    ascending: bool = False


_head = msgspec.json.Decoder(_Head).decode
_answered = msgspec.json.Decoder(_Answered).decode


def as_items(asked: bytes, response_id: str) -> bytes:
    """The `input` of a request as an array in which each item has an id; one that it has is its own. Raises BadRequest.

    >>> as_items(b'"hello"', "resp_1")
    b'[{"id":"msg_81d2de99dbdc184416d69e4c","role":"user","content":"hello"}]'
    >>> as_items(b'[{"id":"m","role":"user","content":1e2}]', "resp_1")
    b'[{"id":"m","role":"user","content":1e2}]'
    """
    try:
        if asked.lstrip()[:1] == b'"':
            asked = b'[{"role":"user","content":%b}]' % asked
        items = _array(asked)
        return b"[%b]" % b",".join(_with_id(item, response_id, place) for place, item in enumerate(items))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("input is neither a text nor a list of items") from None


def _with_id(item: msgspec.Raw, response_id: str, place: int) -> bytes:
    head = _head(item)
    if head.id:
        return bytes(item)
    kind = "msg" if head.type in (None, "message") else "item"
    made = hashlib.sha256(f"{response_id} {place}".encode()).hexdigest()[:24]
    rest = bytes(item).lstrip()[1:].lstrip()
    if b'"id"' in rest[:-1]:  # null, or an empty one; perhaps only deeper inside
        fields = {name: raw for name, raw in _object(item).items() if name != "id"}
        rest = _encode(fields)[1:]
    comma = b"" if rest == b"}" else b","
    return b'{"id":"%b_%b"%b%b' % (kind.encode(), made.encode(), comma, rest)


def output_of(response: bytes) -> bytes:
    """The array of what was answered. Raises BadRequest where the response is none.

    >>> output_of(b'{"id":"r","output":[{"id":"m"}]}')
    b'[{"id":"m"}]'
    """
    try:
        return bytes(_answered(response).output)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("this is no response") from None


def joined(arrays: Iterable[bytes]) -> bytes:
    """One array of the items of all.

    >>> joined([b'[{"id":"a"}]', b" [ ]", b'[{"id":"b"},1]'])
    b'[{"id":"a"},{"id":"b"},1]'
    """
    insides = (array.strip()[1:-1].strip() for array in arrays)
    return b"[%b]" % b",".join(inside for inside in insides if inside)


def ids_of(items: bytes) -> list[str]:
    """The id of each item, empty for one that has none or only refers to another by it.

    >>> ids_of(b'[{"id":"a"},{},{"type":"item_reference","id":"b"}]')
    ['a', '', '']
    """
    heads = [_head(item) for item in _array(items)]
    return ["" if head.type == "item_reference" else (head.id or "")[:ID_MAX] for head in heads]


def items_of(items: bytes) -> list[bytes]:
    return [bytes(item) for item in _array(items)]


def references_in(items: bytes) -> list[str]:
    """The ids that `item_reference`s among the items name.

    >>> references_in(b'[{"type":"item_reference","id":"a"},{"id":"b"},{"type":null,"id":"c","role":"user"}]')
    ['a']
    """
    if b"item_reference" not in items:
        return []
    return [head.id for item in _array(items) if (head := _head(item)).type == "item_reference" and head.id]


def resolved(items: bytes, found: Mapping[str, bytes], *, most_bytes: int) -> bytes:
    """The items, each reference replaced by what it names, however often it is named. Raises NotFound, BadRequest where
    that becomes longer than `most_bytes`.

    >>> resolved(b'[{"type":"item_reference","id":"a"},{"id":"b"}]', {"a": b'{"id":"a","role":"user"}'}, most_bytes=99)
    b'[{"id":"a","role":"user"},{"id":"b"}]'
    """
    taken, size = [], 0
    for item in _array(items):
        head = _head(item)
        is_reference = head.type == "item_reference"
        if is_reference and head.id not in found:
            raise no_such_item(head.id or "")
        taken.append(found[head.id] if is_reference and head.id else bytes(item))
        size += len(taken[-1])
        check_length(size, most_bytes)
    return b"[%b]" % b",".join(taken)


def check_length(size: int, most_bytes: int) -> None:
    """Raises BadRequest."""
    if size > most_bytes:
        raise BadRequest(
            f"the conversation is longer than {most_bytes} bytes", hint="begin a new one, with a summary of it"
        )


def no_such_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:80]}' not found.")


def page_of_items(items: bytes, page: ItemPage) -> bytes:
    """The list that `GET /v1/responses/{id}/input_items` answers with. Raises BadRequest for an unknown `after`.

    >>> page_of_items(b'[{"id":"a","role":"user","content":"hi"},{"id":"b","type":"x"}]', ItemPage(limit=1))
    b'{"object":"list","data":[{"id":"b","type":"x"}],"first_id":"b","last_id":"b","has_more":true}'
    """
    rows = _array(items)
    if not page.ascending:
        rows.reverse()
    first = 0
    if page.after:
        ids = [_head(row).id for row in rows]
        if page.after not in ids:
            raise BadRequest(f"after: there is no item '{page.after[:80]}' in this list")
        first = ids.index(page.after) + 1
    shown = rows[first : first + page.limit]
    ids = [_head(row).id for row in shown]
    return _encode(
        {
            "object": "list",
            "data": [msgspec.Raw(_as_listed(row)) for row in shown],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": first + page.limit < len(rows),
        }
    )


def _as_listed(item: msgspec.Raw) -> bytes:
    """A message as the API lists it, with a type and its text in a part; everything else as it is.

    >>> _as_listed(msgspec.Raw(b'{"id":"a","role":"user","content":"hi"}'))
    b'{"id":"a","role":"user","content":[{"type":"input_text","text":"hi"}],"type":"message"}'
    """
    if _head(item).type not in (None, "message"):
        return bytes(item)
    fields = _object(item)
    content = fields.get("content", msgspec.Raw(b"null"))
    if bytes(content).lstrip()[:1] == b'"':
        is_answer = fields.get("role") == msgspec.Raw(b'"assistant"')
        kind: Literal["output_text", "input_text"] = "output_text" if is_answer else "input_text"
        part: dict[str, object] = {"type": kind, "text": content}
        if is_answer:
            part["annotations"] = []
        fields["content"] = msgspec.Raw(_encode([part]))
    return _encode({**fields, "type": "message"})
