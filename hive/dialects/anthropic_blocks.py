"""The blocks of an Anthropic message, put in order from the pieces of an OpenAI server in any order. Sans I/O.

Anthropic's clients take a block for whole at its stop, and parse a tool's arguments there. So a call's block stays open
until its arguments are a whole JSON object: what comes meanwhile (text, thoughts, another call) waits, and follows in
the order in which it began. Text and thoughts wait for nothing else.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

import msgspec

from hive.dialects.openai_answers import MAX_HELD, NO_NAMES, PIECES_KEPT, Delta, ToolCall, ToolCalls, is_object
from hive.errors import BackendDown

_encode = msgspec.json.Encoder().encode
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
    b'{"type":"%b_delta","%b":%b}}\n\n'
)
_STARTED = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_STOPPED = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_SIGNATURE = _DELTA.replace(b"%b_delta", b"signature_delta").replace(b'"%b":%b', b'"signature":""')
TEXT: dict[str, object] = {"type": "text", "text": ""}
THINKING: dict[str, object] = {"type": "thinking", "thinking": "", "signature": ""}
_EMPTY = {"text": _encode(TEXT), "thinking": _encode(THINKING)}


class ObjectEnd:
    """The end of a JSON object that comes in pieces, found by its brackets; each character is looked at once.

    >>> end = ObjectEnd()
    >>> [(end.feed(piece), end.whole)[1] for piece in ('{"a":', '"}', '\\\\"', '"', "}", " ")]
    [False, False, False, False, True, True]
    """

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "whole")

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._begun = self._in_string = self._escaped = False
        self.whole = False

    def feed(self, piece: str) -> None:
        if not self._begun:
            self._begun = True
            if piece[-1:] == "}" and is_object(piece):  # most servers that hold a call back send all of it at once
                self.whole = True
                return
        at = 1 if self._escaped else 0
        self._escaped = False
        while True:
            found = (self._INSIDE if self._in_string else self._OUTSIDE).search(piece, at)
            if found is None:
                return
            at = found.end()
            mark = found[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = at == len(piece)
                at += 1
            else:
                self._depth += 1 if mark in "{[" else -1
                self.whole = self.whole or self._depth <= 0


class Blocks:
    """The blocks of one message. All that is written is appended to `said`, whole events each.

    >>> blocks, said = Blocks(), []
    >>> from hive.dialects.openai_answers import CallPiece, CalledFunction as F
    >>> call = CallPiece(0, "c", F("f", '{"n":'))
    >>> blocks.take(Delta(tool_calls=[call]), said)
    >>> blocks.take(Delta(content="so", tool_calls=[CallPiece(0, None, F(None, "1}"))]), said)
    >>> [event.split(b"\\n")[0].decode()[21:] for event in said]
    ['start', 'delta', 'delta', 'stop', 'start', 'delta']
    """

    __slots__ = (
        *("_begun", "_call", "_calls", "_end", "_ended", "_hidden", "_names", "_open", "_tag", "_waiting"),
        "_waiting_size",
        "last",
    )

    def __init__(self, *, hidden: bool = False, tag: str = "", names: Mapping[str, str] = NO_NAMES) -> None:
        """`hidden`: thoughts are left out, but for the block they are in. `tag`: what makes the ids of calls that have
        none this answer's own. `names`: the client's names of tools, by those the backend was told."""
        self._hidden = hidden
        self._tag = tag
        self._names = names
        self._calls = ToolCalls()
        self._open = ""
        """The kind of the open block: text, thinking or tool_use."""
        self._call: ToolCall | None = None
        """The call of the open block."""
        self._end = ObjectEnd()
        """The end of that call's arguments."""
        self._begun: set[int] = set()
        """The numbers of all calls, waiting ones too."""
        self._ended: set[int] = set()
        """Numbers of the calls with a stopped block."""
        self._waiting: deque[ToolCall | tuple[str, list[str]]] = deque()
        self._waiting_size = 0
        self.last = -1
        """The index of the last block that was begun."""

    def __repr__(self) -> str:
        return f"<Blocks {self.last + 1}, {self._open or 'none'} open, {len(self._waiting)} waiting>"

    @property
    def called(self) -> bool:
        """Whether the answer calls a tool."""
        return bool(self._calls)

    def take(self, delta: Delta, said: list[bytes]) -> None:
        """Takes one delta: first the part for the open call, then the rest, which may have to wait.

        Raises BackendDown for arguments that are none, and if too much waits.
        """
        others = self._take_calls(delta, said) if delta.tool_calls or delta.function_call is not None else ()
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            self._say("thinking", thought, said)
        text = delta.content or delta.refusal
        if text:
            self._say("text", text, said)
        self._waiting.extend(others)
        if self._waiting:
            self._go_on(said)

    def end(self, said: list[bytes], *, cut_off: bool) -> None:
        """Writes what waits and ends the last block. `cut_off`: the answer ended for its length, so that a call may
        stay unfinished, as its reason tells. Else raises BackendDown for an unfinished call."""
        while True:
            self._stop(said, cut_off=cut_off)
            if not self._waiting:
                return
            self._begin_next(said)

    def _take_calls(self, delta: Delta, said: list[bytes]) -> list[ToolCall]:
        """The calls that begin with this delta."""
        others: list[ToolCall] = []
        for piece in delta.calls:
            call, words = self._calls.take(piece)
            if call is self._call:
                self._send(words, said)
            elif call.number not in self._begun:
                self._begun.add(call.number)
                others.append(call)
            elif call.number in self._ended and words.strip():
                raise BackendDown(call.unreadable)
        return others

    def _say(self, kind: str, words: str, said: list[bytes]) -> None:
        if not self._waiting and (self._call is None or self._end.whole):
            self._write(kind, words, said)
            return
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(words)
            if len(last[1]) > PIECES_KEPT:
                last[1][:] = ["".join(last[1])]
        else:
            self._waiting.append((kind, [words]))
            self._waiting_size += 64
        self._waiting_size += len(words)
        if self._waiting_size > MAX_HELD:
            raise BackendDown("more than 1 MiB of the backend's answer waits for the end of a call")

    def _go_on(self, said: list[bytes]) -> None:
        """Writes what waits, up to the next call that is not whole or has no name yet."""
        while self._waiting and (self._call is None or self._end.whole):
            item = self._waiting[0]
            if isinstance(item, ToolCall) and not item.name:
                return
            self._begin_next(said)

    def _begin_next(self, said: list[bytes]) -> None:
        item = self._waiting.popleft()
        if isinstance(item, tuple):
            kind, pieces = item
            words = "".join(pieces)
            self._waiting_size -= len(words) + 64
            self._write(kind, words, said)
            return
        given = item.id or f"toolu_{self._tag}{item.number}"
        name = self._names.get(item.name, item.name)
        block = {"type": "tool_use", "id": given, "name": name, "input": {}}
        self._begin("tool_use", _encode(block), said)
        self._call, self._end = item, ObjectEnd()
        self._send(item.arguments, said)

    def _send(self, arguments: str, said: list[bytes]) -> None:
        """Writes a piece of the open call's arguments."""
        if arguments:
            self._end.feed(arguments)
            said.append(_DELTA % (self.last, b"input_json", b"partial_json", _encode(arguments)))

    def _write(self, kind: str, words: str, said: list[bytes]) -> None:
        if self._open != kind:
            self._begin(kind, _EMPTY[kind], said)
        if kind == "text":
            said.append(_DELTA % (self.last, b"text", b"text", _encode(words)))
        elif not self._hidden:
            said.append(_DELTA % (self.last, b"thinking", b"thinking", _encode(words)))

    def _begin(self, kind: str, block: bytes, said: list[bytes]) -> None:
        self._stop(said, cut_off=False)
        self.last += 1
        self._open = kind
        said.append(_STARTED % (self.last, block))

    def _stop(self, said: list[bytes], *, cut_off: bool) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._ended.add(call.number)
            if not cut_off and call.has_arguments and call.arguments.strip() and not is_object(call.arguments):
                raise BackendDown(call.unreadable)
        elif self._open == "thinking":
            said.append(_SIGNATURE % self.last)
        if self._open:
            said.append(_STOPPED % self.last)
        self._open = ""
