"""Anthropic's Messages on a backend that speaks OpenAI's chat completions only: the requests. Sans I/O.

Made from anthropic 2.10.0 (every field its types can send has a row in ROWS, which a test walks) and from what
llama-server 0c1e570 and vLLM 0.33 do with Messages themselves, so that a prompt is the same whoever translates it.

There is no way for `/v1/messages/count_tokens`: OpenAI's dialect has no endpoint that counts the tokens of messages,
and a guess would be taken for a count. llama-server and vLLM count in Anthropic's dialect themselves; of any other
backend Hive answers 501.

Decided here, where the dialects leave it open:
- Thinking that comes back in `messages` goes on as `reasoning_content`. `thinking`: `disabled` is the effort `none`, a
  budget has vLLM's and llama-server's names at once, each of which the other passes over, and `adaptive` says nothing.
  `output_config.effort` is the client's own word and wins.
- Blocks of `system` are joined as they stand, those of a tool's result with a line end. Images in a tool's result go
  into the user's message right behind it: OpenAI's tool messages take text only. `is_error` becomes the word
  "Error: " before the result.
- An answer that the client has begun itself (a last message of the assistant's) is gone on with, by the two fields that
  vLLM and llama-server have for it. llama-server repeats what was begun, but not in streams of chat completions.
- A field in no row is refused; of an object within, it is left out and told, like what is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from hive.dialects.anthropic_openai_answers import Answer, Kept
from hive.dialects.translation import Fate, Row, Sent, Way, WayBack
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
T = TypeVar("T")
Fields = dict[str, Raw]
TARGET = "/v1/chat/completions"
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")  # Anthropic's own four
_BILLING = re.compile(r"x-anthropic-billing-header:(?: ?[a-z_]+=[^;\s]{0,200};)+\s*")
"""Claude Code's first line of a system prompt; a hash in it is another in each request, which no cache survives."""


def _to(field: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Fate.MAPPED, to=field))


def _no(why: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Fate.REFUSED, why=why))


def _aside(why: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Fate.HARMLESS, why=why))


def _kinds(where: str, *kinds: str) -> list[str]:
    return [f"{where}[{kind}]" for kind in kinds]


_AT_ANTHROPIC = "this runs on Anthropic's servers, and there are none here"
_OF_CLAUDE = "only Claude knows this tool's schema; give a tool of your own with name and input_schema"
_FILES = "there is no store of files here; send the content itself"
_FETCHED = "nothing is fetched from here; send the content itself"
_CACHED = ("content[text]", "content[image]", "content[document]", "content[tool_use]", "content[tool_result]")
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_SCHEMA = "response_format.json_schema.schema"

ROWS: dict[str, Row] = {
    **{name: Row(Fate.MAPPED, to=name) for name in _SAME},
    **_to("messages", "messages", "messages.role", "messages.content", "system"),
    **_no("a message that is shown for a time only cannot be said in OpenAI's dialect", "messages.clear_at"),
    **_no("OpenAI's dialect has one effort for the whole request", "messages.output_config"),
    **_to("stop", "stop_sequences"),
    **_to("", "metadata"),
    **_aside("whose account it is is nobody else's business", "metadata.user_id"),
    **_to("tools", "tools"),
    **_to("tool_choice", "tool_choice", "tool_choice[none]"),
    **_to("reasoning_effort", "thinking", "output_config.effort"),
    **_to("response_format", "output_config", "output_config.format", "output_format"),
    **_to(_SCHEMA, "output_config.format[json_schema].schema", "output_format[json_schema].schema"),
    **_no("no server here spreads a budget over several requests", "output_config.task_budget"),
    **_aside("servers cache every beginning of a prompt by themselves", "cache_control", "tools[custom].cache_control"),
    **_aside("servers cache every beginning of a prompt by themselves", *(f"{of}.cache_control" for of in _CACHED)),
    **_aside("requests are ordered by Hive's tiers", "service_tier"),
    **_aside("there is one speed", "speed"),
    **_aside("it asks for words about Anthropic's prompt cache, not for another answer", "diagnostics"),
    **_aside("whom Anthropic bills", "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"),
    **_aside("what they open has a row of its own", "betas"),
    **_aside("which model is asked is Hive's to say", "fallbacks"),
    **_aside("max_tokens says it", "n_predict"),
    **_aside("Hive's own to say", "keep_alive", "request_id", "priority", "cache_salt", "session_id"),
    **_aside("Hive's own to say", "id_slot", "cache_prompt"),
    **_no("Hive cannot promise where another server computes", "inference_geo"),
    **_to("messages", "context_management", "context_management.edits"),
    **_aside(
        "chat templates leave earlier thinking out themselves", "context_management.edits[clear_thinking_20251015]"
    ),
    **_no("the server does not edit a conversation", "context_management.edits[clear_tool_uses_20250919]"),
    **_no("the server does not summarize a conversation", "context_management.edits[compact_20260112]", "compaction"),
    **_no(_AT_ANTHROPIC, "container", "mcp_servers"),
    **_no("the server keeps no conversations; send all messages", "thread"),
    **_no("this is no field of Messages", "lora", "chat_template", "template", "mm_processor_kwargs"),
    **_no("this is no field of Messages", "media_io_kwargs", "prompt_embeds", "kv_transfer_params"),
    **_no("this is no field of Messages", "ec_transfer_params", "vllm_xargs", "_debug_render_only"),
    # thinking, by its type
    **_to("thinking_token_budget, thinking_budget_tokens", "thinking[enabled].budget_tokens"),
    **_to("reasoning_effort", "thinking[disabled]"),
    **_to("", "thinking[enabled].display", "thinking[adaptive].display"),
    **_aside("no signatures are checked", "thinking[enabled].block_binding", "thinking[adaptive].block_binding"),
    **_no("no server here thinks between tools only", "thinking[between_tools]"),
    # tools, and which of them
    **_to("parallel_tool_calls", *(f"tool_choice[{k}].disable_parallel_tool_use" for k in ("auto", "any", "tool"))),
    **_to("tool_choice.function.name", "tool_choice[tool].name"),
    **_to("tools.function.name", "tools[custom].name"),
    **_to("tools.function.description", "tools[custom].description"),
    **_to("tools.function.parameters", "tools[custom].input_schema"),
    **_to("tools.function.parameters.examples", "tools[custom].input_examples"),
    **_to("tools.function.strict", "tools[custom].strict"),
    **_aside("arguments are streamed as they come", "tools[custom].eager_input_streaming"),
    **_no(_AT_ANTHROPIC, "tools[custom].allowed_callers"),
    **_no("no server here searches for tools; leave it out, or the tool", "tools[custom].defer_loading"),
    **_no(
        _OF_CLAUDE, *_kinds("tools", "bash_20241022", "bash_20250124", "memory_20250818", "browser_toolset_20260801")
    ),
    **_no(_OF_CLAUDE, *_kinds("tools", "computer_20241022", "computer_20250124", "computer_20251124")),
    **_no(_OF_CLAUDE, *_kinds("tools", "computer_toolset_20260801", "text_editor_20241022", "text_editor_20250124")),
    **_no(_OF_CLAUDE, *_kinds("tools", "text_editor_20250429", "text_editor_20250728")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "code_execution_20250522", "code_execution_20250825", "advisor_20260301")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "code_execution_20260120", "code_execution_20260521", "mcp_toolset")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "web_search_20250305", "web_search_20260209", "web_search_20260318")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "web_fetch_20250910", "web_fetch_20260209", "web_fetch_20260309")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "web_fetch_20260318", "tool_search_tool_bm25", "tool_search_tool_regex")),
    **_no(_AT_ANTHROPIC, *_kinds("tools", "tool_search_tool_bm25_20251119", "tool_search_tool_regex_20251119")),
    # blocks of content, wherever they stand: messages, system, results, documents
    **_to("messages.content.text", "content[text].text", "content[document].title", "content[document].context"),
    **_to("messages.content.text", "content[document].source", "content[document].source[text].data"),
    **_to("", "content[document].source[text].media_type"),
    **_to("messages.content", "content[document].source[content].content"),
    **_aside("the text stands as it is", "content[text].citations"),
    **_to("messages.content.image_url.url", "content[image].source", "content[image].source[base64].data"),
    **_to("messages.content.image_url.url", "content[image].source[base64].media_type"),
    **_no("how large an image may be is the server's to say", "content[image].transformations"),
    **_no("servers here read no PDF; send its text", "content[document].source[base64]"),
    **_no(_FETCHED, "content[image].source[url]", "content[document].source[url]"),
    **_no(_FILES, "content[image].source[file]", "content[document].source[file]", "content[container_upload]"),
    **_no("no server here tells from where it has a sentence", "content[document].citations"),
    **_to("messages.reasoning_content", "content[thinking].thinking"),
    **_aside("nobody here checks it", "content[thinking].signature"),
    **_aside("only Anthropic can read it", "content[redacted_thinking]"),
    **_to("messages.tool_calls.id", "content[tool_use].id"),
    **_to("messages.tool_calls.function.name", "content[tool_use].name"),
    **_to("messages.tool_calls.function.arguments", "content[tool_use].input"),
    **_aside("every tool here is called by the model itself", "content[tool_use].caller"),
    **_to("messages.tool_call_id", "content[tool_result].tool_use_id"),
    **_to("messages.content", "content[tool_result].content", "content[tool_result].is_error"),
    **_no(_OF_CLAUDE, "content[tool_use].toolset_name", "content[tool_result].toolset_name", "content[browser_state]"),
    **_no("OpenAI's dialect has no results of a search; send them as text", "content[search_result]"),
    **_no("only Anthropic can read it", "content[compaction]"),
    **_no("only Anthropic's servers change the model within an answer", "content[fallback]"),
    **_no(_AT_ANTHROPIC, *_kinds("content", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "code_execution_tool_result", "bash_code_execution_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "text_editor_code_execution_tool_result", "tool_search_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "tool_reference", "tool_addition", "tool_removal", "advisor_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing")),
}
"""By the field's name, with dots into objects; in brackets the `type` of an object that may be of several."""

_IDLE = {
    "messages.clear_at": b'"never"',
    "tools[custom].allowed_callers": b'["direct"]',
    "content[image].transformations": b'{"oversized_image":"downsize"}',
    "content[document].citations": b'{"enabled":false}',
    "content[tool_use].caller": b'{"type":"direct"}',
    "speed": b'"standard"',
}
"""Values that ask for nothing, beside those that are empty."""
_EMPTY = frozenset({b"null", b"false", b'""', b"[]", b"{}"})

_INSIDE: dict[str, dict[str, Row]] = {}
"""The rows by what they stand in, then by name."""
for _name, _row in ROWS.items():
    if not _name.endswith("]"):
        _where, _, _inner = _name.rpartition(".")
        _INSIDE.setdefault(_where, {})[_inner] = _row

_encode = msgspec.json.Encoder().encode
_QUOTE, _NULL = b'"'[0], Raw(b"null")
_UNTOLD = re.compile(r"[^!-+\--~]")


class Taken:
    """Takes the objects of one request apart by ROWS, and notes what of them is left out."""

    __slots__ = ("dropped",)

    def __init__(self) -> None:
        self.dropped: dict[str, None] = {}
        """By the name of the row, in the order of the body; each once."""

    def fields(self, found: Fields, where: str, at: str) -> Fields:
        """The mapped fields of an object that are there and not null. `where`: in ROWS; `at`: in this body."""
        rows = _INSIDE.get(where, {})
        taken = {}
        for name, value in found.items():
            row = rows.get(name)
            if value == _NULL or (name == "type" and where.endswith("]")):
                continue
            if row is not None and row.fate is Fate.MAPPED:
                taken[name] = value
            elif row is None and not where:
                raise NotSupported(f"there is no way to say the field `{_shown(name)}` in OpenAI's dialect")
            else:
                self._leave(f"{where}.{name}" if where else name, row, value, f"{at}.{name}" if at else name)
        return taken

    def kind(self, found: Fields, where: str, at: str, default: str = "") -> str:
        """The `type` of an object that may be of several; empty for one that is left out. Raises NotSupported."""
        if default and found.get("type", _NULL) == _NULL:
            return default
        kind = read_text(required(found, "type", at), f"{at}.type")
        row = ROWS.get(f"{where}[{kind}]")
        if row is None and f"{where}[{kind}]" not in _INSIDE:
            raise NotSupported(f"{at}: there is no way to say `{_shown(kind)}` in OpenAI's dialect")
        if row is not None and row.fate is Fate.REFUSED:
            raise NotSupported(f"{at}: `{_shown(kind)}` is not taken: {row.why}")
        if row is not None and row.fate is Fate.HARMLESS:
            self.dropped[f"{where}[{kind}]"] = None
            return ""
        return kind

    def _leave(self, name: str, row: Row | None, value: Raw, at: str) -> None:
        written = msgspec.json.format(bytes(value), indent=-1)
        if written in _EMPTY or written == _IDLE.get(name):
            return
        if row is not None and row.fate is Fate.REFUSED:
            raise NotSupported(f"{_shown(at)} is not taken: {row.why}")
        self.dropped[_shown(name)] = None


def _shown(name: str) -> str:
    """A client's name as a header field or a message may carry it.

    >>> _shown("a\\r\\nX-Evil: 1"), _shown("content[text].cache_control")
    ('a??X-Evil:?1', 'content[text].cache_control')
    """
    return _UNTOLD.sub("?", name[:100])


def _read(decode: Callable[[bytes | Raw], T], what: str, raw: bytes | Raw, at: str) -> T:
    """In Anthropic's words where it cannot be read, as everywhere here."""
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
    """In one pass over megabytes; one by one only to say which of them is none."""
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


class Messages:
    """The system prompt and the messages of one request, as OpenAI's messages."""

    __slots__ = ("_taken", "said")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self.said: list[dict[str, object]] = []

    def system(self, raw: Raw, at: str = "system") -> None:
        """Text, or blocks of it, which are joined as they stand; nothing where it is empty."""
        text = self._text_of(raw, at)
        if billing := _BILLING.match(text):
            self._taken.dropped["system.x-anthropic-billing-header"] = None
            text = text[billing.end() :]
        if text:
            self.said.append({"role": "system", "content": text})

    def message(self, found: Fields, at: str) -> None:
        fields = self._taken.fields(found, "messages", at)
        role = read_text(required(fields, "role", at), f"{at}.role")
        content = required(fields, "content", at)
        if role == "system":
            self.system(content, f"{at}.content")
        elif role not in ("user", "assistant"):
            raise BadRequest(f"{at}.role: Input should be 'user', 'assistant' or 'system'")
        elif memoryview(content)[0] == _QUOTE:
            self.said.append({"role": role, "content": content})
        elif role == "user":
            self._user(content, f"{at}.content")
        else:
            self._assistant(content, f"{at}.content")

    def _text_of(self, raw: Raw, at: str) -> str:
        if memoryview(raw)[0] == _QUOTE:
            return read_text(raw, at)
        texts = []
        for where, kind, found in self._blocks(raw, at):
            if kind != "text":
                raise BadRequest(f"{where}: Input should be a block of text")
            fields = self._taken.fields(found, "content[text]", where)
            texts.append(read_text(required(fields, "text", where), f"{where}.text"))
        return "".join(texts)

    def _blocks(self, raw: Raw, at: str) -> Iterator[tuple[str, str, Fields]]:
        """Where each block stands, its type and its fields; those that are left out are passed over."""
        for number, found in enumerate(read_objects(raw, at)):
            where = f"{at}.{number}"
            if kind := self._taken.kind(found, "content", where):
                yield where, kind, found

    def _user(self, raw: Raw, at: str) -> None:
        """Results of tools first: they belong right behind the assistant's message; then what else there is."""
        parts: list[object] = []
        before = len(self.said)
        for where, kind, found in self._blocks(raw, at):
            if kind == "tool_result":
                parts.extend(self._result(found, where))
            else:
                parts.extend(self._parts(kind, found, where))
        if parts:
            self.said.append({"role": "user", "content": _as_content(parts)})
        elif len(self.said) == before:
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
        self.said.append({"role": "tool", "tool_call_id": call, "content": text})
        return images

    def _all_parts(self, raw: Raw, at: str) -> list[dict[str, Any]]:
        return [part for where, kind, found in self._blocks(raw, at) for part in self._parts(kind, found, where)]

    def _parts(self, kind: str, found: Fields, at: str) -> list[dict[str, Any]]:
        """A block of text or media as OpenAI's parts."""
        if kind not in ("text", "image", "document"):
            raise BadRequest(f"{at}: a block of type `{kind}` cannot stand here")
        fields = self._taken.fields(found, f"content[{kind}]", at)
        if kind == "text":
            return [{"type": "text", "text": read_text(required(fields, "text", at), f"{at}.text")}]
        source = read_object(required(fields, "source", at), f"{at}.source")
        of = self._taken.kind(source, f"content[{kind}].source", f"{at}.source")
        inner = self._taken.fields(source, f"content[{kind}].source[{of}]", f"{at}.source")
        if kind == "image":
            return [_image_part(inner, f"{at}.source")]
        heads = [read_text(fields[name], f"{at}.{name}") for name in ("title", "context") if name in fields]
        content = required(inner, "data" if of == "text" else "content", f"{at}.source")
        if memoryview(content)[0] == _QUOTE:
            return [{"type": "text", "text": "\n\n".join([*heads, read_text(content, f"{at}.source")])}]
        head = [{"type": "text", "text": "\n\n".join(heads)}] if heads else []
        return head + self._all_parts(content, f"{at}.source.content")

    def _assistant(self, raw: Raw, at: str) -> None:
        parts: list[object] = []
        thoughts: list[str] = []
        calls: list[object] = []
        for where, kind, found in self._blocks(raw, at):
            if kind == "thinking":
                fields = self._taken.fields(found, "content[thinking]", where)
                thoughts.append(read_text(required(fields, "thinking", where), f"{where}.thinking"))
            elif kind == "tool_use":
                calls.append(_call(self._taken.fields(found, "content[tool_use]", where), where))
            elif kind == "text":
                parts.extend(self._parts(kind, found, where))
            else:
                raise BadRequest(f"{where}: a block of type `{kind}` cannot stand in the assistant's message")
        message: dict[str, object] = {"role": "assistant", "content": _as_content(parts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.said.append(message)


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


# --- tools, thinking, format ------------------------------------------------------------------------------------------

_CHOICES: dict[str, object] = {"auto": "auto", "any": "required", "none": "none"}


def _tools(taken: Taken, raw: Raw) -> list[object]:
    tools: list[object] = []
    for number, found in enumerate(read_objects(raw, "tools")):
        at = f"tools.{number}"
        taken.kind(found, "tools", at, default="custom")
        fields = taken.fields(found, "tools[custom]", at)
        schema = required(fields, "input_schema", at)
        if "input_examples" in fields:
            inner = read_object(schema, f"{at}.input_schema")
            inner.setdefault("examples", fields["input_examples"])
            schema = Raw(_encode(inner))
        function = {"name": words(required(fields, "name", at), f"{at}.name"), "parameters": schema}
        function.update({name: fields[name] for name in ("description", "strict") if name in fields})
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(taken: Taken, raw: Raw) -> dict[str, object]:
    at = "tool_choice"
    found = read_object(raw, at)
    kind = taken.kind(found, at, at)
    fields = taken.fields(found, f"{at}[{kind}]", at)
    sent: dict[str, object] = {at: _CHOICES.get(kind)}
    if kind == "tool":
        sent[at] = {"type": "function", "function": {"name": words(required(fields, "name", at), f"{at}.name")}}
    if "disable_parallel_tool_use" in fields:
        sent["parallel_tool_calls"] = not read_flag(
            fields["disable_parallel_tool_use"], f"{at}.disable_parallel_tool_use"
        )
    return sent


def _thinking(taken: Taken, raw: Raw) -> tuple[dict[str, object], bool]:
    """The backend's fields, and whether the client wants the thoughts left out of the answer."""
    found, at = read_object(raw, "thinking"), "thinking.enabled"
    kind = taken.kind(found, "thinking", "thinking")
    fields = taken.fields(found, f"thinking[{kind}]", "thinking")
    hidden = "display" in fields and read_text(fields["display"], "thinking.display") == "omitted"
    if kind != "enabled":
        return ({"reasoning_effort": "none"} if kind == "disabled" else {}), hidden
    budget = required(fields, "budget_tokens", at)
    read_number(budget, f"{at}.budget_tokens")
    return {"thinking_token_budget": budget, "thinking_budget_tokens": budget}, hidden


def _output_config(taken: Taken, raw: Raw) -> dict[str, object]:
    fields = taken.fields(read_object(raw, "output_config"), "output_config", "output_config")
    sent: dict[str, object] = {}
    if "effort" in fields:
        sent["reasoning_effort"] = words(fields["effort"], "output_config.effort")
    if "format" in fields:
        sent["response_format"] = _format(taken, fields["format"], "output_config.format")
    return sent


def _format(taken: Taken, raw: Raw, at: str) -> object:
    """Anthropic holds every answer to the schema; `strict` asks the same of OpenAI, other servers always do."""
    found = read_object(raw, at)
    kind = taken.kind(found, at, at)
    schema = required(taken.fields(found, f"{at}[{kind}]", at), "schema", at)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _check_edits(taken: Taken, raw: Raw) -> None:
    at = "context_management"
    fields = taken.fields(read_object(raw, at), at, at)
    if "edits" in fields:
        for number, found in enumerate(read_objects(fields["edits"], f"{at}.edits")):
            taken.kind(found, f"{at}.edits", f"{at}.edits.{number}")


# --- the way ----------------------------------------------------------------------------------------------------------


class MessagesWay:
    """`/v1/messages`, with and without `?beta=true`, by way of `/v1/chat/completions`.

    >>> body = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
    >>> MessagesWay().there(body).body
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9}'
    """

    rows = ROWS

    def there(self, body: bytes) -> Sent:
        """The request as chat completions have it. Raises BadRequest, NotSupported."""
        taken = Taken()
        fields = taken.fields(read_object(body, ""), "", "")
        model = words(required(fields, "model", ""), "model")
        conversation = _conversation(taken, fields)
        sent: dict[str, object] = {"model": model, "messages": conversation}
        if read_number(required(fields, "max_tokens", ""), "max_tokens") < 1:
            raise BadRequest("max_tokens: Input should be greater than or equal to 1")
        sent.update((name, fields[name]) for name in _SAME if name in fields)
        if conversation and conversation[-1]["role"] == "assistant":
            sent.update(continue_final_message=True, add_generation_prompt=False)
        if "stream" in fields and read_flag(fields["stream"], "stream"):
            sent["stream_options"] = {"include_usage": True}
        stops = read_list(fields["stop_sequences"], "stop_sequences") if "stop_sequences" in fields else []
        if stops:
            sent["stop"] = fields["stop_sequences"]
        if "metadata" in fields:
            taken.fields(read_object(fields["metadata"], "metadata"), "metadata", "metadata")
        hidden = _add_thinking_and_format(taken, fields, sent)
        _add_tools(taken, fields, sent)
        if "context_management" in fields:
            _check_edits(taken, fields["context_management"])
        kept = {"model": model, "stop": [read_text(raw, "stop_sequences") for raw in stops], "hidden": hidden}
        return Sent(TARGET, _encode(sent), tuple(taken.dropped), _encode(kept))

    def back(self, kept: bytes, *, stream: bool) -> WayBack:
        return Answer(msgspec.json.decode(kept, type=Kept), stream=stream)


def _conversation(taken: Taken, fields: Fields) -> list[dict[str, object]]:
    messages = Messages(taken)
    if "system" in fields:
        messages.system(fields["system"])
    given = read_objects(required(fields, "messages", ""), "messages")
    if not given:
        raise BadRequest("messages: at least one message is required")
    for number, found in enumerate(given):
        messages.message(found, f"messages.{number}")
    return messages.said


def _add_thinking_and_format(taken: Taken, fields: Fields, sent: dict[str, object]) -> bool:
    """Whether thoughts are to be left out of the answer."""
    hidden = False
    if "thinking" in fields:
        thinking, hidden = _thinking(taken, fields["thinking"])
        sent.update(thinking)
    if "output_config" in fields:
        sent.update(_output_config(taken, fields["output_config"]))
    if "output_format" in fields:
        if "response_format" in sent:
            raise BadRequest("output_format: give it or output_config.format, not both")
        sent["response_format"] = _format(taken, fields["output_format"], "output_format")
    return hidden


def _add_tools(taken: Taken, fields: Fields, sent: dict[str, object]) -> None:
    """A choice without tools is none to OpenAI's servers: one that demands a tool is refused, another means nothing."""
    tools = _tools(taken, fields["tools"]) if "tools" in fields else []
    choice = _tool_choice(taken, fields["tool_choice"]) if "tool_choice" in fields else {}
    if tools:
        sent["tools"] = tools
        sent.update(choice)
    elif choice and choice["tool_choice"] not in ("auto", "none"):
        raise BadRequest("tool_choice: there are no tools to choose from")


WAYS: dict[str, Way] = {"/v1/messages": MessagesWay()}
