"""The same question asked of a backend directly and through Hive, by real packages, and what may differ."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

HELLO: Any = [{"role": "user", "content": "Hello, how are you today?"}]
STEADY: Any = {"temperature": 0, "seed": 1}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "description": "A city.", "parameters": CITY}}]
ANTHROPIC_TOOLS: Any = [{"name": "look_up", "description": "A city.", "input_schema": CITY}]
AFTER_A_TOOL: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city":"Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "The capital of France."},
]
ANTHROPIC_AFTER_A_TOOL: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"city": "Paris"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "The capital."}]},
]
LONG: Any = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 100}]

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] %}{{ m['content'] }}{% endif %}{% if m['tool_calls'] %}{% for call in m['tool_calls'] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
"""Shows the model its tools. It has no prompt for the answer: llama-server 0c1e570 fails to put the tiny vocabulary's
pieces of one through a grammar."""

OF_THE_MOMENT = [
    (re.compile(rb'"(id|tool_use_id)":"[^"]*"'), rb'"\1":"-"'),
    (re.compile(rb'"created":\d+'), b'"created":0'),
    (re.compile(rb'"timings":\{[^}]*\}'), b'"timings":{}'),
    # What the prefix cache had of the same prompt is another number the second time.
    (re.compile(rb'"cached_tokens":\d+'), b'"cached_tokens":0'),
    (re.compile(rb'"created_cache_tokens":\d+'), b'"created_cache_tokens":0'),
    (re.compile(rb'"cache_(read|creation)_input_tokens":\d+'), rb'"cache_\1_input_tokens":0'),
    (re.compile(rb'"input_tokens":\d+,"output'), b'"input_tokens":0,"output'),
]
"""Fields in which two answers of one backend to equal questions differ, whoever asks."""


class Door(NamedTuple):
    """One way to a backend: its root URL, and the token it wants."""

    root: str
    token: str

    @contextlib.contextmanager
    def openai(self) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.root}/v1", api_key=self.token, max_retries=0, timeout=60) as client:
            yield client

    def openai_async(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.root}/v1", api_key=self.token, max_retries=0, timeout=60)

    @contextlib.contextmanager
    def anthropic(self) -> Iterator[anthropic.Anthropic]:
        with anthropic.Anthropic(base_url=self.root, api_key=self.token, max_retries=0, timeout=60) as client:
            yield client

    def anthropic_async(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.root, api_key=self.token, max_retries=0, timeout=60)

    def post(self, path: str, body: dict[str, Any], **fields: str) -> httpx.Response:
        """The bytes themselves, past every package."""
        head = {"authorization": f"Bearer {self.token}", **fields}
        return httpx.post(f"{self.root}{path}", json=body, headers=head, timeout=60, trust_env=False)


def door_of(hive: Any, agent: str) -> Door:
    access = hive.get(f"/api/agents/{agent}/tokens")
    return Door(access["openai_base_url"].removesuffix("/v1"), access["model"])


def steady(body: bytes) -> bytes:
    """An answer without what is of the moment."""
    for pattern, instead in OF_THE_MOMENT:
        body = pattern.sub(instead, body)
    return body


def events(stream: bytes) -> list[Any]:
    """The events of an SSE stream; `[DONE]` as it is."""
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


class Told(NamedTuple):
    """Text of a stream, however its pieces were cut: a busy vLLM puts several tokens into one event."""

    texts: dict[str, str]
    reasons: list[str]
    shapes: list[str]


def told(stream: bytes) -> Told:
    """`texts` by the name of the field they come in; `shapes`: what events there are, apart from them."""
    texts: dict[str, str] = {}
    reasons: list[str] = []
    pieces = [piece for event in events(steady(stream)) for piece in _cut_finely(event)]
    shapes = {json.dumps(_shape(piece, texts, reasons), sort_keys=True) for piece in pieces}
    return Told(texts, reasons, sorted(shapes))


def _cut_finely(event: Any) -> list[Any]:
    """A chunk of a chat as the chunks that vLLM makes of it when it has time: its end in one of its own, and the
    arguments of a call after its name. Which of these come in one piece depends on how many tokens are ready at once.
    """
    choices = event.get("choices") if isinstance(event, dict) else None
    if not choices or "delta" not in choices[0]:
        return [event]
    (choice,) = choices
    pieces = [choice]
    if choice["delta"] and choice["finish_reason"] is not None:
        before = {name: value for name, value in choice.items() if name != "stop_reason"}
        pieces = [before | {"finish_reason": None}, choice | {"delta": {}}]
    for call in pieces[0]["delta"].get("tool_calls") or []:
        if arguments := call["function"].get("arguments") if "name" in call["function"] else "":
            call["function"]["arguments"] = ""
            later = [{"index": call["index"], "function": {"arguments": arguments}}]
            pieces.insert(1, pieces[0] | {"delta": {"tool_calls": later}})
    return [event | {"choices": [piece]} for piece in pieces]


TEXTS = ("content", "text", "arguments", "partial_json")
REASONS = ("finish_reason", "stop_reason")
MOVES = "system_fingerprint"
"""vLLM has it in the last event: in that of the usage where this was asked for, which Hive takes out again."""


def _shape(value: Any, texts: dict[str, str], reasons: list[str]) -> Any:
    if isinstance(value, list):
        return [_shape(entry, texts, reasons) for entry in value]
    if not isinstance(value, dict):
        return value
    copy = {}
    for name, entry in value.items():
        if name in TEXTS and isinstance(entry, str):
            texts[name] = texts.get(name, "") + entry
            copy[name] = "…"
        elif name in REASONS and isinstance(entry, str):
            reasons.append(entry)
            copy[name] = "…"
        elif name != MOVES:
            copy[name] = _shape(entry, texts, reasons)
    return copy


def totals(hive: Any, name: str) -> tuple[int, int]:
    """(tokens in, tokens out) as `hive usage` tells them."""
    got = hive.get(f"/api/agents/{name}/usage", period="1h")["totals"]
    return got["tokensIn"], got["tokensOut"]
