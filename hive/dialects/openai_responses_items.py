"""The instructions and the input of a request of Responses as OpenAI's messages. Sans I/O.

Decided here, where the two leave it open:
- What the model said in a row (thinking, texts, calls) is one message of the assistant's; results follow it, and images
  in them stand in a user's message behind them, as messages of tools take text only.
- The instructions and the system's and developer's messages at the beginning are one system message: most templates
  take one, and at the beginning only.
- Thinking that nothing follows is left out: no message of the assistant's would be left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hive.dialects.openai_responses_fields import ROWS
from hive.dialects.openai_responses_output import INPUT
from hive.dialects.taking import Fields, Taken, read_objects, read_text, required, shown, words
from hive.errors import BadRequest

Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode
_QUOTE, _NULL = b'"'[0], Raw(b"null")
_MODELS_OWN = frozenset({b'"reasoning"', b'"function_call"', b'"custom_tool_call"'})
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_DETAILS = frozenset({b'"low"', b'"high"'})


def flat(namespace: str, name: str) -> str:
    """A function's name where it stands in a namespace: chat completions have none.

    >>> flat("", "look"), flat("files", "look"), flat("mcp__files__", "look")
    ('look', 'files__look', 'mcp__files__look')
    """
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


class InputItems:
    """The input of one request, item by item, as OpenAI's messages."""

    __slots__ = ("_at_begin", "_calls", "_images", "_parts", "_system", "_taken", "_thoughts", "said")

    def __init__(self, taken: Taken, instructions: str) -> None:
        self._taken = taken
        self._system = [instructions] if instructions else []
        """Texts for the one system message at the beginning."""
        self._at_begin = True
        self._thoughts: list[str] = []
        self._parts: list[dict[str, Any]] = []
        self._calls: list[object] = []
        """The calls of the model's last message, as the lists above are its thoughts and its parts."""
        self._images: list[dict[str, Any]] = []
        """Images out of the results of tools."""
        self.said: list[dict[str, Any]] = []

    def take(self, raw: Raw) -> list[dict[str, Any]]:
        """The messages of the whole input."""
        if memoryview(raw)[0] == _QUOTE:
            self._user(raw, "input")
        else:
            given = read_objects(raw, "input")
            last_turn = next((at for at in range(len(given), 0, -1) if _is_the_models(given[at - 1])), 0)
            for number, found in enumerate(given):
                self._taken.is_earlier = number < last_turn
                self._item(found, f"input.{number}")
        self._end_turn()
        self._end_results()
        self._end_system()
        return self.said

    def _item(self, found: Fields, at: str) -> None:
        kind = self._kind(found, at)
        fields = self._taken.fields(found, f"input[{kind}]", at) if kind else {}
        if kind == "message":
            self._message(fields, at)
        elif kind == "reasoning":
            self._begin_turn()
            self._thoughts.append(self._thinking(fields, at))
        elif kind in ("function_call", "custom_tool_call"):
            self._begin_turn()
            self._calls.append(_call(kind, fields, at))
        elif kind:
            self._result(fields, at)

    def _kind(self, found: Fields, at: str) -> str:
        if found.get("type", _NULL) == _NULL and "role" not in found and "id" in found:
            found = {**found, "type": Raw(b'"item_reference"')}
        if bytes(found.get("type", b"")) == b'"item_reference"':
            raise BadRequest(f"{at}: item_reference: {ROWS['input[item_reference]'].why}")
        return self._taken.kind(found, "input", at, default="message" if "role" in found else "")

    def _message(self, fields: Fields, at: str) -> None:
        role = read_text(required(fields, "role", at), f"{at}.role")
        content = required(fields, "content", at)
        where = f"{at}.content"
        if role == "user":
            self._user(content, where)
        elif role in ("system", "developer"):
            self._say_system(self._text(content, where))
        elif role == "assistant":
            self._begin_turn()
            text = self._text(content, where)
            if text:
                self._parts.append(_text_part(text))
        else:
            raise BadRequest(f"{at}.role: Input should be 'user', 'assistant', 'system' or 'developer'")

    def _say_system(self, text: str) -> None:
        if self._at_begin:
            self._system.append(text)
            return
        self._end_turn()
        self._end_results()
        self.said.append({"role": "system", "content": text})

    def _user(self, raw: Raw, at: str) -> None:
        self._end_system()
        self._end_turn()
        if memoryview(raw)[0] == _QUOTE and not self._images:
            self.said.append({"role": "user", "content": raw})
            return
        parts = self._all_parts(raw, at)
        images, self._images = self._images, []
        if not parts and not images:
            raise BadRequest(f"{at}: a message must have content")
        self.said.append({"role": "user", "content": _as_content([*images, *parts])})

    def _begin_turn(self) -> None:
        """The model goes on."""
        self._end_system()
        self._end_results()

    def _end_turn(self) -> None:
        """Makes one message of what the model said until now."""
        if not self._parts and not self._calls:
            if any(self._thoughts):
                self._taken.dropped["input[reasoning]"] = None
            self._thoughts = []
            return
        message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(part["text"] for part in self._parts)}
        if thoughts := "\n\n".join(filter(None, self._thoughts)):
            message["reasoning_content"] = thoughts
        if self._calls:
            message["tool_calls"] = self._calls
        self.said.append(message)
        self._thoughts, self._parts, self._calls = [], [], []

    def _end_results(self) -> None:
        if self._images:
            self.said.append({"role": "user", "content": self._images})
            self._images = []

    def _end_system(self) -> None:
        if not self._at_begin:
            return
        self._at_begin = False
        if text := "\n\n".join(filter(None, self._system)):
            self.said.insert(0, {"role": "system", "content": text})

    def _result(self, fields: Fields, at: str) -> None:
        self._end_system()
        self._end_turn()
        call = words(required(fields, "call_id", at), f"{at}.call_id")
        output = required(fields, "output", at)
        where = f"{at}.output"
        if memoryview(output)[0] == _QUOTE:
            self.said.append({"role": "tool", "tool_call_id": call, "content": output})
            return
        parts = self._all_parts(output, where)
        text = "\n".join(part["text"] for part in parts if "text" in part)
        self.said.append({"role": "tool", "tool_call_id": call, "content": text})
        self._images.extend(part for part in parts if "text" not in part)

    def _thinking(self, fields: Fields, at: str) -> str:
        """The thoughts; of an item without them, their summary."""
        for name in ("content", "summary"):
            if name in fields and (text := self._text(fields[name], f"{at}.{name}")):
                return text
        return ""

    # parts ------------------------------------------------------------------------------------------------------------

    def _parts_in(self, raw: Raw, at: str) -> Iterator[tuple[str, str, Fields]]:
        for number, found in enumerate(read_objects(raw, at)):
            where = f"{at}.{number}"
            kind = self._taken.kind(found, "content", where)
            if self._taken.is_earlier and kind == "input_file":
                yield where, "", found
            else:
                yield where, kind, self._taken.fields(found, f"content[{kind}]", where)

    def _text(self, raw: Raw, at: str) -> str:
        """The text of a message that is text alone."""
        if memoryview(raw)[0] == _QUOTE:
            return read_text(raw, at)
        return "\n\n".join(filter(None, (self._words(*part) for part in self._parts_in(raw, at))))

    def _words(self, at: str, kind: str, fields: Fields) -> str:
        if kind in _TEXTS:
            return read_text(required(fields, "text", at), f"{at}.text")
        if kind == "refusal":
            return read_text(required(fields, "refusal", at), f"{at}.refusal")
        raise BadRequest(f"{at}: a part of type `{shown(kind) or 'input_file'}` cannot stand here")

    def _all_parts(self, raw: Raw, at: str) -> list[dict[str, Any]]:
        if memoryview(raw)[0] == _QUOTE:
            return [_text_part(read_text(raw, at))]
        return [self._part(*part) for part in self._parts_in(raw, at)]

    def _part(self, at: str, kind: str, fields: Fields) -> dict[str, Any]:
        if not kind:
            self._taken.dropped["content[input_file]"] = None
            return _text_part(_file(fields))
        if kind == "input_image" and self._taken.is_earlier and "image_url" not in fields:
            return _text_part("[image: not readable here]")
        if kind == "input_image":
            return _image(fields, at)
        if kind == "input_file":
            raise BadRequest(f"{at}: there is no file in it")
        return _text_part(self._words(at, kind, fields))


def _is_the_models(found: Fields) -> bool:
    kind, role = bytes(found.get("type", b"")), bytes(found.get("role", b""))
    return kind in _MODELS_OWN or role == b'"assistant"'


def _call(kind: str, fields: Fields, at: str) -> object:
    """A call of a tool, as the assistant's message has it."""
    is_custom = kind == "custom_tool_call"
    given = required(fields, INPUT if is_custom else "arguments", at)
    name = read_text(required(fields, "name", at), f"{at}.name")
    namespace = read_text(fields["namespace"], f"{at}.namespace") if "namespace" in fields else ""
    if is_custom:
        arguments = _encode({INPUT: words(given, f"{at}.{INPUT}")}).decode()
    else:
        arguments = read_text(given, f"{at}.arguments").strip() or "{}"
    call_id = words(required(fields, "call_id", at), f"{at}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": flat(namespace, name), "arguments": arguments}}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(fields: Fields, at: str) -> dict[str, Any]:
    """An image as it stands: megabytes of it are not decoded. Raises BadRequest for one that would be fetched."""
    url = words(required(fields, "image_url", at), f"{at}.image_url")
    if bytes(memoryview(url)[1:6]) != b"data:" and not read_text(url, at).startswith("data:"):
        raise BadRequest(f"{at}.image_url must be a data: URL; nothing is fetched from here")
    image: dict[str, Any] = {"url": url}
    if bytes(fields.get("detail", b"")) in _DETAILS:
        image["detail"] = fields["detail"]
    return {"type": "image_url", "image_url": image}


def _file(found: Fields) -> str:
    """The line in place of a file of an earlier turn.

    >>> _file({"filename": Raw(b'"a.pdf"'), "file_data": Raw(b'"%b"' % (b"x" * 9000))})
    '[file, a.pdf, 7 KB: not readable here]'
    """
    told = ["file"]
    if memoryview(found.get("filename", _NULL))[0] == _QUOTE:
        told.append(shown(read_text(found["filename"], "filename")))
    size = len(memoryview(found.get("file_data", _NULL)))
    if size > len("null"):
        told.append(f"{-(-size * 3 // 4096)} KB")
    return f"[{', '.join(told)}: not readable here]"


def _as_content(parts: list[dict[str, Any]]) -> object:
    """One text is a string, as every server takes it."""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
