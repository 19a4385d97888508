"""OpenAI's Responses on a backend that is asked by chat completions: the requests. Sans I/O.

Made from openai 3.51.0 (every field its types can send has a row in ROWS, which a test walks) and from the bodies that
Codex sends. It is translated for every kind of backend, also for those that have `/v1/responses` themselves: so fields,
the separation of prompts, and usage are as for chat completions, and no server keeps a conversation.

Decided here, where the two leave it open:
- A custom tool becomes a function with one text, `input`, and its calls become custom again. A regular expression holds
  that text where the server holds arguments to a schema; a grammar of Lark's no server follows in a function, so it
  goes to the model in words. Functions in a namespace are named with it, and lose it again on the way back.
- The model's thinking is `reasoning_text`; if the client asks for a summary, the thinking stands in its place, as no
  server here makes a shorter one. It is taken back as `reasoning_content` from either.
- `allowed_tools` leaves the others out: chat completions of most servers know no such choice.
- Nothing is stored here (hive.proxy has the storage): `with_items` puts what was stored into a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hive.dialects.openai_responses_answers import ResponseBack, ResponsesKept
from hive.dialects.openai_responses_background import BackgroundAsked, background_of
from hive.dialects.openai_responses_fields import ROWS, TABLE
from hive.dialects.openai_responses_items import InputItems, flat
from hive.dialects.openai_responses_output import INPUT, Called
from hive.dialects.taking import (
    Fields,
    Taken,
    read_flag,
    read_list,
    read_number,
    read_object,
    read_objects,
    read_text,
    required,
    shown,
    words,
)
from hive.dialects.translation import FieldFate, Sent, TranslatedEndpoint, WayBack
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
TARGET = "/v1/chat/completions"
_SAME = ("temperature", "top_p", "top_k", "chat_template_kwargs", "stream")
_encode = msgspec.json.Encoder().encode
_QUOTE, _BRACKET, _NULL = b'"'[0], b"["[0], b"null"
_WORDS = ("auto", "none", "required")
_LARK = "\n\nThe input has to follow this Lark grammar:\n"
_REGEX = "\n\nThe whole input has to match this regular expression: "
_ECHOED: Mapping[str, bytes] = {
    "background": b"false",
    "instructions": _NULL,
    "max_output_tokens": _NULL,
    "max_tool_calls": _NULL,
    "metadata": b"{}",
    "parallel_tool_calls": b"true",
    "prompt_cache_key": _NULL,
    "prompt_cache_retention": _NULL,
    "reasoning": b'{"effort":null,"summary":null}',
    "safety_identifier": _NULL,
    "service_tier": b'"default"',
    "temperature": _NULL,
    "text": b'{"format":{"type":"text"}}',
    "tool_choice": b'"auto"',
    "tools": b"[]",
    "top_logprobs": b"0",
    "top_p": _NULL,
    "truncation": b'"disabled"',
    "user": _NULL,
}
"""Fields that an answer repeats of its request, with what it says where they were left out."""


# --- tools ------------------------------------------------------------------------------------------------------------


class FunctionTools:
    """The tools of a request as functions; `calls`: what those are called for the client that it names otherwise."""

    __slots__ = ("_taken", "calls", "said")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self.said: dict[str, dict[str, Any]] = {}
        """Tools as they are sent, by the function's name."""
        self.calls: dict[str, Called] = {}

    def take(self, raw: Raw, at: str = "tools", namespace: str = "") -> None:
        for number, found in enumerate(read_objects(raw, at)):
            self._tool(found, f"{at}.{number}", namespace)

    def _tool(self, found: Fields, at: str, namespace: str) -> None:
        if bytes(found.get("type", b"")) == b'"web_search"' and "external_web_access" in found:
            self._taken.dropped["tools[web_search]"] = None
            return
        kind = self._taken.kind(found, "tools", at)
        fields = self._taken.fields(found, f"tools[{kind}]", at) if kind else {}
        if kind == "namespace" and not namespace:
            name = read_text(required(fields, "name", at), f"{at}.name")
            self.take(required(fields, "tools", at), f"{at}.tools", name)
        elif kind == "function":
            self._add(fields, at, namespace, fields.get("parameters", Raw(b'{"type":"object","properties":{}}')))
        elif kind == "custom":
            self._custom(fields, at, namespace)
        elif kind:
            raise BadRequest(f"{at}: a tool of type `{shown(kind)}` cannot stand here")

    def _custom(self, fields: Fields, at: str, namespace: str) -> None:
        argument, told = {"type": "string", "description": "The whole input, as plain text"}, ""
        if "format" in fields:
            pattern, told = self._format(read_object(fields["format"], f"{at}.format"), f"{at}.format")
            if pattern:
                argument["pattern"] = pattern
        if told:
            description = read_text(fields["description"], f"{at}.description") if "description" in fields else ""
            fields = {**fields, "description": Raw(_encode((description + told).strip()))}
        schema = {
            "type": "object",
            "properties": {INPUT: argument},
            "required": [INPUT],
            "additionalProperties": False,
        }
        self._add(fields, at, namespace, Raw(_encode(schema)), custom=True)

    def _format(self, found: Fields, at: str) -> tuple[str, str]:
        """The format the text has to match, and what the model is told of it."""
        where = "tools[custom].format"
        kind = self._taken.kind(found, where, at)
        fields = self._taken.fields(found, f"{where}[{kind}]", at)
        if kind != "grammar":
            return "", ""
        syntax = read_text(required(fields, "syntax", at), f"{at}.syntax")
        definition = read_text(required(fields, "definition", at), f"{at}.definition")
        if syntax == "lark":
            self._taken.dropped[f"{where}[grammar]"] = None
            return "", f"{_LARK}{definition}"
        if syntax != "regex":
            raise NotSupported(f"{at}.syntax: there is no way to say `{shown(syntax)}` in a chat completion")
        whole = definition if definition[:1] == "^" and definition[-1:] == "$" else f"^({definition})$"
        return whole, f"{_REGEX}{definition}"

    def _add(self, fields: Fields, at: str, namespace: str, schema: Raw, *, custom: bool = False) -> None:
        name = read_text(required(fields, "name", at), f"{at}.name")
        sent = flat(namespace, name)
        if sent in self.said:
            raise BadRequest(f"{at}.name: another tool is named `{shown(sent)}` already")
        function: dict[str, object] = {"name": sent, "parameters": schema}
        function.update({key: fields[key] for key in ("description", "strict") if key in fields})
        self.said[sent] = {"type": "function", "function": function}
        if custom or namespace:
            self.calls[sent] = Called(name, namespace, custom)

    def choose(self, raw: Raw) -> object:
        """`tool_choice` as chat completions have it; of `allowed_tools` the others are left out."""
        at = "tool_choice"
        if memoryview(raw)[0] == _QUOTE:
            choice = read_text(raw, at)
            if choice not in _WORDS:
                raise BadRequest(f"{at}: Input should be 'auto', 'none' or 'required'")
            return choice
        found = read_object(raw, at)
        kind = self._taken.kind(found, at, at)
        fields = self._taken.fields(found, f"{at}[{kind}]", at)
        if kind == "allowed_tools":
            return self._allow(fields, at)
        name = read_text(required(fields, "name", at), f"{at}.name")
        if name not in self.said:
            name = next((sent for sent, called in self.calls.items() if called.name == name), name)
        return {"type": "function", "function": {"name": name}}

    def _allow(self, fields: Fields, at: str) -> str:
        mode = read_text(required(fields, "mode", at), f"{at}.mode")
        if mode not in ("auto", "required"):
            raise BadRequest(f"{at}.mode: Input should be 'auto' or 'required'")
        allowed = {
            read_text(found["name"], f"{at}.tools")
            for found in read_objects(required(fields, "tools", at), f"{at}.tools")
            if "name" in found
        }
        kept = {
            sent for sent in self.said if sent in allowed or (sent in self.calls and self.calls[sent].name in allowed)
        }
        self.said = {sent: tool for sent, tool in self.said.items() if sent in kept}
        return mode


# --- the way ----------------------------------------------------------------------------------------------------------


class ResponsesWay:
    """`/v1/responses` by way of `/v1/chat/completions`.

    >>> ResponsesWay().there(b'{"model":"m","input":"hi","max_output_tokens":9}').body
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9}'
    """

    rows = ROWS

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: tells when an answer was made."""
        self._clock = clock

    def there(self, body: bytes) -> Sent:
        """The request as chat completions have it. Raises BadRequest, NotSupported."""
        taken = Taken(TABLE)
        found = read_object(body, "")
        _check_stored(found)
        fields = taken.fields(found, "", "")
        model = words(required(fields, "model", ""), "model")
        instructions = read_text(fields["instructions"], "instructions") if "instructions" in fields else ""
        messages = InputItems(taken, instructions).take(required(fields, "input", ""))
        sent: dict[str, object] = {"model": model, "messages": messages}
        sent.update((name, fields[name]) for name in _SAME if name in fields)
        if "max_output_tokens" in fields:
            if read_number(fields["max_output_tokens"], "max_output_tokens") < 1:
                raise BadRequest("max_output_tokens: Input should be greater than or equal to 1")
            sent["max_tokens"] = fields["max_output_tokens"]
        if "stream" in fields and read_flag(fields["stream"], "stream"):
            sent["stream_options"] = {"include_usage": True}
        if "stream_options" in fields:
            taken.fields(read_object(fields["stream_options"], "stream_options"), "stream_options", "stream_options")
        tools = _add_tools(taken, fields, sent)
        has_summary = _add_reasoning(taken, fields, sent)
        _add_text(taken, fields, sent)
        logprobs = _add_logprobs(taken, fields, sent)
        _check_words(taken, fields)
        kept = ResponsesKept(
            model=read_text(model, "model"), echo=_echo(found), calls=tools, summary=has_summary, logprobs=logprobs
        )
        return Sent(TARGET, _encode(sent), tuple(taken.dropped), _encode(kept))

    def back(self, kept: bytes, *, stream: bool, request_id: str = "") -> WayBack:
        return ResponseBack(
            msgspec.json.decode(kept, type=ResponsesKept), stream=stream, request_id=request_id, clock=self._clock
        )


def _check_stored(found: Fields) -> None:
    """An answer that is stored nowhere is a fault of the request's, not of the dialects'. Raises BadRequest."""
    name = "previous_response_id"
    if bytes(found.get(name, _NULL)) not in (_NULL, b'""'):
        raise BadRequest(f"{name} is not taken: {ROWS[name].why}")


def _add_tools(taken: Taken, fields: Fields, sent: dict[str, object]) -> dict[str, Called]:
    """A choice without tools is none to OpenAI's servers: one that demands a tool is refused, another means nothing."""
    tools = FunctionTools(taken)
    if "tools" in fields:
        tools.take(fields["tools"])
    choice = tools.choose(fields["tool_choice"]) if "tool_choice" in fields else "auto"
    if tools.said:
        sent["tools"] = list(tools.said.values())
        if "tool_choice" in fields:
            sent["tool_choice"] = choice
        if "parallel_tool_calls" in fields:
            sent["parallel_tool_calls"] = read_flag(fields["parallel_tool_calls"], "parallel_tool_calls")
    elif choice not in ("auto", "none"):
        raise BadRequest("tool_choice: there are no tools to choose from")
    return tools.calls


def _add_reasoning(taken: Taken, fields: Fields, sent: dict[str, object]) -> bool:
    """Whether the thinking is told as a summary."""
    at = "reasoning"
    given = taken.fields(read_object(fields[at], at), at, at) if at in fields else {}
    if "effort" in given:
        sent["reasoning_effort"] = words(given["effort"], f"{at}.effort")
    asked = [read_text(given[name], f"{at}.{name}") for name in ("summary", "generate_summary") if name in given]
    return any(word != "none" for word in asked)


def _add_text(taken: Taken, fields: Fields, sent: dict[str, object]) -> None:
    at = "text"
    given = taken.fields(read_object(fields[at], at), at, at) if at in fields else {}
    if "verbosity" in given:
        sent["verbosity"] = words(given["verbosity"], f"{at}.verbosity")
    if "format" not in given:
        return
    at = "text.format"
    found = read_object(given["format"], at)
    kind = taken.kind(found, at, at)
    inner = taken.fields(found, f"{at}[{kind}]", at)
    if kind == "json_object":
        sent["response_format"] = {"type": kind}
    elif kind == "json_schema":
        required(inner, "schema", at)
        sent["response_format"] = {"type": kind, kind: {"name": Raw(b'"output"'), **inner}}


def _add_logprobs(taken: Taken, fields: Fields, sent: dict[str, object]) -> bool:
    """Whether the answer tells how likely each token was."""
    included = (
        [read_text(raw, "include") for raw in read_list(fields["include"], "include")] if "include" in fields else []
    )
    for name in included:
        row = ROWS.get(f"include[{name}]")
        if row is None:
            raise NotSupported(f"include: there is no way to say `{shown(name)}` in a chat completion")
        if row.fate is FieldFate.HARMLESS:
            taken.dropped[f"include[{name}]"] = None
    most = read_number(fields["top_logprobs"], "top_logprobs") if "top_logprobs" in fields else 0
    if not most and "message.output_text.logprobs" not in included:
        return False
    sent["logprobs"] = True
    if most:
        sent["top_logprobs"] = fields["top_logprobs"]
    return True


def _check_words(taken: Taken, fields: Fields) -> None:
    if "truncation" in fields:
        word = read_text(fields["truncation"], "truncation")
        if word not in ("auto", "disabled"):
            raise BadRequest("truncation: Input should be 'auto' or 'disabled'")
        if word == "auto":
            taken.dropped["truncation[auto]"] = None
    if "metadata" in fields:
        read_object(fields["metadata"], "metadata")
    if "store" in fields:
        read_flag(fields["store"], "store")


def _echo(found: Fields) -> dict[str, Raw]:
    echo = {}
    for name, absent in _ECHOED.items():
        given = found.get(name)
        echo[name] = Raw(absent) if given is None or bytes(given) == _NULL else given
    return echo


# --- what was stored --------------------------------------------------------------------------------------------------


class StorageAsked(msgspec.Struct, frozen=True):
    """The storage that a body asks for. `previous`: the id of the answer it goes on from, empty for none. `store`:
    whether its own answer is to be kept. `items`: its own input, a JSON array. `may_refer`: whether there may be
    references among them. `rest`: all else of the body, an object; empty where it names nothing that is stored and asks
    for nothing in the background."""

    previous: str
    store: bool
    items: bytes
    may_refer: bool = False
    rest: bytes = b""
    background: BackgroundAsked | None = None


def asks_to_store(body: bytes) -> StorageAsked:
    """Raises BadRequest.

    >>> asks_to_store(b'{"input":"hi"}').items
    b'[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}]'
    >>> asks_to_store(b'{"store":false,"previous_response_id":"resp_1","input":[],"top_p":1e0}')
    StorageAsked(previous='resp_1', store=False, items=b'[]', may_refer=False, rest=b'{"store":false,"top_p":1e0}', \
background=None)
    >>> asks_to_store(b'{"input":[],"background":true,"top_p":1}').rest
    b'{"top_p":1}'
    """
    found = read_object(body, "")
    named, store = found.pop("previous_response_id", Raw(_NULL)), found.get("store", Raw(_NULL))
    previous = "" if bytes(named) == _NULL else read_text(named, "previous_response_id")
    items = _items(required(found, "input", ""))
    del found["input"]
    may_refer = b"item_reference" in items
    is_stored = bytes(store) == _NULL or read_flag(store, "store")
    background = background_of(found.pop("background")) if "background" in found else None
    if background is not None and not is_stored:
        raise BadRequest("background: what is made in the background has to be stored; leave `store` out")
    rest = _encode(found) if previous or may_refer or background is not None else b""
    return StorageAsked(previous, is_stored, items, may_refer, rest, background)


def _items(given: Raw) -> bytes:
    if memoryview(given)[0] == _BRACKET:
        return bytes(given)
    part = {"type": "input_text", "text": words(given, "input")}
    return _encode([{"type": "message", "role": "user", "content": [part]}])


def with_items(rest: bytes, arrays: Sequence[bytes]) -> list[bytes]:
    """`StorageAsked.rest` with the items of these JSON arrays as its input, in pieces: they may be megabytes.

    >>> with_items(b'{"n":1e2}', [b'[{"role":"user","content":"a"}]', b"[ ]", b"[1]"])
    [b'{"input":[', b'{"role":"user","content":"a"}', b',', b'1', b'],', b'"n":1e2}']
    """
    pieces = [b'{"input":[']
    for array in arrays:
        inside = array[array.index(b"[") + 1 : array.rindex(b"]")]
        if not inside or inside.isspace():
            continue
        pieces += [inside] if len(pieces) == 1 else [b",", inside]
    return [*pieces, b"]}"] if rest == b"{}" else [*pieces, b"],", rest[1:]]


def as_stored(kept: bytes, *, previous: str, store: bool, background: BackgroundAsked | None = None) -> bytes:
    """`Sent.kept`, which the way back knows, for an answer that says whether it is stored, which one it goes on from,
    and whether it is made in the background."""
    found = msgspec.json.decode(kept, type=ResponsesKept)
    if background is not None:
        echo = {**found.echo, "background": Raw(b"true")}
        found = msgspec.structs.replace(found, echo=echo, created_at=background.created_at)
    return _encode(msgspec.structs.replace(found, store=store, previous=previous))


WAYS: dict[str, TranslatedEndpoint] = {"/v1/responses": ResponsesWay()}
