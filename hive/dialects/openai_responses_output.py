"""The items of an answer of Responses, and their events. Sans I/O.

Texts and thoughts are told one after the other; calls stay open side by side until the answer ends, as pieces of them
come in any order. Every event has its number, and the items theirs, so that clients put together what belongs together.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from hive.dialects.openai_answers import PIECES_KEPT, CallPiece, Delta, Logprobs, ToolCall, ToolCalls, is_object
from hive.errors import BackendDown

MAX_TEXT = 16 * 1024 * 1024
"""Characters of texts and thoughts of one answer; its last event repeats them all."""
INPUT = "input"
"""The one argument of a function that stands for a custom tool."""
_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, Any]).decode
_DELTA = (
    b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":"%b","output_index":%d,"%b_index":%d,'
    b'"delta":%b%b,"sequence_number":%d}\n\n'
)
_ARGUMENTS = (
    b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":"%b","output_index":%d,"delta":%b,'
    b'"sequence_number":%d}\n\n'
)
_NONE_LIKELY = b',"logprobs":[]'


class Called(msgspec.Struct, frozen=True):
    """A client's name of a function that has another for the backend. `custom`: of a custom tool."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponseEvents:
    """Numbers and writes events; `said` is what was written.

    >>> events = ResponseEvents()
    >>> events.add("response.created", {"n": 1})
    >>> events.said
    [b'event: response.created\\ndata: {"type":"response.created","n":1,"sequence_number":0}\\n\\n']
    """

    __slots__ = ("number", "said")

    def __init__(self) -> None:
        self.number = 0
        """The number of the next event."""
        self.said: list[bytes] = []

    def add(self, name: str, fields: dict[str, Any]) -> None:
        told = _encode({"type": name, **fields, "sequence_number": self.number})
        self.number += 1
        self.said.append(b"event: %b\ndata: %b\n\n" % (name.encode(), told))

    def delta(self, kind: bytes, item: OutputItem, of: bytes, at: int, words: str, more: bytes = b"") -> None:
        """Writes a piece of a text within an item. `of`: the name of its place (`content`, `summary`)."""
        told = (kind, kind, item.id, item.index, of, at, _encode(words), more, self.number)
        self.number += 1
        self.said.append(_DELTA % told)

    def arguments(self, kind: bytes, item: OutputItem, words: str) -> None:
        """Writes a piece of a tool's arguments."""
        self.said.append(_ARGUMENTS % (kind, kind, item.id, item.index, _encode(words), self.number))
        self.number += 1

    def take(self) -> bytes:
        """All that was written since the last time."""
        said, self.said = self.said, []
        return said[0] if len(said) == 1 else b"".join(said)


class OutputItem(Protocol):
    """One item of the output: `id` as in JSON, `index` its place."""

    id: bytes
    index: int

    def told(self, status: str) -> dict[str, Any]:
        """The item as it is now."""

    def end(self, events: ResponseEvents) -> None:
        """Ends the item: nothing more belongs to it."""


class _Text:
    """A text in pieces."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, words: str) -> None:
        self._pieces.append(words)
        if len(self._pieces) > PIECES_KEPT:
            self._pieces = ["".join(self._pieces)]

    def __str__(self) -> str:
        return "".join(self._pieces)


class MessageItem:
    """The model's message: a text, a refusal, or both."""

    __slots__ = ("_parts", "id", "index")

    def __init__(self, id: bytes, index: int) -> None:
        self.id = id
        self.index = index
        self._parts: list[tuple[str, _Text, list[object]]] = []
        """Kind, text, and how likely its tokens were."""

    def say(self, kind: str, words: str, likely: list[object], events: ResponseEvents) -> None:
        if not self._parts or self._parts[-1][0] != kind:
            self._end_part(events)
            self._parts.append((kind, _Text(), []))
            events.add("response.content_part.added", {**self._place, "part": _part(kind, "", [])})
        _, text, tokens = self._parts[-1]
        text.add(words)
        tokens.extend(likely)
        more = b"" if kind == "refusal" else b',"logprobs":%b' % _encode(likely) if likely else _NONE_LIKELY
        events.delta(kind.encode(), self, b"content", len(self._parts) - 1, words, more)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id.decode(), "output_index": self.index, "content_index": len(self._parts) - 1}

    def _end_part(self, events: ResponseEvents) -> None:
        if not self._parts:
            return
        kind, text, tokens = self._parts[-1]
        told: dict[str, Any] = {"refusal": str(text)} if kind == "refusal" else {"text": str(text), "logprobs": tokens}
        events.add(f"response.{kind}.done", {**self._place, **told})
        events.add("response.content_part.done", {**self._place, "part": _part(kind, str(text), tokens)})

    def end(self, events: ResponseEvents) -> None:
        self._end_part(events)

    def told(self, status: str) -> dict[str, Any]:
        content = [_part(kind, str(text), tokens) for kind, text, tokens in self._parts]
        head = {"id": self.id.decode(), "type": "message", "status": status, "role": "assistant"}
        return {**head, "content": content}


def _part(kind: str, text: str, tokens: list[object]) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    return {"type": kind, "annotations": [], "logprobs": list(tokens), "text": text}


class ReasoningItem:
    """The model's thoughts: its own words, or as the summary of them, where the client asked for one."""

    __slots__ = ("_as_summary", "_text", "id", "index")

    def __init__(self, id: bytes, index: int, *, as_summary: bool) -> None:
        self.id = id
        self.index = index
        self._as_summary = as_summary
        self._text = _Text()

    def begin(self, events: ResponseEvents) -> None:
        name = "response.reasoning_summary_part.added" if self._as_summary else "response.content_part.added"
        events.add(name, {**self._place, "part": self._part})

    def say(self, words: str, events: ResponseEvents) -> None:
        self._text.add(words)
        if self._as_summary:
            events.delta(b"reasoning_summary_text", self, b"summary", 0, words)
        else:
            events.delta(b"reasoning_text", self, b"content", 0, words)

    @property
    def _place(self) -> dict[str, Any]:
        place = "summary_index" if self._as_summary else "content_index"
        return {"item_id": self.id.decode(), "output_index": self.index, place: 0}

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": str(self._text)}

    def end(self, events: ResponseEvents) -> None:
        kind = "reasoning_summary_text" if self._as_summary else "reasoning_text"
        events.add(f"response.{kind}.done", {**self._place, "text": str(self._text)})
        name = "response.reasoning_summary_part.done" if self._as_summary else "response.content_part.done"
        events.add(name, {**self._place, "part": self._part})

    def told(self, status: str) -> dict[str, Any]:
        head = {"id": self.id.decode(), "type": "reasoning", "status": status}
        text = str(self._text)
        if self._as_summary:
            return {**head, "summary": [self._part] if text else []}
        return {**head, "summary": [], "content": [self._part] if text else []}


class CallItem:
    """A call of a tool. `call`: what came of it so far."""

    __slots__ = ("_call_id", "_called", "call", "id", "index")

    def __init__(self, id: bytes, index: int, call: ToolCall, called: Called, call_id: str) -> None:
        self.id = id
        self.index = index
        self.call = call
        self._called = called
        self._call_id = call_id

    def _told(self, kind: str, status: str, written: dict[str, str]) -> dict[str, Any]:
        head = {"id": self.id.decode(), "type": kind, "status": status}
        space = {"namespace": self._called.namespace} if self._called.namespace else {}
        return {**head, "call_id": self._call_id, "name": self._called.name, **space, **written}


class FunctionCallItem(CallItem):
    """A call of a function."""

    __slots__ = ()

    def say(self, words: str, events: ResponseEvents) -> None:
        if words:
            events.arguments(b"function_call_arguments", self, words)

    def end(self, events: ResponseEvents) -> None:
        if not self.call.arguments.strip():
            self.say("{}", events)
        place = {"item_id": self.id.decode(), "output_index": self.index}
        done = {"name": self._called.name, "arguments": self._written}
        events.add("response.function_call_arguments.done", {**place, **done})

    @property
    def is_whole(self) -> bool:
        return is_object(self._written)

    @property
    def _written(self) -> str:
        return self.call.arguments if self.call.arguments.strip() else "{}"

    def told(self, status: str) -> dict[str, Any]:
        written = "" if status == "in_progress" else self._written
        return self._told("function_call", status, {"arguments": written})


class CustomCallItem(CallItem):
    """A call of a custom tool: its text is told once it is whole, as it comes inside JSON."""

    __slots__ = ()

    def say(self, words: str, events: ResponseEvents) -> None:
        """Writes nothing yet: the text is written whole at the end."""

    def end(self, events: ResponseEvents) -> None:
        text = custom_input(self.call.arguments)
        events.arguments(b"custom_tool_call_input", self, text)
        place = {"item_id": self.id.decode(), "output_index": self.index}
        events.add("response.custom_tool_call_input.done", {**place, "input": text})

    def told(self, status: str) -> dict[str, Any]:
        text = "" if status == "in_progress" else custom_input(self.call.arguments)
        return self._told("custom_tool_call", status, {"input": text})


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with. A model that gives it plainly, in other arguments, or not to its end
    is told to the tool as it is.

    >>> custom_input('{"input":"a\\\\nb"}'), custom_input("*** Begin Patch"), custom_input('{"input":"a')
    ('a\\nb', '*** Begin Patch', '{"input":"a')
    """
    try:
        found = _fields(arguments)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return arguments
    text = found.get(INPUT)
    return text if isinstance(text, str) else arguments


class ResponseOutput:
    """The items of one answer, in order. `tag`: what makes their ids this answer's own."""

    __slots__ = ("_as_summary", "_called", "_calls", "_events", "_names", "_of_call", "_open", "_size", "_tag", "items")

    def __init__(
        self, events: ResponseEvents, tag: str, *, names: dict[str, str], called: dict[str, Called], as_summary: bool
    ) -> None:
        """`names`: of functions, by those the backend was told; `called`: the client's own, by those names."""
        self._events = events
        self._tag = tag
        self._names = names
        self._called = called
        self._as_summary = as_summary
        self._calls = ToolCalls()
        self._of_call: dict[int, FunctionCallItem | CustomCallItem] = {}
        self._open: MessageItem | ReasoningItem | None = None
        self._size = 0
        self.items: list[tuple[OutputItem, str]] = []
        """Each with how it stands."""

    def __repr__(self) -> str:
        return f"<ResponseOutput {len(self.items)} items, {len(self._of_call)} calls>"

    def take(self, said: Delta, likely: list[object]) -> None:
        """Takes one delta, or a whole message. Raises BackendDown where it is too much."""
        if said.thinking:
            self._grow(said.thinking)
            self._thought().say(said.thinking, self._events)
        if said.content:
            self._grow(said.content)
            self._message().say("output_text", said.content, likely, self._events)
        if said.refusal:
            self._grow(said.refusal)
            self._message().say("refusal", said.refusal, [], self._events)
        for piece in said.calls:
            self._take_call(piece)

    def take_whole_calls(self, pieces: list[CallPiece]) -> None:
        """The calls of a message, each of which is one piece."""
        for call in self._calls.take_whole(pieces):
            self._begin_call(call)

    def end(self, *, cut_off: bool) -> None:
        """Ends the output. `cut_off`: the answer ended for its length, and what is open is not whole."""
        for call in self._calls.begun:
            if call.number not in self._of_call:
                self._begin_call(call)
        if not self.items:
            self._message().say("output_text", "", [], self._events)
        for at, (item, status) in enumerate(self.items):
            if status == "in_progress":
                self._end(at, item, cut_off=cut_off)
        self._open = None

    def told(self) -> list[dict[str, Any]]:
        return [item.told(status) for item, status in self.items]

    def _take_call(self, piece: CallPiece) -> None:
        call, words = self._calls.take(piece)
        item = self._of_call.get(call.number)
        if item is not None:
            item.say(words, self._events)
        elif call.name:
            self._begin_call(call)

    def _begin_call(self, call: ToolCall) -> None:
        self._close()
        name = self._names.get(call.name, call.name)
        called = self._called.get(name, Called(name))
        kind = CustomCallItem if called.custom else FunctionCallItem
        prefix = "ctc" if called.custom else "fc"
        index = len(self.items)
        call_id = call.id or f"call_{self._tag}_{call.number}"
        item = self._of_call[call.number] = kind(self._id(prefix, index), index, call, called, call_id)
        self._add(item)
        item.say(call.arguments, self._events)

    def _thought(self) -> ReasoningItem:
        if isinstance(self._open, ReasoningItem):
            return self._open
        self._close()
        index = len(self.items)
        thought = self._open = ReasoningItem(self._id("rs", index), index, as_summary=self._as_summary)
        self._add(thought)
        thought.begin(self._events)
        return thought

    def _message(self) -> MessageItem:
        if isinstance(self._open, MessageItem):
            return self._open
        self._close()
        index = len(self.items)
        message = self._open = MessageItem(self._id("msg", index), index)
        self._add(message)
        return message

    def _close(self) -> None:
        """Ends the text or the thought that is told just now: another item begins."""
        if self._open is not None:
            self._end(self._open.index, self._open, cut_off=False)
            self._open = None

    def _add(self, item: OutputItem) -> None:
        self.items.append((item, "in_progress"))
        self._events.add("response.output_item.added", {"output_index": item.index, "item": item.told("in_progress")})

    def _end(self, at: int, item: OutputItem, *, cut_off: bool) -> None:
        if isinstance(item, FunctionCallItem) and not cut_off and not item.is_whole:
            raise BackendDown(item.call.unreadable)
        item.end(self._events)
        status = "incomplete" if cut_off else "completed"
        self.items[at] = (item, status)
        self._events.add("response.output_item.done", {"output_index": item.index, "item": item.told(status)})

    def _id(self, prefix: str, index: int) -> bytes:
        return f"{prefix}_{self._tag}_{index}".encode()

    def _grow(self, words: str) -> None:
        self._size += len(words)
        if self._size > MAX_TEXT:
            raise BackendDown("the backend's answer is longer than 16 MiB")


def likely_of(logprobs: Logprobs | None) -> list[object]:
    """Probabilities of tokens, as Responses tell them."""
    if logprobs is None or not logprobs.content:
        return []
    return [
        {
            "token": token.token,
            "bytes": _bytes(token.token, token.bytes),
            "logprob": token.logprob,
            "top_logprobs": [
                {"token": other.token, "bytes": _bytes(other.token, other.bytes), "logprob": other.logprob}
                for other in token.top_logprobs or ()
            ],
        }
        for token in logprobs.content
    ]


def _bytes(token: str, told: list[int] | None) -> list[int]:
    return list(token.encode()) if told is None else told
