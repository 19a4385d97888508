"""The reasons why fields of a request are refused, and permitted fields in their place. Pure.

The rows that refuse stand in `fields.py`; for a field that an operator permits in hive.conf none of this is told.
"""

from __future__ import annotations

_COMPILED = (
    "the server would compile it unbounded, and a bad one could end it; `response_format` with a JSON schema holds an "
    "answer to a form within bounds"
)
_BELIEVED = "the server sets it from the model's template, and believes what it is told"
_TENSORS = "the server decodes it with what can run code, or takes memory as the client likes"
_ELSEWHERE = "it names hosts and tensors inside the server"
_RUNS = "a template of a client's runs in the server (CVE-2025-62426)"
_ADAPTER = "which adapter answers is an operator's to say; name its model"
_PROMPTS_OWN = "the probabilities of a whole prompt are computed past the prefix cache that all requests share"

REASONS: dict[str, str] = {
    "lora": _ADAPTER,
    "chat_template": _RUNS,
    "template": _RUNS,
    "chat_template_kwargs": "what it names can replace the template that the server runs (CVE-2025-62426); taken are "
    "enable_thinking, thinking, clear_thinking and reasoning_effort, as a switch",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"), _TENSORS),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), _ELSEWHERE),
    "_debug_render_only": "it shows the rendered prompt instead of an answer",
    "raw": "the prompt would go to the model as it is, outside its template",
    "prompt_logprobs": f"{_PROMPTS_OWN}; `logprobs` tells those of the answer",
    "echo": f"a server answers it with the prompt's own probabilities, and {_PROMPTS_OWN}",
    "use_beam_search": "each beam is a request of its own in the server, past Hive's queue",
    **dict.fromkeys(("structured_outputs", "structural_tag", "json_schema"), _COMPILED),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _COMPILED),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _COMPILED),
    **dict.fromkeys(("grammar", "grammar_lazy", "grammar_triggers", "grammar_type", "preserved_tokens"), _COMPILED),
    **dict.fromkeys(("chat_format", "chat_parser", "generation_prompt"), _BELIEVED),
    **dict.fromkeys(("message_delimiters", "parse_tool_calls"), _BELIEVED),
    "texts": "an answer in that form does not say what it cost; send the texts as `documents`",
    "mcp_servers": "the model's server would call it; nothing is fetched from here",
    "thread": "no conversation is kept here; send all of its messages",
}
"""Reasons by the field, without its inner fields."""
