"""Recipes that warm a template: one call of each kind against a transport inside the process, nothing leaves it.

After it the modules that a package imports late are there, and its models of answers are built: a child need not.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

URL = "http://template.invalid/v1"
KEY = "not-a-key"


def find(name: str) -> Callable[[], Any]:
    """A recipe by its name, or the function that `module:function` names. Raises what an import raises, LookupError."""
    if name in RECIPES:
        return RECIPES[name]
    module, _, function = name.partition(":")
    if not function:
        raise LookupError(f"no such recipe: the recipes are {', '.join(RECIPES)}; a function is named module:function")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _http_of(package: str) -> Any:
    """The HTTP package that this client package uses: `httpx`, in newer ones `httpx2`."""
    client = importlib.import_module(f"{package}._base_client")
    return getattr(client, "httpx2", None) or client.httpx


def _http(http: Any, answer: Callable[[Any, Any], Any]) -> Any:
    return http.Client(transport=http.MockTransport(lambda request: answer(http, request)))


def _openai_answer(http: Any, request: Any) -> Any:
    asked = json.loads(request.content)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    has_result = any(message.get("role") == "tool" for message in asked.get("messages", ()))
    message: dict[str, Any] = {"role": "assistant", "content": "ok"}
    if asked.get("tools") and not has_result:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reason = "tool_calls" if "tool_calls" in message else "stop"
    head = {"id": "x", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return http.Response(200, json={**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **call}]
    first = {"index": 0, "delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": reason}
    chunks = [{**head, "object": "chat.completion.chunk", "choices": [each]} for each in (first, last)]
    chunks.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return _events(http, [(None, chunk) for chunk in chunks], end="data: [DONE]\n\n")


def _events(http: Any, events: list[tuple[str | None, dict[str, Any]]], *, end: str = "") -> Any:
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(content)}\n\n" for name, content in events]
    content = ("".join(lines) + end).encode()
    return http.Response(200, headers={"content-type": "text/event-stream"}, content=content)


_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def openai() -> None:
    """Chat completions of the `openai` package: an answer, a stream, each with a tool and its result.

    Before that a client of either kind that calls nobody: it imports what a stand-in has no need of.
    """
    package: Any = importlib.import_module("openai")
    package.OpenAI(api_key=KEY, base_url=URL).close()
    package.AsyncOpenAI(api_key=KEY, base_url=URL)
    asked = {"role": "user", "content": "1 + 2?"}
    http = _http(_http_of("openai"), _openai_answer)
    with package.OpenAI(api_key=KEY, base_url=URL, max_retries=0, http_client=http) as client:
        for stream in (False, True):
            first = client.chat.completions.create(model="m", messages=[asked], tools=[_TOOL], stream=stream)
            for chunk in first if stream else ():
                chunk.model_dump()
            called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
            result = {"role": "tool", "tool_call_id": "c", "content": "3"}
            second = client.chat.completions.create(model="m", messages=[asked, called, result], stream=stream)
            for chunk in second if stream else ():
                chunk.model_dump()
            if not stream:
                first.model_dump_json()


def anthropic() -> None:
    """Messages of the `anthropic` package: an answer and a stream."""
    package: Any = importlib.import_module("anthropic")
    usage = {"input_tokens": 1, "output_tokens": 1}
    head = {"id": "x", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}

    def answer(http: Any, request: Any) -> Any:
        text = {"type": "text", "text": "ok"}
        if not json.loads(request.content).get("stream"):
            return http.Response(200, json={**head, "content": [text], "stop_reason": "end_turn", "usage": usage})
        begun: dict[str, Any] = {**head, "content": [], "stop_reason": None, "usage": usage}
        empty = {"type": "text", "text": ""}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": empty},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ok"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ]
        return _events(http, [(event["type"], event) for event in events])

    package.Anthropic(api_key=KEY, base_url=URL).close()
    package.AsyncAnthropic(api_key=KEY, base_url=URL)
    asked = [{"role": "user", "content": "1 + 2?"}]
    http = _http(_http_of("anthropic"), answer)
    with package.Anthropic(api_key=KEY, base_url=URL, max_retries=0, http_client=http) as client:
        client.messages.create(model="m", max_tokens=8, messages=asked).model_dump_json()
        with client.messages.stream(model="m", max_tokens=8, messages=asked) as stream:
            stream.get_final_message().model_dump()


def langgraph() -> None:
    """A ReAct agent of `langgraph` with `langchain_openai`: a question, a tool, an answer."""
    tools: Any = importlib.import_module("langchain_core.tools")
    chat: Any = importlib.import_module("langchain_openai")
    prebuilt: Any = importlib.import_module("langgraph.prebuilt")

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    chat.ChatOpenAI(model="m", api_key=KEY, base_url=URL)  # calls nobody, but imports what it calls with
    with _http(_http_of("openai"), _openai_answer) as http:
        model = chat.ChatOpenAI(model="m", api_key=KEY, base_url=URL, max_retries=0, http_client=http)
        agent = prebuilt.create_react_agent(model, [tools.tool(add)])
        agent.invoke({"messages": [("user", "1 + 2?")]})


RECIPES: dict[str, Callable[[], Any]] = {"openai": openai, "anthropic": anthropic, "langgraph": langgraph}
