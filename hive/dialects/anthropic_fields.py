"""Every field of Anthropic's Messages, and its fate in the translation. Pure."""

from __future__ import annotations

from hive.dialects.taking import FieldRows, Fields, aside, kinds, no, to
from hive.dialects.translation import FieldFate, FieldRow

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
"""The fields of a clearing edit, by name, with the types that each may have."""
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_SCHEMA = "response_format.json_schema.schema"

ROWS: dict[str, FieldRow] = {
    **{name: FieldRow(FieldFate.MAPPED, to=name) for name in _SAME},
    **to("messages", "messages", "messages.role", "messages.content", "system"),
    **no("a message that is shown for a time only cannot be said in OpenAI's dialect", "messages.clear_at"),
    **no("OpenAI's dialect has one effort for the whole request", "messages.output_config"),
    **to("stop", "stop_sequences"),
    **to("", "metadata"),
    **aside("no server needs to know the client's account", "metadata.user_id"),
    **to("tools", "tools"),
    **to("tool_choice", "tool_choice", "tool_choice[none]"),
    **to("reasoning_effort", "thinking", "output_config.effort"),
    **to("response_format", "output_config", "output_config.format", "output_format"),
    **to(_SCHEMA, "output_config.format[json_schema].schema", "output_format[json_schema].schema"),
    **no("no server here spreads a budget over several requests", "output_config.task_budget"),
    **aside("servers cache every beginning of a prompt by themselves", "cache_control", "tools[custom].cache_control"),
    **aside("servers cache every beginning of a prompt by themselves", *(f"{of}.cache_control" for of in _CACHED)),
    **aside("requests are ordered by Hive's tiers", "service_tier"),
    **aside("there is one speed", "speed"),
    **aside("it asks for words about Anthropic's prompt cache, not for another answer", "diagnostics"),
    **aside(
        "it concerns Anthropic's billing", "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"
    ),
    **aside("what they open has a row of its own", "betas"),
    **aside("which model is asked is Hive's to say", "fallbacks"),
    **aside("max_tokens says it", "n_predict"),
    **aside("Hive's own to say", "keep_alive", "request_id", "priority", "cache_salt", "session_id"),
    **aside("Hive's own to say", "id_slot", "cache_prompt"),
    **no("Hive cannot promise where another server computes", "inference_geo"),
    **to("messages", "context_management", "context_management.edits"),
    **aside(
        "chat templates leave earlier thinking out themselves", "context_management.edits[clear_thinking_20251015]"
    ),
    **to("messages", *(f"{_CLEARING}.{name}" for name in _OF_CLEARING)),
    **to("messages", *(f"{_CLEARING}.{name}[{of}].value" for name, of_it in _OF_CLEARING.items() for of in of_it)),
    **no("the server does not summarize a conversation", "context_management.edits[compact_20260112]", "compaction"),
    **no(_AT_ANTHROPIC, "container", "mcp_servers"),
    **no("the server keeps no conversations; send all messages", "thread"),
    **no("this is no field of Messages", "lora", "chat_template", "template", "mm_processor_kwargs"),
    **no("this is no field of Messages", "media_io_kwargs", "prompt_embeds", "kv_transfer_params"),
    **no("this is no field of Messages", "ec_transfer_params", "vllm_xargs", "_debug_render_only"),
    # thinking, by its type
    **to("thinking_token_budget, thinking_budget_tokens", "thinking[enabled].budget_tokens"),
    **to("reasoning_effort", "thinking[disabled]"),
    **to("", "thinking[enabled].display", "thinking[adaptive].display"),
    **aside("no signatures are checked", "thinking[enabled].block_binding", "thinking[adaptive].block_binding"),
    **no("no server here thinks between tools only", "thinking[between_tools]"),
    # tools, and which of them
    **to("parallel_tool_calls", *(f"tool_choice[{k}].disable_parallel_tool_use" for k in ("auto", "any", "tool"))),
    **to("tool_choice.function.name", "tool_choice[tool].name"),
    **to("tools.function.name", "tools[custom].name"),
    **to("tools.function.description", "tools[custom].description"),
    **to("tools.function.parameters", "tools[custom].input_schema"),
    **to("tools.function.parameters.examples", "tools[custom].input_examples"),
    **to("tools.function.strict", "tools[custom].strict"),
    **aside("arguments are streamed as they come", "tools[custom].eager_input_streaming"),
    **no(_AT_ANTHROPIC, "tools[custom].allowed_callers"),
    **aside(_ALL_TOOLS, "tools[custom].defer_loading", *kinds("tools", "tool_search_tool_bm25")),
    **aside(_ALL_TOOLS, *kinds("tools", "tool_search_tool_regex", "tool_search_tool_bm25_20251119")),
    **aside(_ALL_TOOLS, *kinds("tools", "tool_search_tool_regex_20251119")),
    **no(_OF_CLAUDE, *kinds("tools", "bash_20241022", "bash_20250124", "memory_20250818", "browser_toolset_20260801")),
    **no(_OF_CLAUDE, *kinds("tools", "computer_20241022", "computer_20250124", "computer_20251124")),
    **no(_OF_CLAUDE, *kinds("tools", "computer_toolset_20260801", "text_editor_20241022", "text_editor_20250124")),
    **no(_OF_CLAUDE, *kinds("tools", "text_editor_20250429", "text_editor_20250728")),
    **no(_AT_ANTHROPIC, *kinds("tools", "code_execution_20250522", "code_execution_20250825", "advisor_20260301")),
    **no(_AT_ANTHROPIC, *kinds("tools", "code_execution_20260120", "code_execution_20260521", "mcp_toolset")),
    **no(_AT_ANTHROPIC, *kinds("tools", "web_search_20250305", "web_search_20260209", "web_search_20260318")),
    **no(_AT_ANTHROPIC, *kinds("tools", "web_fetch_20250910", "web_fetch_20260209", "web_fetch_20260309")),
    **no(_AT_ANTHROPIC, *kinds("tools", "web_fetch_20260318")),
    # blocks of content, wherever they stand: messages, system, results, documents
    **to("messages.content.text", "content[text].text", "content[document].title", "content[document].context"),
    **to("messages.content.text", "content[document].source", "content[document].source[text].data"),
    **to("", "content[document].source[text].media_type"),
    **to("messages.content", "content[document].source[content].content"),
    **aside("the text stands as it is", "content[text].citations"),
    **to("messages.content.image_url.url", "content[image].source", "content[image].source[base64].data"),
    **to("messages.content.image_url.url", "content[image].source[base64].media_type"),
    **no("how large an image may be is the server's to say", "content[image].transformations"),
    **no("servers here read no PDF; send its text", "content[document].source[base64]"),
    **no(_FETCHED, "content[image].source[url]", "content[document].source[url]"),
    **no(_FILES, "content[image].source[file]", "content[document].source[file]", "content[container_upload]"),
    **no("no server here tells from where it has a sentence", "content[document].citations"),
    **to("messages.reasoning_content", "content[thinking].thinking"),
    **aside("no server here checks it", "content[thinking].signature"),
    **aside("only Anthropic can read it", "content[redacted_thinking]"),
    **to("messages.tool_calls.id", "content[tool_use].id"),
    **to("messages.tool_calls.function.name", "content[tool_use].name"),
    **to("messages.tool_calls.function.arguments", "content[tool_use].input"),
    **aside("every tool here is called by the model itself", "content[tool_use].caller"),
    **to("messages.tool_call_id", "content[tool_result].tool_use_id"),
    **to("messages.content", "content[tool_result].content", "content[tool_result].is_error"),
    **no(_OF_CLAUDE, "content[tool_use].toolset_name", "content[tool_result].toolset_name", "content[browser_state]"),
    **to("messages.content.text", *(f"content[search_result].{of}" for of in ("title", "source", "content"))),
    **no("no server here tells from where it has a sentence", "content[search_result].citations"),
    **no("only Anthropic can read it", "content[compaction]"),
    **no("only Anthropic's servers change the model within an answer", "content[fallback]"),
    **no(_AT_ANTHROPIC, *kinds("content", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result")),
    **no(_AT_ANTHROPIC, *kinds("content", "code_execution_tool_result", "bash_code_execution_tool_result")),
    **no(_AT_ANTHROPIC, *kinds("content", "text_editor_code_execution_tool_result", "tool_search_tool_result")),
    **no(_AT_ANTHROPIC, *kinds("content", "tool_addition", "tool_removal", "advisor_tool_result")),
    **to("messages.content.text", "content[tool_reference].tool_name"),
    **no(_AT_ANTHROPIC, *kinds("content", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing")),
}
"""Rows by the field's name, with dots into objects; in brackets the `type` of an object that may be of several."""

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

TABLE = FieldRows(ROWS, _IDLE, history="content[", dialect="OpenAI's dialect")


def can_be_said(where: str, found: Fields) -> bool:
    """Whether an object of this `type` has a way; also where it has none, which is told elsewhere.

    >>> from msgspec import Raw
    >>> can_be_said("content", {"type": Raw(b'"text"')}), can_be_said("content", {"type": Raw(b'"server_tool_use"')})
    (True, False)
    """
    return TABLE.can_say(where, found)
