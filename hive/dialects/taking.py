"""Taking a request of a client's dialect apart by the table of its fields. Sans I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec

from hive.dialects.translation import FieldFate, FieldRow
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
T = TypeVar("T")
Fields = dict[str, Raw]


def to(field: str, *names: str) -> dict[str, FieldRow]:
    """Rows of names that become this field of the backend's."""
    return dict.fromkeys(names, FieldRow(FieldFate.MAPPED, to=field))


def no(why: str, *names: str) -> dict[str, FieldRow]:
    """Rows of names that are refused."""
    return dict.fromkeys(names, FieldRow(FieldFate.REFUSED, why=why))


def aside(why: str, *names: str) -> dict[str, FieldRow]:
    """Rows of names that are left out and told."""
    return dict.fromkeys(names, FieldRow(FieldFate.HARMLESS, why=why))


def kinds(where: str, *names: str) -> list[str]:
    """The names of objects that differ by their `type`.

    >>> kinds("tools", "mcp")
    ['tools[mcp]']
    """
    return [f"{where}[{kind}]" for kind in names]


_EMPTY = frozenset({b"null", b"false", b'""', b"[]", b"{}"})
_encode = msgspec.json.Encoder().encode
_QUOTE, _NULL = b'"'[0], Raw(b"null")
_UNTOLD = re.compile(r"[^!-+\--~]")


class FieldRows:
    """The rows of one endpoint, by the field's name, with dots into objects; in brackets the `type` of an object that
    may be of several.

    `idle`: values that ask for nothing, beside the empty ones. `history`: the beginning of the names of a
    conversation's parts. `dialect`: the name of the dialect, for messages about fields it does not have.
    """

    def __init__(self, rows: Mapping[str, FieldRow], idle: Mapping[str, bytes], *, history: str, dialect: str) -> None:
        self.rows = rows
        self.idle = idle
        self.history = history
        self.dialect = dialect
        self.inside: dict[str, dict[str, FieldRow]] = {}
        """The rows by their object, then by name."""
        for name, row in rows.items():
            if not name.endswith("]"):
                where, _, inner = name.rpartition(".")
                self.inside.setdefault(where, {})[inner] = row

    def __repr__(self) -> str:
        return f"<FieldRows {len(self.rows)} rows>"

    def can_say(self, where: str, found: Fields) -> bool:
        """Whether an object of this `type` has a way; also where it has none, which is told elsewhere."""
        raw = found.get("type", _NULL)
        if memoryview(raw)[0] != _QUOTE:
            return True
        name = f"{where}[{read_text(raw, 'type')}]"
        row = self.rows.get(name)
        return row.fate is not FieldFate.REFUSED if row is not None else name in self.inside


class Taken:
    """Takes the objects of one request apart by its table, and notes what of them is left out."""

    __slots__ = ("_table", "dropped", "is_earlier")

    def __init__(self, table: FieldRows) -> None:
        self._table = table
        self.dropped: dict[str, None] = {}
        """Left-out fields by the name of the row, in the order of the body; each once."""
        self.is_earlier = False
        """True while a message of an earlier turn is taken apart: unknown wishes of its blocks are left out, not
        refused."""

    def fields(self, found: Fields, where: str, at: str) -> Fields:
        """The mapped fields of an object that are there and not null. `where`: in the table; `at`: in this body."""
        rows = self._table.inside.get(where, {})
        taken = {}
        for name, value in found.items():
            row = rows.get(name)
            if value == _NULL or (name == "type" and where.endswith("]")):
                continue
            if row is not None and row.fate is FieldFate.MAPPED:
                taken[name] = value
            elif row is None and not where:
                raise NotSupported(f"there is no way to say the field `{shown(name)}` in {self._table.dialect}")
            else:
                self._leave(f"{where}.{name}" if where else name, row, value, f"{at}.{name}" if at else name)
        return taken

    def kind(self, found: Fields, where: str, at: str, default: str = "") -> str:
        """The `type` of an object that may be of several; empty for one that is left out. Raises NotSupported."""
        if default and found.get("type", _NULL) == _NULL:
            return default
        kind = read_text(required(found, "type", at), f"{at}.type")
        row = self._table.rows.get(f"{where}[{kind}]")
        if row is None and f"{where}[{kind}]" not in self._table.inside:
            raise NotSupported(f"{at}: there is no way to say `{shown(kind)}` in {self._table.dialect}")
        if row is not None and row.fate is FieldFate.REFUSED:
            raise NotSupported(f"{at}: `{shown(kind)}` is not taken: {row.why}")
        if row is not None and row.fate is FieldFate.HARMLESS:
            self.dropped[f"{where}[{kind}]"] = None
            return ""
        return kind

    def _leave(self, name: str, row: FieldRow | None, value: Raw, at: str) -> None:
        written = msgspec.json.format(bytes(value), indent=-1)
        if written in _EMPTY or written == self._table.idle.get(name):
            return
        if (
            row is not None
            and row.fate is FieldFate.REFUSED
            and not (self.is_earlier and name.startswith(self._table.history))
        ):
            raise NotSupported(f"{shown(at)} is not taken: {row.why}")
        self.dropped[shown(name)] = None


def shown(name: str) -> str:
    """A client's name as a header field or a message may carry it.

    >>> shown("a\\r\\nX-Evil: 1"), shown("content[text].cache_control")
    ('a??X-Evil:?1', 'content[text].cache_control')
    """
    return _UNTOLD.sub("?", name[:100])


def _read(decode: Callable[[bytes | Raw], T], what: str, raw: bytes | Raw, at: str) -> T:
    """Decodes a value. An unreadable one raises BadRequest in pydantic's words, as Anthropic's own server and vLLM have
    them."""
    try:
        return decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"{at or 'the body'}: Input should be a valid {what}") from None


read_object = partial(_read, msgspec.json.Decoder(Fields).decode, "object")
_objects = msgspec.json.Decoder(list[Fields]).decode
read_list = partial(_read, msgspec.json.Decoder(list[Raw]).decode, "list")
read_text = partial(_read, msgspec.json.Decoder(str).decode, "string")
read_flag = partial(_read, msgspec.json.Decoder(bool).decode, "boolean")
read_number = partial(_read, msgspec.json.Decoder(int | float).decode, "integer")


def read_objects(raw: Raw, at: str) -> list[Fields]:
    """The objects of a list, read in one pass over megabytes; one by one only to tell which of them is no object."""
    try:
        return _objects(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [read_object(item, f"{at}.{number}") for number, item in enumerate(read_list(raw, at))]


def required(fields: Fields, name: str, at: str) -> Raw:
    if name not in fields:
        raise BadRequest(f"{at}.{name}: Field required" if at else f"{name}: Field required")
    return fields[name]


def words(raw: Raw, at: str) -> Raw:
    """A string as it is written. Raises BadRequest for anything else."""
    if memoryview(raw)[0] != _QUOTE:
        raise BadRequest(f"{at}: Input should be a valid string")
    return raw
