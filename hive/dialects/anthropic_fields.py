"""Every field of Anthropic's Messages, what becomes of it, and how a request is taken apart by that. Sans I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from hive.dialects.translation import Fate, Row
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
T = TypeVar("T")
Fields = dict[str, Raw]


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
_ALL_TOOLS = "all tools are shown to the model from the beginning, so none has to be searched for"
_FILES = "there is no store of files here; send the content itself"
_FETCHED = "nothing is fetched from here; send the content itself"
_CACHED = (
    *("content[text]", "content[image]", "content[document]", "content[search_result]"),
    *("content[tool_use]", "content[tool_result]", "content[tool_reference]"),
)
_CLEARING = "context_management.edits[clear_tool_uses_20250919]"
_OF_CLEARING = {
    "trigger": ("input_tokens", "tool_uses"),
    "keep": ("tool_uses",),
    "clear_at_least": ("input_tokens",),
    "exclude_tools": (),
    "clear_tool_inputs": (),
}
"""Its fields, by name, with the types that each may be of."""
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
    **_to("messages", *(f"{_CLEARING}.{name}" for name in _OF_CLEARING)),
    **_to("messages", *(f"{_CLEARING}.{name}[{of}].value" for name, kinds in _OF_CLEARING.items() for of in kinds)),
    **_aside(
        "chat templates leave earlier thinking out themselves", "context_management.edits[clear_thinking_20251015]"
    ),
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
    **_aside(_ALL_TOOLS, "tools[custom].defer_loading", *_kinds("tools", "tool_search_tool_bm25")),
    **_aside(_ALL_TOOLS, *_kinds("tools", "tool_search_tool_regex", "tool_search_tool_bm25_20251119")),
    **_aside(_ALL_TOOLS, *_kinds("tools", "tool_search_tool_regex_20251119")),
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
    **_no(_AT_ANTHROPIC, *_kinds("tools", "web_fetch_20260318")),
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
    **_to("messages.content.text", *(f"content[search_result].{of}" for of in ("title", "source", "content"))),
    **_no("no server here tells from where it has a sentence", "content[search_result].citations"),
    **_no("only Anthropic can read it", "content[compaction]"),
    **_no("only Anthropic's servers change the model within an answer", "content[fallback]"),
    **_no(_AT_ANTHROPIC, *_kinds("content", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "code_execution_tool_result", "bash_code_execution_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "text_editor_code_execution_tool_result", "tool_search_tool_result")),
    **_no(_AT_ANTHROPIC, *_kinds("content", "tool_addition", "tool_removal", "advisor_tool_result")),
    **_to("messages.content.text", "content[tool_reference].tool_name"),
    **_no(_AT_ANTHROPIC, *_kinds("content", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing")),
}
"""By the field's name, with dots into objects; in brackets the `type` of an object that may be of several."""

_IDLE = {
    "messages.clear_at": b'"never"',
    "tools[custom].allowed_callers": b'["direct"]',
    "content[image].transformations": b'{"oversized_image":"downsize"}',
    "content[document].citations": b'{"enabled":false}',
    "content[search_result].citations": b'{"enabled":false}',
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

    __slots__ = ("dropped", "is_earlier")

    def __init__(self) -> None:
        self.dropped: dict[str, None] = {}
        """By the name of the row, in the order of the body; each once."""
        self.is_earlier = False
        """Whether a message of an earlier turn is taken apart: what its blocks ask beside is left out, not refused."""

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
                raise NotSupported(f"there is no way to say the field `{shown(name)}` in OpenAI's dialect")
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
            raise NotSupported(f"{at}: there is no way to say `{shown(kind)}` in OpenAI's dialect")
        if row is not None and row.fate is Fate.REFUSED:
            raise NotSupported(f"{at}: `{shown(kind)}` is not taken: {row.why}")
        if row is not None and row.fate is Fate.HARMLESS:
            self.dropped[f"{where}[{kind}]"] = None
            return ""
        return kind

    def _leave(self, name: str, row: Row | None, value: Raw, at: str) -> None:
        written = msgspec.json.format(bytes(value), indent=-1)
        if written in _EMPTY or written == _IDLE.get(name):
            return
        if row is not None and row.fate is Fate.REFUSED and not (self.is_earlier and name.startswith("content[")):
            raise NotSupported(f"{shown(at)} is not taken: {row.why}")
        self.dropped[shown(name)] = None


def can_be_said(where: str, found: Fields) -> bool:
    """Whether an object of this `type` has a way; also where it has none, which is told elsewhere.

    >>> can_be_said("content", {"type": Raw(b'"text"')}), can_be_said("content", {"type": Raw(b'"server_tool_use"')})
    (True, False)
    """
    raw = found.get("type", _NULL)
    if memoryview(raw)[0] != _QUOTE:
        return True
    name = f"{where}[{read_text(raw, 'type')}]"
    row = ROWS.get(name)
    return row.fate is not Fate.REFUSED if row is not None else name in _INSIDE


def shown(name: str) -> str:
    """A client's name as a header field or a message may carry it.

    >>> shown("a\\r\\nX-Evil: 1"), shown("content[text].cache_control")
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
