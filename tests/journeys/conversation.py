"""One conversation, said by each client package in its own words, and what came of it in words that can be compared."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import anthropic
import ollama
import openai

from tests.journeys.sdk import CITY, HELLO, Door

LENGTH = 12
"""Tokens; the tiny models never end by themselves."""
SYSTEM = "Be short."
RESULT = "The capital of France."
CALL = {"city": "Paris"}
TEXTS = ["a hive", "a home for bees"]
_CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "description": "A city.", "parameters": _CITY}}]
ANTHROPIC_TOOLS: Any = [{"name": "look_up", "description": "A city.", "input_schema": _CITY}]
"""With no more than the `ollama` package sends of a tool: it leaves out `additionalProperties`."""


class NotSaidHere(Exception):
    """The client's dialect has no words for this; the text says why."""


def _picture() -> bytes:
    """A PNG of 8 × 8 grey dots."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + b"\x80\x80\x80" * 8 for _ in range(8))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PICTURE = base64.b64encode(_picture()).decode()


class Turn(NamedTuple):
    """A question in nobody's dialect. `tool`: offered, forced or answered; `format`: json or schema."""

    model: str = ""
    words: str = ""
    """Of the user; empty: the usual ones."""
    system: str = ""
    tool: str = ""
    format: str = ""
    think: bool | None = None
    picture: bool = False
    stop: str = ""
    length: int = LENGTH
    stream: bool = False


class Heard(NamedTuple):
    """An answer as a client was told it. `tokens`: of the prompt and of the answer; `error`: status and words."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    tokens: tuple[int | None, int | None] = (None, None)
    model: str = ""
    vectors: tuple[tuple[float, ...], ...] = ()
    error: tuple[int, str] = (0, "")
    streamed: bool = False
    """True if text came in more than one piece."""


REASONS = {
    "length": "length",
    "max_tokens": "length",
    "stop": "end",
    "end_turn": "end",
    "stop_sequence": "end",
    "tool_calls": "call",
    "tool_use": "call",
}


def _reason(said: str | None, calls: tuple[tuple[str, str], ...]) -> str:
    """One word for the packages' own: where a tool was called, vLLM and Ollama may end with `stop`."""
    reason = REASONS.get(said or "", said or "")
    return "call" if calls and reason == "end" else reason


def _json(given: Any) -> str:
    """Arguments as one text: OpenAI's are text already, the others' an object."""
    return json.dumps(json.loads(given) if isinstance(given, str) else given, sort_keys=True)


class Client:
    """One package at one door. What its dialect cannot say raises NotSaidHere. A context manager: to make a client
    costs more than to ask it."""

    name = ""

    def __init__(self, door: Door) -> None:
        self.door = door

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, turn: Turn) -> Heard:
        raise NotImplementedError

    def embed(self, model: str) -> Heard:
        raise NotImplementedError

    def models(self) -> Heard:
        raise NotImplementedError

    def generate(self, turn: Turn) -> Heard:
        raise NotSaidHere("only Ollama's dialect has a chat of one turn of its own")

    def count(self, model: str) -> Heard:
        raise NotSaidHere("only Anthropic's dialect counts a prompt before it is asked")

    def leave(self, model: str) -> Heard:
        """Begins an endless answer and goes away after its first piece."""
        raise NotImplementedError


def heard_or_refused(ask: Callable[[], Heard]) -> Heard:
    """The answer, or the error that the package raised."""
    try:
        return ask()
    except ollama.ResponseError as error:
        return Heard(error=(error.status_code, error.error))
    except openai.APIStatusError as error:
        body: Any = error.body
        return Heard(error=(error.status_code, body.get("message") or body["detail"]))  # vLLM's for an unknown path
    except anthropic.APIStatusError as error:
        found: Any = error.body
        return Heard(error=(error.status_code, found["error"]["message"]))
    except ValueError as error:  # the anthropic package, of arguments that are no object
        return Heard(error=(-1, str(error)))


# --- openai -----------------------------------------------------------------------------------------------------------


class ByOpenai(Client):
    name = "openai"

    def __init__(self, door: Door) -> None:
        super().__init__(door)
        self._client = openai.OpenAI(base_url=f"{door.root}/v1", api_key=door.token, max_retries=0, timeout=60)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def say(self, turn: Turn) -> Heard:
        found: Any = self._client.chat.completions.create(**_for_openai(turn))
        if turn.stream:
            return self._pieces(found)
        message = found.choices[0].message
        calls = tuple((call.function.name, _json(call.function.arguments)) for call in message.tool_calls or [])
        return Heard(
            text=message.content or "",
            thinking=_thinking(message),
            calls=calls,
            reason=_reason(found.choices[0].finish_reason, calls),
            tokens=(found.usage.prompt_tokens, found.usage.completion_tokens),
            model=found.model,
        )

    def _pieces(self, stream: Any) -> Heard:
        texts, thoughts, reason, usage, model = [], [], None, None, ""
        calls: dict[int, list[str]] = {}
        for chunk in stream:
            model, usage = chunk.model, chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                texts += [choice.delta.content] if choice.delta.content else []
                thoughts += [thought] if (thought := _thinking(choice.delta)) else []
                for call in choice.delta.tool_calls or []:
                    name_and_arguments = calls.setdefault(call.index, ["", ""])
                    name_and_arguments[0] += call.function.name or ""
                    name_and_arguments[1] += call.function.arguments or ""
        told = tuple((name, _json(arguments)) for name, arguments in calls.values())
        return Heard(
            text="".join(texts),
            thinking="".join(thoughts),
            calls=told,
            reason=_reason(reason, told),
            tokens=(usage.prompt_tokens, usage.completion_tokens) if usage else (None, None),
            model=model,
            streamed=len(texts + thoughts) > 1,
        )

    def embed(self, model: str) -> Heard:
        found = self._client.embeddings.create(model=model, input=TEXTS)
        vectors = tuple(_rounded(row.embedding) for row in found.data)
        return Heard(vectors=vectors, tokens=(found.usage.prompt_tokens, None))

    def models(self) -> Heard:
        return Heard(text=" ".join(model.id for model in self._client.models.list()))

    def leave(self, model: str) -> Heard:
        stream = self._client.chat.completions.create(model=model, messages=HELLO, max_tokens=3000, stream=True)
        next(iter(stream))
        stream.close()
        return Heard(text="left")


def _thinking(said: Any) -> str:
    """The package has no field for it: vLLM and Ollama say `reasoning`, llama-server `reasoning_content`."""
    return getattr(said, "reasoning", None) or getattr(said, "reasoning_content", None) or ""


def _rounded(vector: Any) -> tuple[float, ...]:
    """Base64 has them in 32 bits."""
    return tuple(round(number, 5) for number in vector)


def _for_openai(turn: Turn) -> dict[str, Any]:
    content: Any = turn.words or HELLO[0]["content"]
    if turn.picture:
        url = {"url": f"data:image/png;base64,{PICTURE}"}
        content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": url}]
    messages: list[Any] = [{"role": "system", "content": turn.system}] if turn.system else []
    messages.append({"role": "user", "content": content})
    if turn.tool == "answered":
        function = {"name": "look_up", "arguments": json.dumps(CALL)}
        call = {"id": "call_0", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": RESULT},
        ]
    asked: dict[str, Any] = {"model": turn.model, "messages": messages, "max_tokens": turn.length, "temperature": 0}
    if turn.tool:
        asked["tools"] = TOOLS
    if turn.tool == "forced":
        asked["tool_choice"] = {"type": "function", "function": {"name": "look_up"}}
    if turn.format == "json":
        asked["response_format"] = {"type": "json_object"}
    if turn.format == "schema":
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    if turn.stop:
        asked["stop"] = [turn.stop]
    if turn.think is not None:
        asked["reasoning_effort"] = "high" if turn.think else "none"
    if turn.stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return asked


# --- ollama -----------------------------------------------------------------------------------------------------------


class ByOllama(Client):
    name = "ollama"

    def __init__(self, door: Door) -> None:
        super().__init__(door)
        self._client = ollama.Client(host=door.root, headers={"Authorization": f"Bearer {door.token}"})

    def __exit__(self, *_: object) -> None:
        self._client._client.close()

    def say(self, turn: Turn) -> Heard:
        found: Any = self._client.chat(**_for_ollama(turn))
        chunks = list(found) if turn.stream else [found]
        said, last = [chunk.message for chunk in chunks], chunks[-1]
        calls = tuple(
            (call.function.name, _json(dict(call.function.arguments)))
            for message in said
            for call in message.tool_calls or []
        )
        assert last.done
        assert last.total_duration
        return Heard(
            text="".join(message.content or "" for message in said),
            thinking="".join(message.thinking or "" for message in said),
            calls=calls,
            reason=_reason(last.done_reason, calls),
            tokens=(last.prompt_eval_count, last.eval_count),
            model=last.model,
            streamed=sum(bool(message.content or message.thinking) for message in said) > 1,
        )

    def generate(self, turn: Turn) -> Heard:
        words, options = HELLO[0]["content"], {"temperature": 0, "num_predict": turn.length}
        wanted: dict[str, Any] = {"system": turn.system, "options": options, "stream": turn.stream}
        found: Any = self._client.generate(turn.model, words, **wanted)
        chunks = list(found) if turn.stream else [found]
        last = chunks[-1]
        return Heard(
            text="".join(chunk.response for chunk in chunks),
            reason=_reason(last.done_reason, ()),
            tokens=(last.prompt_eval_count, last.eval_count),
            model=last.model,
            streamed=sum(bool(chunk.response) for chunk in chunks) > 1,
        )

    def embed(self, model: str) -> Heard:
        found = self._client.embed(model, TEXTS)
        return Heard(
            vectors=tuple(_rounded(vector) for vector in found.embeddings), tokens=(found.prompt_eval_count, None)
        )

    def models(self) -> Heard:
        return Heard(text=" ".join(model.model or "" for model in self._client.list().models))

    def leave(self, model: str) -> Heard:
        stream: Any = self._client.chat(model, HELLO, stream=True, options={"num_predict": 3000})
        next(stream)
        stream.close()
        return Heard(text="left")


def _for_ollama(turn: Turn) -> dict[str, Any]:
    if turn.tool == "forced":
        raise NotSaidHere("Ollama's API has no tool_choice")
    said: dict[str, Any] = {"role": "user", "content": turn.words or HELLO[0]["content"]}
    if turn.picture:
        said["images"] = [PICTURE]
    messages: list[Any] = [{"role": "system", "content": turn.system}] if turn.system else []
    messages.append(said)
    if turn.tool == "answered":
        call = {"function": {"name": "look_up", "arguments": CALL}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "look_up", "content": RESULT},
        ]
    options: dict[str, Any] = {"temperature": 0, "num_predict": turn.length}
    if turn.stop:
        options["stop"] = [turn.stop]
    asked: dict[str, Any] = {"model": turn.model, "messages": messages, "options": options, "stream": turn.stream}
    if turn.tool:
        asked["tools"] = TOOLS
    if turn.format:
        asked["format"] = "json" if turn.format == "json" else CITY
    if turn.think is not None:
        asked["think"] = turn.think
    return asked


# --- anthropic --------------------------------------------------------------------------------------------------------


class ByAnthropic(Client):
    name = "anthropic"

    def __init__(self, door: Door) -> None:
        super().__init__(door)
        self._client = anthropic.Anthropic(base_url=door.root, api_key=door.token, max_retries=0, timeout=60)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def say(self, turn: Turn) -> Heard:
        asked, pieces = _for_anthropic(turn), 0
        if turn.stream:
            with self._client.messages.stream(**asked) as stream:
                pieces = sum(event.type in ("text", "thinking") for event in stream)
                found: Any = stream.get_final_message()
        else:
            found = self._client.messages.create(**asked)
        blocks, used = found.content, found.usage
        calls = tuple((block.name, _json(block.input)) for block in blocks if block.type == "tool_use")
        tokens_in = used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
        return Heard(
            text="".join(block.text for block in blocks if block.type == "text"),
            thinking="".join(block.thinking for block in blocks if block.type == "thinking"),
            calls=calls,
            reason=_reason(found.stop_reason, calls),
            tokens=(tokens_in, used.output_tokens),
            model=found.model,
            streamed=pieces > 1,
        )

    def message_id(self, model: str) -> str:
        return self._client.messages.create(model=model, messages=HELLO, max_tokens=1).id

    def embed(self, model: str) -> Heard:
        raise NotSaidHere("Anthropic's dialect has no embeddings")

    def models(self) -> Heard:
        """By pages of one, as the package goes on by itself."""
        return Heard(text=" ".join(model.id for model in self._client.models.list(limit=1)))

    def count(self, model: str) -> Heard:
        counted = self._client.messages.count_tokens(model=model, messages=HELLO)
        is_estimate = "estimated" in (counted.model_extra or {})
        return Heard(text="an estimate" if is_estimate else "", tokens=(counted.input_tokens, None))

    def leave(self, model: str) -> Heard:
        stream = self._client.messages.create(model=model, messages=HELLO, max_tokens=3000, stream=True)
        next(event for event in stream if event.type == "content_block_delta")
        stream.close()
        return Heard(text="left")


def _for_anthropic(turn: Turn) -> dict[str, Any]:
    if turn.format == "json":
        raise NotSaidHere("Anthropic's dialect has JSON by a schema only")
    content: Any = turn.words or HELLO[0]["content"]
    if turn.picture:
        source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
        content = [{"type": "text", "text": content}, {"type": "image", "source": source}]
    messages: list[Any] = [{"role": "user", "content": content}]
    if turn.tool == "answered":
        call = {"type": "tool_use", "id": "call_0", "name": "look_up", "input": CALL}
        result = {"type": "tool_result", "tool_use_id": "call_0", "content": RESULT}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked: dict[str, Any] = {"model": turn.model, "messages": messages, "max_tokens": turn.length}
    asked["extra_body"] = {"temperature": 0}
    if turn.system:
        asked["system"] = turn.system
    if turn.tool:
        asked["tools"] = ANTHROPIC_TOOLS
    if turn.tool == "forced":
        asked["tool_choice"] = {"type": "tool", "name": "look_up"}
    if turn.format == "schema":
        asked["output_config"] = {"format": {"type": "json_schema", "schema": CITY}}
    if turn.stop:
        asked["stop_sequences"] = [turn.stop]
    if turn.think is not None:
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024} if turn.think else {"type": "disabled"}
    return asked
