"""Anthropic's Messages on a backend that speaks OpenAI's chat completions only: the requests. Sans I/O.

Made from anthropic 2.10.0 (every field its types can send has a row in ROWS, which a test walks) and from what
llama-server 0c1e570 and vLLM 0.33 do with Messages themselves, so that a prompt is the same with Hive's translation.

There is no way for `/v1/messages/count_tokens`: OpenAI's dialect has no endpoint that counts the tokens of messages.
llama-server and vLLM count in Anthropic's dialect themselves; for any other backend Hive estimates (token_estimate.py).

Decided here, where the dialects leave it open:
- Thinking that comes back in `messages` goes on as `reasoning_content`. `thinking`: `disabled` is the effort `none`,
  and `output_config.effort`, of which clients have a default, does not turn it on again; a budget has vLLM's and
  llama-server's names at once, each of which the other passes over, and `adaptive` says nothing.
- What no server here can read (a PDF, the result of a web search) is refused in the last turn; in earlier ones, where
  it stays for good, a line stands in its place (anthropic_history.py).
- Blocks of `system` are joined as they stand, those of a tool's result with a line end. Images in a tool's result go
  into the user's message right behind it: OpenAI's tool messages take text only. `is_error` becomes the word
  "Error: " before the result.
- Results of tools that `context_management` has cleared are cleared here (anthropic_editing.py).
- An answer that the client has begun itself (a last message of the assistant's) is gone on with, by the two fields that
  vLLM and llama-server have for it. llama-server repeats what was begun, but not in streams of chat completions.
- A field in no row is refused; of an object within, it is left out and told, like what is harmless.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hive.dialects.anthropic_editing import AppliedEdit, edited, read_edits
from hive.dialects.anthropic_fields import ROWS, TABLE
from hive.dialects.anthropic_messages import Messages
from hive.dialects.anthropic_openai_answers import AnthropicAnswer, AnthropicKept
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
    words,
)
from hive.dialects.translation import Sent, TranslatedEndpoint, WayBack
from hive.errors import BadRequest

Raw = msgspec.Raw
TARGET = "/v1/chat/completions"
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_ASSISTANT = Raw(b'"assistant"')
_encode = msgspec.json.Encoder().encode


# --- tools, thinking, format ------------------------------------------------------------------------------------------

_CHOICES: dict[str, object] = {"auto": "auto", "any": "required", "none": "none"}


def _tools(taken: Taken, raw: Raw) -> list[object]:
    tools: list[object] = []
    for number, found in enumerate(read_objects(raw, "tools")):
        at = f"tools.{number}"
        if not taken.kind(found, "tools", at, default="custom"):
            continue
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
        taken = Taken(TABLE)
        fields = taken.fields(read_object(body, ""), "", "")
        model = words(required(fields, "model", ""), "model")
        conversation, edits = _conversation(taken, fields)
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
        kept = {"model": model, "stop": [read_text(raw, "stop_sequences") for raw in stops], "hidden": hidden}
        if edits is not None:
            kept["edits"] = edits
        return Sent(TARGET, _encode(sent), tuple(taken.dropped), _encode(kept))

    def back(self, kept: bytes, *, stream: bool, request_id: str = "") -> WayBack:
        return AnthropicAnswer(msgspec.json.decode(kept, type=AnthropicKept), stream=stream, request_id=request_id)


def _conversation(taken: Taken, fields: Fields) -> tuple[list[dict[str, Any]], list[AppliedEdit] | None]:
    """OpenAI's messages, and the edits that were made before; None where none was asked for."""
    messages = Messages(taken)
    if "system" in fields:
        messages.system(fields["system"])
    given = read_objects(required(fields, "messages", ""), "messages")
    if not given:
        raise BadRequest("messages: at least one message is required")
    edits = read_edits(taken, fields["context_management"]) if "context_management" in fields else None
    applied: list[AppliedEdit] | None = None
    if edits is not None:
        given, applied = edited(fields, given, edits)
    last_turn = _last_turn(given)
    for number, found in enumerate(given):
        messages.message(found, f"messages.{number}", earlier=number < last_turn)
    return messages.said, applied


def _last_turn(given: list[Fields]) -> int:
    """The index at which the user's last turn begins; an answer that the client has begun belongs to it.

    >>> user, assistant = {"role": Raw(b'"user"')}, {"role": Raw(b'"assistant"')}
    >>> _last_turn([user, assistant, user, user]), _last_turn([user, assistant]), _last_turn([assistant])
    (2, 0, 0)
    """
    at = len(given)
    for is_answer in (True, False):
        while at and (given[at - 1].get("role") == _ASSISTANT) is is_answer:
            at -= 1
    return at


def _add_thinking_and_format(taken: Taken, fields: Fields, sent: dict[str, object]) -> bool:
    """Whether thoughts are to be left out of the answer."""
    hidden = False
    if "thinking" in fields:
        thinking, hidden = _thinking(taken, fields["thinking"])
        sent.update(thinking)
    if "output_config" in fields:
        given = _output_config(taken, fields["output_config"])
        if sent.get("reasoning_effort") == "none" and given.pop("reasoning_effort", None) is not None:
            taken.dropped["output_config.effort"] = None
        sent.update(given)
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


WAYS: dict[str, TranslatedEndpoint] = {"/v1/messages": MessagesWay()}
