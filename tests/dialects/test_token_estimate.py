"""The estimate of a prompt's tokens, for servers that do not count."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.dialects.token_estimate import AN_IMAGE, estimate
from hive.errors import BadRequest


def of(**fields: Any) -> int:
    return estimate({name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()})


def turn(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def test_text_counts_wherever_a_model_reads_it() -> None:
    words = "x" * 3500
    nothing = of(messages=turn())
    for blocks in (
        [{"type": "text", "text": words}],
        [{"type": "tool_result", "tool_use_id": "c", "content": words}],
        [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": words}]}],
        [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": words}}],
        [{"type": "thinking", "thinking": words, "signature": "s" * 9000}],
        [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words}}],
    ):
        assert 1000 <= of(messages=turn(*blocks)) - nothing <= 1010, blocks[0]["type"]
    assert 1000 <= of(messages=turn(), system=words) - nothing <= 1001
    assert 1000 <= of(messages=turn(), system=[{"type": "text", "text": words}]) - nothing <= 1001


def test_an_image_costs_the_same_however_large_and_a_document_nobody_reads_nothing() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 99_999}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    assert of(messages=turn(image, result)) - of(messages=turn()) == 2 * AN_IMAGE
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 99_999}}
    assert of(messages=turn(pdf)) == of(messages=turn())


def test_other_scripts_cost_more_for_a_character() -> None:
    assert of(messages=turn({"type": "text", "text": "蜂" * 700})) == 4 + 602


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["image", "tool_use", "base64"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "name", "input", "x"]), inner),
    max_leaves=9,
)


@given(NONSENSE, NONSENSE)
def test_nonsense_is_a_number_never_a_fault(messages: Any, system: Any) -> None:
    assert of(messages=messages, system=system) >= 0


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadRequest):
        estimate({"messages": msgspec.Raw(b"[" * 5000 + b"]" * 5000)})
