"""Anthropic's `clear_tool_uses_20250919`: old results of tools leave a conversation that has become long. Pure.

Done to the messages before they are translated, as Anthropic documents it: once the prompt has more than `trigger`
(100,000 tokens of input, or a number of uses), a line replaces the oldest results, except those of the last `keep` uses
(3) and of `exclude_tools`. With `clear_tool_inputs` the calls lose their arguments too. If less than `clear_at_least`
tokens would go, nothing is cleared. No server counts here, so tokens are estimated from the length (token_estimate.py).
The client keeps the whole conversation and sends all of it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from hive.dialects.anthropic_fields import TABLE
from hive.dialects.taking import (
    Fields,
    Raw,
    Taken,
    read_flag,
    read_list,
    read_number,
    read_object,
    read_objects,
    read_text,
    required,
)
from hive.dialects.token_estimate import estimate, reckoned, told
from hive.errors import BadRequest, NotSupported

TYPE = "clear_tool_uses_20250919"
CLEARED = Raw(b'"[the result of this tool has been cleared]"')
"""Text that the model reads in place of a result."""
NO_INPUT = Raw(b"{}")
MOST = 2**53
"""Bound for any number here: beyond it a JSON number is not exact, and `1e999` is none at all."""
MOST_EDITS = 8
"""Each goes through the whole conversation; Anthropic has three."""
_USE, _RESULT = Raw(b'"tool_use"'), Raw(b'"tool_result"')
_BRACKET = b"["[0]
_encode = msgspec.json.Encoder().encode


class Edit(NamedTuple):
    """One edit that was asked for. `trigger`: what is counted (`input_tokens`, `tool_uses`), and how many there may be.
    `inputs`: whether arguments go as well; a set: of these tools."""

    trigger: tuple[str, int] = ("input_tokens", 100_000)
    keep: int = 3
    at_least: int = 0
    excluded: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False


class AppliedEdit(msgspec.Struct, frozen=True):
    """An edit that was done, as the answer tells it."""

    type: str
    cleared_tool_uses: int
    cleared_input_tokens: int


class _Use(NamedTuple):
    """A call that has its result: each by the message and the block it is."""

    name: str
    call: tuple[int, int]
    result: tuple[int, int]


def read_edits(taken: Taken, raw: Raw) -> list[Edit] | None:
    """The edits that `context_management` asks for; None where it names none at all.

    Raises BadRequest, NotSupported.
    """
    at = "context_management"
    fields = taken.fields(read_object(raw, at), at, at)
    if "edits" not in fields:
        return None
    edits, asked = [], read_objects(fields["edits"], f"{at}.edits")
    if len(asked) > MOST_EDITS:
        raise BadRequest(f"{at}.edits: List should have at most {MOST_EDITS} items")
    for number, found in enumerate(asked):
        where = f"{at}.edits.{number}"
        if kind := taken.kind(found, f"{at}.edits", where):
            edits.append(_read_edit(taken, taken.fields(found, f"{at}.edits[{kind}]", where), where))
    return edits


def _read_edit(taken: Taken, fields: Fields, at: str) -> Edit:
    default = Edit()
    inputs = fields.get("clear_tool_inputs")
    is_of_some = inputs is not None and memoryview(inputs)[0] == _BRACKET
    return Edit(
        _threshold(taken, fields, "trigger", at) or default.trigger,
        (_threshold(taken, fields, "keep", at) or ("", default.keep))[1],
        (_threshold(taken, fields, "clear_at_least", at) or ("", 0))[1],
        _names(fields, "exclude_tools", at),
        _names(fields, "clear_tool_inputs", at)
        if is_of_some
        else inputs is not None and read_flag(inputs, f"{at}.clear_tool_inputs"),
    )


def _threshold(taken: Taken, fields: Fields, name: str, at: str) -> tuple[str, int] | None:
    if name not in fields:
        return None
    at = f"{at}.{name}"
    found, where = read_object(fields[name], at), f"context_management.edits[{TYPE}].{name}"
    kind = taken.kind(found, where, at)
    value = read_number(required(taken.fields(found, f"{where}[{kind}]", at), "value", at), f"{at}.value")
    if not 0 <= value <= MOST or value % 1:
        raise BadRequest(f"{at}.value: Input should be a whole number that is not negative")
    return kind, int(value)


def _names(fields: Fields, name: str, at: str) -> frozenset[str]:
    listed = read_list(fields[name], f"{at}.{name}") if name in fields else []
    return frozenset(read_text(item, f"{at}.{name}") for item in listed)


def told_after_edits(fields: Fields) -> bytes:
    """An answer of `/v1/messages/count_tokens`: the tokens left after the edits, and those before. Edits that cannot be
    made change nothing. Raises BadRequest."""
    before = estimate(fields)
    try:
        edits = read_edits(Taken(TABLE), fields["context_management"])
    except NotSupported:
        edits = []
    if edits is None:
        return told(fields)
    messages, _ = edited(fields, read_objects(fields.get("messages", Raw(b"[]")), "messages"), edits)
    left = estimate({**fields, "messages": Raw(_encode(messages))})
    was = {"original_input_tokens": before}
    return _encode({"input_tokens": left, "estimated": True, "context_management": was})


def edited(fields: Fields, given: list[Fields], edits: list[Edit]) -> tuple[list[Fields], list[AppliedEdit]]:
    """The messages after the edits, and what these did. `fields`: of the whole request; `given`: its messages.

    >>> call = [{"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}}]
    >>> result = [{"type": "tool_result", "tool_use_id": "a", "content": "it is far away" * 9}]
    >>> given = [{"content": Raw(_encode(content))} for content in (call, result)]
    >>> messages, (applied,) = edited({}, given, [Edit(trigger=("tool_uses", 0), keep=0)])
    >>> applied.cleared_tool_uses, applied.cleared_input_tokens, messages[0] == given[0]
    (1, 24, True)
    >>> bytes(messages[1]["content"])[:80]
    b'[{"type":"tool_result","tool_use_id":"a","content":"[the result of this tool has'
    """
    applied = []
    for edit in edits:
        given, done = _clear(fields, given, edit)
        if done is not None:
            applied.append(done)
    return given, applied


def _clear(fields: Fields, given: list[Fields], edit: Edit) -> tuple[list[Fields], AppliedEdit | None]:
    blocks = _Blocks(given)
    uses = blocks.uses()
    what, most = edit.trigger
    if (len(uses) if what == "tool_uses" else estimate({**fields, "messages": Raw(_encode(given))})) <= most:
        return given, None
    old = uses[: max(0, len(uses) - edit.keep)]
    tokens = cleared = 0
    for use in old:
        if use.name not in edit.excluded and (freed := blocks.clear(use, edit)):
            tokens, cleared = tokens + freed, cleared + 1
    if not cleared or tokens < edit.at_least:
        return given, None
    return blocks.messages(), AppliedEdit(TYPE, cleared, tokens)


class _Blocks:
    """The messages of one conversation, those that hold calls or results of tools taken apart."""

    def __init__(self, given: list[Fields]) -> None:
        self._given = given
        self._parts: dict[int, list[Fields]] = {}
        self._changed: set[int] = set()
        for number, message in enumerate(given):
            content = message.get("content", Raw(b'""'))
            if memoryview(content)[0] == _BRACKET and (
                bytes(_USE) in bytes(content) or bytes(_RESULT) in bytes(content)
            ):
                self._parts[number] = read_objects(content, f"messages.{number}.content")

    def uses(self) -> list[_Use]:
        """Calls that have a result, in the order of the results."""
        calls: dict[bytes, tuple[str, tuple[int, int]]] = {}
        found = []
        for place, block in self._all():
            if block.get("type") == _USE:
                name = block.get("name", Raw(b'""'))
                calls[bytes(block.get("id", b""))] = read_text(name, "name"), place
            elif block.get("type") == _RESULT and (call := calls.pop(bytes(block.get("tool_use_id", b"")), None)):
                found.append(_Use(*call, place))
        return found

    def _all(self) -> Iterator[tuple[tuple[int, int], Fields]]:
        for number, parts in self._parts.items():
            for index, block in enumerate(parts):
                yield (number, index), block

    def clear(self, use: _Use, edit: Edit) -> int:
        """Clears one use. Returns the tokens that are saved; 0 where the line would be longer than what it replaces."""
        result, call = self._at(use.result), self._at(use.call)
        freed = reckoned(result.get("content", NO_INPUT)) - reckoned(CLEARED)
        takes_input = use.name in edit.inputs if isinstance(edit.inputs, frozenset) else edit.inputs
        of_input = reckoned(call.get("input", NO_INPUT)) - reckoned(NO_INPUT) if takes_input else 0
        if freed + of_input <= 0:
            return 0
        self._put(use.result, {name: raw for name, raw in result.items() if name != "is_error"} | {"content": CLEARED})
        if takes_input:
            self._put(use.call, {**call, "input": NO_INPUT})
        return freed + of_input

    def _at(self, place: tuple[int, int]) -> Fields:
        return self._parts[place[0]][place[1]]

    def _put(self, place: tuple[int, int], block: Fields) -> None:
        self._parts[place[0]][place[1]] = block
        self._changed.add(place[0])

    def messages(self) -> list[Fields]:
        return [
            {**message, "content": Raw(_encode(self._parts[number]))} if number in self._changed else message
            for number, message in enumerate(self._given)
        ]
