"""The system prompt and the messages of a request of Anthropic's as OpenAI's messages. Sans I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from hive.dialects.anthropic_fields import can_be_said
from hive.dialects.anthropic_history import UNTOLD, placeholder, quoted
from hive.dialects.taking import (
    Fields,
    Taken,
    read_flag,
    read_object,
    read_objects,
    read_text,
    required,
    shown,
    words,
)
from hive.errors import BadRequest

Raw = msgspec.Raw
_BILLING = re.compile(r"^x-anthropic-billing-header:(?: ?[a-z_]+=[^;\s]{0,200};)+\s*", re.MULTILINE)
"""Claude Code's line in a system prompt; a hash in it is another in each request, which no cache survives."""
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")  # Anthropic's own four
_QUOTE = b'"'[0]


class Messages:
    """The system prompt and the messages of one request, as OpenAI's messages."""

    __slots__ = ("_earlier", "_quotation", "_taken", "said")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._earlier = False
        self._quotation: dict[str, Any] | None = None
        """The last message that something was quoted in."""
        self.said: list[dict[str, Any]] = []

    def system(self, raw: Raw, at: str = "system") -> None:
        """Text, or blocks of it, which are joined as they stand; nothing where it is empty."""
        text = self._text_of(raw, at)
        if text:
            self.said.append({"role": "system", "content": text})

    def message(self, found: Fields, at: str, *, earlier: bool = False) -> None:
        """`earlier`: an assistant's message stands between it and the end, so that what cannot be said of it gives way
        to a placeholder; in the last turn it is refused."""
        self._earlier = self._taken.is_earlier = earlier
        fields = self._taken.fields(found, "messages", at)
        role = read_text(required(fields, "role", at), f"{at}.role")
        content = required(fields, "content", at)
        if role == "system":
            self.system(content, f"{at}.content")
        elif role not in ("user", "assistant"):
            raise BadRequest(f"{at}.role: Input should be 'user', 'assistant' or 'system'")
        elif memoryview(content)[0] == _QUOTE:
            self._add({"role": role, "content": content})
        elif role == "user":
            self._user(content, f"{at}.content")
        else:
            self._assistant(content, f"{at}.content")

    def _text_of(self, raw: Raw, at: str) -> str:
        if memoryview(raw)[0] == _QUOTE:
            return self._unbilled(read_text(raw, at))
        texts = []
        for where, kind, found in self._blocks(raw, at):
            if kind != "text":
                raise BadRequest(f"{where}: Input should be a block of text")
            fields = self._taken.fields(found, "content[text]", where)
            texts.append(self._unbilled(read_text(required(fields, "text", where), f"{where}.text")))
        return "".join(texts)

    def _unbilled(self, text: str) -> str:
        """A text of the system's, without a line that is another in each request."""
        if "x-anthropic-billing-header:" not in text:
            return text
        kept = _BILLING.sub("", text)
        if kept != text:
            self._taken.dropped["system.x-anthropic-billing-header"] = None
        return kept

    def _blocks(self, raw: Raw, at: str) -> Iterator[tuple[str, str, Fields]]:
        """The place, type and fields of each block; blocks that are left out are skipped."""
        for number, found in enumerate(read_objects(raw, at)):
            where = f"{at}.{number}"
            if self._earlier and not can_be_said("content", found):
                yield where, "", found
            elif kind := self._taken.kind(found, "content", where):
                yield where, kind, found

    def _unsaid(self, found: Fields, at: str) -> str:
        """The text in place of a block of an earlier turn that has no translation; empty if nothing replaces it."""
        kind = shown(read_text(required(found, "type", at), f"{at}.type"))
        self._taken.dropped[f"content[{kind}]"] = None
        return "" if kind in UNTOLD else quoted(kind, found)

    def _add(self, message: dict[str, Any]) -> None:
        """A user's message right behind a quotation is one with it: templates want roles to take turns."""
        if self._quotation is not None and self._quotation is self.said[-1] and message["role"] == "user":
            self._quotation["content"] = _joined(self._quotation["content"], message["content"])
        else:
            self.said.append(message)

    def _quote(self, text: str) -> None:
        """Moves quoted text out of an assistant's message, as the assistant did not say it: into the user's message
        before it, or into a new one."""
        if self.said and self.said[-1]["role"] == "user":
            self.said[-1]["content"] = _joined(self.said[-1]["content"], text)
        else:
            self.said.append({"role": "user", "content": text})
        self._quotation = self.said[-1]

    def _user(self, raw: Raw, at: str) -> None:
        """Results of tools first: they belong right behind the assistant's message; then what else there is. An empty
        text beside something else is nothing."""
        parts: list[Any] = []
        left_out, before = False, len(self.said)
        for where, kind, found in self._blocks(raw, at):
            if kind == "tool_result":
                parts.extend(self._result(found, where))
            elif kind:
                parts.extend(self._parts(kind, found, where))
            elif text := self._unsaid(found, where):
                parts.append(_text_part(text))
            else:
                left_out = True
        filled = [part for part in parts if part.get("text") != ""]
        if filled or (parts and len(self.said) == before):
            self._add({"role": "user", "content": _as_content(filled)})
        elif len(self.said) == before and not left_out:
            raise BadRequest(f"{at}: user messages must have non-empty content")

    def _result(self, found: Fields, at: str) -> list[dict[str, Any]]:
        """Says the tool's message; gives the images of it, which have no place there."""
        fields = self._taken.fields(found, "content[tool_result]", at)
        text, content = "", fields.get("content")
        images: list[dict[str, Any]] = []
        if content is not None and memoryview(content)[0] == _QUOTE:
            text = read_text(content, f"{at}.content")
        elif content is not None:
            parts = self._all_parts(content, f"{at}.content")
            text = "\n".join(part["text"] for part in parts if "text" in part)
            images = [part for part in parts if "text" not in part]
        if "is_error" in fields and read_flag(fields["is_error"], f"{at}.is_error"):
            text = f"Error: {text}"
        call = words(required(fields, "tool_use_id", at), f"{at}.tool_use_id")
        self._add({"role": "tool", "tool_call_id": call, "content": text})
        return images

    def _all_parts(self, raw: Raw, at: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for where, kind, found in self._blocks(raw, at):
            if kind:
                parts.extend(self._parts(kind, found, where))
            elif text := self._unsaid(found, where):
                parts.append(_text_part(text))
        return parts

    def _parts(self, kind: str, found: Fields, at: str) -> list[dict[str, Any]]:
        """A block of text or media as OpenAI's parts."""
        if kind not in ("text", "image", "document", "search_result", "tool_reference"):
            raise BadRequest(f"{at}: a block of type `{kind}` cannot stand here")
        fields = self._taken.fields(found, f"content[{kind}]", at)
        if kind == "text":
            return [_text_part(read_text(required(fields, "text", at), f"{at}.text"))]
        if kind == "search_result":
            return [_text_part(self._found(fields, at))]
        if kind == "tool_reference":
            name = read_text(required(fields, "tool_name", at), f"{at}.tool_name")
            return [_text_part(f"[the tool {name} can be called]")]
        source = read_object(required(fields, "source", at), f"{at}.source")
        if self._earlier and not can_be_said(f"content[{kind}].source", source):
            self._taken.dropped[f"content[{kind}].source"] = None
            return [_text_part(placeholder(kind, source))]
        of = self._taken.kind(source, f"content[{kind}].source", f"{at}.source")
        inner = self._taken.fields(source, f"content[{kind}].source[{of}]", f"{at}.source")
        if kind == "image":
            return [_image_part(inner, f"{at}.source")]
        heads = [read_text(fields[name], f"{at}.{name}") for name in ("title", "context") if name in fields]
        content = required(inner, "data" if of == "text" else "content", f"{at}.source")
        if memoryview(content)[0] == _QUOTE:
            return [_text_part("\n\n".join([*heads, read_text(content, f"{at}.source")]))]
        head = [_text_part("\n\n".join(heads))] if heads else []
        return head + self._all_parts(content, f"{at}.source.content")

    def _found(self, fields: Fields, at: str) -> str:
        """A search result the client itself brings, as quoted text."""
        title, source = (read_text(required(fields, name, at), f"{at}.{name}") for name in ("title", "source"))
        parts = self._all_parts(required(fields, "content", at), f"{at}.content")
        text = "\n".join(part["text"] for part in parts if "text" in part)
        return f"[search result, quoted: {title}, {source}]\n{text}\n[end of the result]"

    def _assistant(self, raw: Raw, at: str) -> None:
        """One message, or several where something is quoted in the middle of it."""
        parts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[object] = []
        has_quoted = False
        for where, kind, found in self._blocks(raw, at):
            if not kind:
                has_quoted = True
                if text := self._unsaid(found, where):
                    if parts and not calls:  # what tools say has to follow right behind their calls
                        self.said.append(_answer(parts, thoughts, calls))
                        parts, thoughts = [], []
                    self._quote(text)
            elif kind == "thinking":
                fields = self._taken.fields(found, "content[thinking]", where)
                thoughts.append(read_text(required(fields, "thinking", where), f"{where}.thinking"))
            elif kind == "tool_use":
                calls.append(_call(self._taken.fields(found, "content[tool_use]", where), where))
            elif kind == "text":
                parts.extend(self._parts(kind, found, where))
            else:
                raise BadRequest(f"{where}: a block of type `{kind}` cannot stand in the assistant's message")
        if parts or calls or not has_quoted:
            self.said.append(_answer(parts, thoughts, calls))


def _answer(parts: list[dict[str, Any]], thoughts: list[str], calls: list[object]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _as_content(parts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(first: Any, second: Any) -> object:
    """Two contents as one; of two texts it is a text."""
    lists = [_as_parts(content) for content in (first, second)]
    if all("text" in part for parts in lists for part in parts):
        return "\n\n".join(part["text"] for parts in lists for part in parts)
    return [*lists[0], *lists[1]]


def _as_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [_text_part(content if isinstance(content, str) else read_text(content, "content"))]


def _image_part(source: Fields, at: str) -> dict[str, Any]:
    """Base64 as a data URL; megabytes of it are not decoded for that, so it stays as it was written."""
    kind = read_text(required(source, "media_type", at), f"{at}.media_type")
    if kind not in MEDIA_TYPES:
        raise BadRequest(f"{at}.media_type: Input should be {', '.join(map(repr, MEDIA_TYPES))}")
    data = words(required(source, "data", at), f"{at}.data")
    url = b"".join([b'"data:', kind.encode(), b";base64,", memoryview(data)[1:]])
    return {"type": "image_url", "image_url": {"url": Raw(url)}}


def _as_content(parts: list[Any]) -> object:
    """One text is a string, as every server takes it."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _call(fields: Fields, at: str) -> object:
    given = required(fields, "input", at)
    read_object(given, f"{at}.input")
    function = {
        "name": words(required(fields, "name", at), f"{at}.name"),
        "arguments": bytes(given).decode(),
    }
    return {"id": words(required(fields, "id", at), f"{at}.id"), "type": "function", "function": function}
