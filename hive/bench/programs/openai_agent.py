"""An agent with the package `openai`: a turn is two streamed calls, a tool in between."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Tuple

import openai
import serving

http = openai.DefaultHttpxClient()
"""With its TLS context, which agents of one ready state share; it has no connection yet."""
client: Any = None


def connect(stand_in: Any) -> None:
    """Makes the client, with the environment of now."""
    global client
    url, key = os.environ.get("OPENAI_BASE_URL", "http://stub.invalid/v1"), os.environ.get("OPENAI_API_KEY", "none")
    client = openai.OpenAI(base_url=url, api_key=key, http_client=stand_in or http)


def ask(messages: serving.Messages) -> Tuple[str, Dict[int, Dict[str, str]]]:
    """(text, tool calls by their number) of one streamed answer."""
    text, calls = [], {}  # type: ignore[var-annotated]
    stream: Any = client.chat.completions.create(
        model=os.environ.get("HIVE_MODEL") or "stub", messages=messages, tools=[serving.TOOL], stream=True, timeout=300
    )
    for chunk in stream:
        for choice in chunk.choices:
            text.append(choice.delta.content or "")
            for call in choice.delta.tool_calls or ():
                found = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                found["arguments"] += call.function.arguments or ""
    return "".join(text), calls


def turn(messages: serving.Messages) -> str:
    text, calls = ask(messages)
    if not calls:
        raise RuntimeError("the model called no tool")
    asked = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls.values()
    ]
    messages = [*messages, {"role": "assistant", "content": text or None, "tool_calls": asked}]
    for call in calls.values():
        result = serving.look_up(**json.loads(call["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ask(messages)[0]


if __name__ == "__main__":
    serving.serve(turn, connect, openai)
