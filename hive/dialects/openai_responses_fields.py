"""Every field of OpenAI's Responses, and its fate in the translation. Pure."""

from __future__ import annotations

from hive.dialects.taking import FieldRows, aside, kinds, no, to
from hive.dialects.translation import FieldFate, FieldRow

_AT_OPENAI = "this runs on OpenAI's servers, and nothing leaves this box; give a function of your own instead"
_OF_OPENAI = "only OpenAI's models know this tool's schema; give a function of your own with name and parameters"
_NOT_KEPT = "no conversations are kept under a name here; send all items"
_FETCHED = "nothing is fetched from here; send the content itself"
_FILES = "there is no store of files here; send the content itself"
_CACHE = "servers cache every beginning of a prompt by themselves"
_USER = "no server needs to know the client's user"
_RAN = "only OpenAI's servers ran it; what came of it stands in the answer after it"
_ALL_TOOLS = "all tools are shown to the model from the beginning, so none has to be searched for"
_CALLER = "every tool here is called by the model itself"
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "parallel_tool_calls")
_SCHEMA = "response_format.json_schema"
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)
_PARTS = ("input_text", "input_image", "input_file", "output_text", "refusal")

ROWS: dict[str, FieldRow] = {
    **{name: FieldRow(FieldFate.MAPPED, to=name) for name in _SAME},
    **to("messages", "input", "instructions"),
    **to("max_tokens", "max_output_tokens"),
    **to("tools", "tools"),
    **to("tool_choice", "tool_choice"),
    **to("reasoning_effort", "reasoning", "reasoning.effort"),
    **to("response_format", "text", "text.format"),
    **to("verbosity", "text.verbosity"),
    **to("logprobs, top_logprobs", "top_logprobs"),
    **to("logprobs", "include", "include[message.output_text.logprobs]"),
    **to("stream_options", "stream_options"),
    **to("", "metadata", "store", "truncation", "truncation[disabled]"),
    **to("", "reasoning.summary", "reasoning.generate_summary"),
    **aside("the thinking itself stands in the answer, and is taken back", "include[reasoning.encrypted_content]"),
    **aside("there is nothing of the kind in an answer", "include[file_search_call.results]"),
    **aside("there is nothing of the kind in an answer", "include[web_search_call.results]"),
    **aside("there is nothing of the kind in an answer", "include[web_search_call.action.sources]"),
    **aside("there is nothing of the kind in an answer", "include[message.input_image.image_url]"),
    **aside("there is nothing of the kind in an answer", "include[computer_call_output.output.image_url]"),
    **aside("there is nothing of the kind in an answer", "include[code_interpreter_call.outputs]"),
    **aside("a prompt that is too long is refused by the backend, never cut", "truncation[auto]"),
    **aside("it counts OpenAI's own tools, of which there are none", "max_tool_calls"),
    **aside("which piece is how long is not hidden", "stream_options.include_obfuscation"),
    **aside("chat templates leave earlier thinking out themselves", "reasoning.context"),
    **aside("there is one way of thinking", "reasoning.mode"),
    **aside(_USER, "user", "safety_identifier", "client_metadata"),
    **aside(_CACHE, "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    **aside("requests are ordered by Hive's tiers", "service_tier"),
    **aside("it concerns access to OpenAI's own models", "access_programs"),
    **aside("how an image is packed is the server's to say", "image"),
    **aside(
        "Hive's own to say",
        "keep_alive",
        "request_id",
        "priority",
        "cache_salt",
        "session_id",
        "id_slot",
        "cache_prompt",
    ),
    **no("nothing can be kept: `proxy.responses_kept_mb` in hive.conf is 0; ask for a stream", "background"),
    **no("it is stored nowhere: `proxy.responses_kept_mb` in hive.conf is 0; send all items", "previous_response_id"),
    **no(_NOT_KEPT, "conversation"),
    **no("prompts are kept on OpenAI's servers only; send its text", "prompt"),
    **no("no server here judges what is said", "moderation"),
    **no("the server does not summarize a conversation", "context_management"),
    **no("this is no field of Responses", "lora", "chat_template", "template", "mm_processor_kwargs"),
    **no("this is no field of Responses", "media_io_kwargs", "prompt_embeds", "kv_transfer_params"),
    **no("this is no field of Responses", "ec_transfer_params", "vllm_xargs", "_debug_render_only"),
    # the format of the answer, by its type
    **to("", "text.format[text]"),
    **to("response_format", "text.format[json_object]"),
    **to(f"{_SCHEMA}.name", "text.format[json_schema].name"),
    **to(f"{_SCHEMA}.description", "text.format[json_schema].description"),
    **to(f"{_SCHEMA}.schema", "text.format[json_schema].schema"),
    **to(f"{_SCHEMA}.strict", "text.format[json_schema].strict"),
    **no("a grammar in words of its own is not taken; use a schema", *kinds("text.format", "grammar", "python")),
    # tools, and which of them
    **to("tools.function.name", "tools[function].name", "tools[custom].name"),
    **to("tools.function.description", "tools[function].description", "tools[custom].description"),
    **to("tools.function.parameters", "tools[function].parameters"),
    **to("tools.function.strict", "tools[function].strict"),
    **to("tools.function.parameters", "tools[custom].format", "tools[custom].format[text]"),
    **to("tools.function.parameters.properties.input.pattern", "tools[custom].format[grammar].syntax[regex]"),
    **to("tools.function.description", "tools[custom].format[grammar].syntax[lark]"),
    **to("tools.function.description", "tools[custom].format[grammar].syntax"),
    **to("tools.function.description", "tools[custom].format[grammar].definition"),
    **to("tools.function.name", "tools[namespace].name"),
    **to("tools.function.description", "tools[namespace].description"),
    **to("tools", "tools[namespace].tools"),
    **aside(_ALL_TOOLS, "tools[function].defer_loading", "tools[custom].defer_loading", *kinds("tools", "tool_search")),
    **aside("no server here checks the result of a tool", "tools[function].output_schema"),
    **aside("what is called is waited for", "tools[function].async", "tools[custom].async"),
    **no(_CALLER, "tools[function].allowed_callers", "tools[custom].allowed_callers"),
    **aside("Codex gives it with every request, and nothing leaves this box", "tools[web_search].external_web_access"),
    **no(
        _AT_OPENAI, *kinds("tools", "web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "mcp")
    ),
    **no(_AT_OPENAI, *kinds("tools", "web_search_preview_2025_03_11", "code_interpreter", "image_generation")),
    **no(_AT_OPENAI, *kinds("tools", "programmatic_tool_calling")),
    **no(_OF_OPENAI, *kinds("tools", "computer", "computer_use_preview", "computer_use", "shell", "apply_patch")),
    **no(_OF_OPENAI, *kinds("tools", "local_shell")),
    **to("tool_choice.function.name", "tool_choice[function].name", "tool_choice[custom].name"),
    **to("tool_choice", "tool_choice[allowed_tools].mode"),
    **to("tools", "tool_choice[allowed_tools].tools"),
    **no(_AT_OPENAI, *kinds("tool_choice", "web_search_preview", "web_search", "file_search", "mcp")),
    **no(_AT_OPENAI, *kinds("tool_choice", "web_search_preview_2025_03_11", "code_interpreter", "image_generation")),
    **no(_AT_OPENAI, *kinds("tool_choice", "programmatic_tool_calling")),
    **no(_OF_OPENAI, *kinds("tool_choice", "computer", "computer_use_preview", "computer_use", "shell", "apply_patch")),
    # items of the input
    **to("messages.role", "input[message].role"),
    **to("messages.content", "input[message].content"),
    **to("", *(f"input[{of}].{name}" for of in _ITEMS for name in ("id", "status")), "input[message].phase"),
    **to("messages.reasoning_content", "input[reasoning].content", "input[reasoning].summary"),
    **aside("only OpenAI can read it", "input[reasoning].encrypted_content"),
    **to("messages.tool_calls.id", "input[function_call].call_id", "input[custom_tool_call].call_id"),
    **to("messages.tool_calls.function.name", "input[function_call].name", "input[custom_tool_call].name"),
    **to("messages.tool_calls.function.name", "input[function_call].namespace", "input[custom_tool_call].namespace"),
    **to("messages.tool_calls.function.arguments", "input[function_call].arguments", "input[custom_tool_call].input"),
    **to("messages.tool_call_id", "input[function_call_output].call_id", "input[custom_tool_call_output].call_id"),
    **to("messages.content", "input[function_call_output].output", "input[custom_tool_call_output].output"),
    **aside("the id of the call says it", "input[function_call_output].name", "input[custom_tool_call_output].name"),
    **aside("the id of the call says it", "input[function_call_output].namespace"),
    **aside("the id of the call says it", "input[custom_tool_call_output].namespace"),
    **aside(_CALLER, *(f"input[{of}].caller" for of in ("function_call", "function_call_output"))),
    **aside(_CALLER, *(f"input[{of}].caller" for of in ("custom_tool_call", "custom_tool_call_output"))),
    **aside("what is called is waited for", "input[function_call].async", "input[custom_tool_call].async"),
    **no(
        "no item is stored: `proxy.responses_kept_mb` in hive.conf is 0; send the item itself", "input[item_reference]"
    ),
    **aside(_RAN, *kinds("input", "web_search_call", "file_search_call", "code_interpreter_call")),
    **aside(_RAN, *kinds("input", "image_generation_call", "mcp_list_tools", "mcp_call", "program", "program_output")),
    **aside(_ALL_TOOLS, *kinds("input", "tool_search_call", "tool_search_output", "additional_tools")),
    **aside("what it changes is said in the request", *kinds("input", "configuration_update")),
    **no(_AT_OPENAI, *kinds("input", "mcp_approval_request", "mcp_approval_response")),
    **no(_OF_OPENAI, *kinds("input", "computer_call", "computer_call_output", "local_shell_call")),
    **no(_OF_OPENAI, *kinds("input", "local_shell_call_output", "shell_call", "shell_call_output")),
    **no(_OF_OPENAI, *kinds("input", "apply_patch_call", "apply_patch_call_output")),
    **no("only OpenAI can read it", *kinds("input", "compaction", "compaction_trigger", "context_compaction")),
    # parts of content, wherever they stand
    **to("messages.content.text", *(f"content[{of}].text" for of in ("input_text", "output_text", "summary_text"))),
    **to("messages.content.text", "content[reasoning_text].text", "content[text].text", "content[refusal].refusal"),
    **to("messages.content.image_url.url", "content[input_image].image_url"),
    **to("messages.content.image_url.detail", "content[input_image].detail"),
    **no(_FILES, "content[input_image].file_id", "content[input_file].file_id"),
    **no("servers here read no files; send its text", "content[input_file].file_data"),
    **no(_FETCHED, "content[input_file].file_url"),
    **aside("the text says it", "content[input_file].filename", "content[input_file].detail"),
    **aside("no server here names its sources", "content[output_text].annotations"),
    **aside("what was likely is no part of a conversation", "content[output_text].logprobs"),
    **aside(_CACHE, *(f"content[{of}].prompt_cache_breakpoint" for of in _PARTS)),
}
"""Rows by the field's name, with dots into objects; in brackets the `type` of an object that may be of several, or the
value of a text that may be one of several."""

_IDLE = {
    "tools[function].allowed_callers": b'["direct"]',
    "tools[custom].allowed_callers": b'["direct"]',
    "input[function_call].caller": b'{"type":"direct"}',
    "input[function_call_output].caller": b'{"type":"direct"}',
    "input[custom_tool_call].caller": b'{"type":"direct"}',
    "input[custom_tool_call_output].caller": b'{"type":"direct"}',
    "reasoning.mode": b'"standard"',
    "reasoning.context": b'"auto"',
    "service_tier": b'"auto"',
}
"""Values that ask for nothing, beside those that are empty."""
TABLE = FieldRows(ROWS, _IDLE, history="content[", dialect="a chat completion")
