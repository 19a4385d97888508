"""Translated requests before a server that has OpenAI's schema alone, checked with the schema of the real package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
from openai.types.embedding_create_params import EmbeddingCreateParams

from hive.dialects.fitting import FIELDS, fit
from hive.dialects.translation import Sent
from hive.dialects.ways import way_of
from hive.domain import BackendCapabilities, BackendInfo, BackendKind
from hive.errors import NotSupported
from hive.models.capabilities import EXTRA, lacking

HELLO = [{"role": "user", "content": "hello"}]
REMOTE = BackendInfo(kind=BackendKind.REMOTE, address="https://h", capabilities=BackendCapabilities(fields=()))
OF_VLLM = tuple(name for name in EXTRA if name not in ("repeat_penalty", "repeat_last_n", "thinking_budget_tokens"))
VLLM = BackendInfo(kind=BackendKind.VLLM, address="h:1", capabilities=BackendCapabilities(fields=OF_VLLM))
"""As vLLM 0.32's own schema has it."""
OPENAIS = {
    "/v1/chat/completions": set(CompletionCreateParamsBase.__annotations__) | {"stream"},
    "/v1/completions": set(Completion.__annotations__) | {"stream"},
    "/v1/embeddings": set(EmbeddingCreateParams.__annotations__),
}


def sent_to(backend: BackendInfo, endpoint: str, body: dict[str, Any]) -> Sent:
    way = way_of(endpoint)
    return fit(way.there(json.dumps({"model": "m", **body}).encode()), way.rows, lacking(backend))


def test_every_field_that_a_translation_makes_is_openais_or_judged() -> None:
    made = {
        to.partition(".")[0]
        for endpoint in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/v1/messages")
        for row in way_of(endpoint).rows.values()
        for to in row.to.split(", ")
        if to
    }
    within = {"content", "name", "tool_calls", "tool_call_id", "role", "reasoning_content"}
    assert made - within <= set().union(*OPENAIS.values()) | FIELDS.keys()
    assert FIELDS.keys() <= set(EXTRA)
    assert not FIELDS.keys() & set().union(*OPENAIS.values())


ALL_OPTIONS = {"seed": 1, "stop": ["x"], "temperature": 0, "top_p": 0.5, "num_predict": 4, "frequency_penalty": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {}}}
TALK = [
    *HELLO,
    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_name": "f", "content": "7"},
]


@pytest.mark.parametrize(
    ("endpoint", "body", "dropped"),
    [
        (
            "/api/chat",
            {"messages": TALK, "tools": [TOOL], "options": ALL_OPTIONS, "think": "low"},
            {"messages.thinking"},
        ),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 1.0, "repeat_last_n": 8}}, None),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": 0, "top_k": 40, "min_p": 0.1}}, None),
        ("/api/generate", {"prompt": "hi", "system": "s", "format": "json"}, set()),
        ("/api/generate", {"prompt": "hi", "raw": True, "options": {"top_k": 0}}, {"options.top_k"}),
        ("/api/embed", {"input": ["a", "b"], "dimensions": 8}, {"truncate"}),
        ("/api/embeddings", {"prompt": "a"}, set()),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "system": "s", "stop_sequences": ["x"]}, set()),
    ],
)
def test_what_is_sent_has_openais_fields_alone_and_what_was_left_out_is_told(
    endpoint: str, body: dict[str, Any], dropped: set[str] | None
) -> None:
    sent = sent_to(REMOTE, endpoint, body)
    fields = json.loads(sent.body)
    assert fields.keys() <= OPENAIS[sent.target]
    for message in fields.get("messages", []):
        assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id"}
    expected = (
        {f"options.{name}" for name in body.get("options", {}) if name not in fields} if dropped is None else dropped
    )
    assert set(sent.dropped) == expected


@pytest.mark.parametrize(
    ("endpoint", "body", "named"),
    [
        ("/api/chat", {"messages": HELLO, "options": {"top_k": 3}}, "options.top_k"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 1.1}}, "options.repeat_penalty"),
        ("/api/chat", {"messages": HELLO, "think": False}, "think"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "top_k": 3}, "top_k"),
        ("/v1/messages", {"messages": [*HELLO, {"role": "assistant", "content": "I"}], "max_tokens": 4}, "messages"),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 4000, "thinking": {"type": "enabled", "budget_tokens": 2000}},
            "thinking[enabled].budget_tokens",
        ),
    ],
)
def test_what_would_be_another_answer_is_refused_by_the_clients_own_name(
    endpoint: str, body: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotSupported) as refused:
        sent_to(REMOTE, endpoint, body)
    assert refused.value.message.startswith(f'"{named}" cannot be said to this backend: it has OpenAI')


def test_of_two_names_for_one_thing_the_one_that_is_taken_is_enough() -> None:
    options = {"repeat_penalty": 1.1, "repeat_last_n": 8, "top_k": 3}
    sent = sent_to(VLLM, "/api/chat", {"messages": HELLO, "options": options})
    fields = json.loads(sent.body)
    assert (fields["repetition_penalty"], fields["top_k"]) == (1.1, 3)
    assert not {"repeat_penalty", "repeat_last_n"} & fields.keys()
    assert sent.dropped == ("options.repeat_last_n",)


def test_what_is_asked_of_who_did_not_tell_goes_as_it_was_translated() -> None:
    assert lacking(BackendInfo(kind=BackendKind.LLAMA, address="h:1")) == ()
