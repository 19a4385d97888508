"""Calls for images: what a runner takes from whoever asks it, and what it refuses in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.runner.faults import EngineFault
from hive.runner.image_calls import check_multiple, cost_of, read_generate, read_order, seeds_of


def test_an_order_is_read_from_all_that_openai_and_hive_say() -> None:
    order = read_order(
        {
            "model": "sd",
            "prompt": "a bee",
            "n": 3,
            "size": "64x96",
            "output_format": "webp",
            "output_compression": 80,
            "response_format": "b64_json",
            "background": "opaque",
            "stream": True,
            "seed": 5,
            "steps": 4,
            "negative_prompt": "a wasp",
            "guidance_scale": 7,
        }
    )
    assert order == ("a bee", 3, (64, 96), "webp", 80, 5, 4, "a wasp", 7.0, True, {})
    assert read_order({"prompt": "a bee", "n": None, "size": None}) == read_order({"prompt": "a bee", "size": "auto"})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "prompt is missing"),
        ({"prompt": " "}, "prompt is missing"),
        ({"prompt": ["a"]}, "prompt is missing"),
        ({"prompt": "a\ud800"}, "prompt has half a character"),
        ({"prompt": "a", "negative_prompt": "\udfff"}, "negative_prompt has half a character"),
        ({"prompt": "a", "n": 11}, "n must be a whole number from 1 to 10"),
        ({"prompt": "a", "n": True}, "n must be a whole number"),
        ({"prompt": "a", "n": 1.5}, "n must be a whole number"),
        ({"prompt": "a", "size": "64*64"}, "size must be WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "99999x99999"}, "more than 67108864 pixels"),
        ({"prompt": "a", "seed": -1}, "seed must be a whole number from 0"),
        ({"prompt": "a", "steps": 0}, "steps must be a whole number from 1 to 1000"),
        ({"prompt": "a", "guidance_scale": "7"}, "guidance_scale must be a number"),
        ({"prompt": "a", "guidance_scale": 1e9}, "guidance_scale must be from 0 to 100"),
        ({"prompt": "a", "negative_prompt": 5}, "negative_prompt must be a string"),
        ({"prompt": "a", "response_format": "url"}, "no image is kept, so that there is none to fetch"),
        ({"prompt": "a", "output_format": "gif"}, "output_format must be png or webp or jpeg"),
        ({"prompt": "a", "background": "transparent"}, "background must be auto or opaque"),
        ({"prompt": "a", "stream": "yes"}, "stream must be true or false"),
        ({"prompt": "a", "inputs": {"x": 1}}, "this model has no such input"),
        ({"prompt": "a", "image": "x"}, "image is not known"),
    ],
)
def test_what_is_not_understood_is_refused_in_words(body: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineFault, match=why.replace("(", r"\(")) as refused:
        read_order(body)
    assert refused.value.status == 400
    assert refused.value.param


def test_a_model_with_inputs_of_its_own_is_given_them() -> None:
    assert read_order({"prompt": "a", "inputs": {"strength": 0.5}}, inputs=True).inputs == {"strength": 0.5}
    with pytest.raises(EngineFault, match="inputs must be an object"):
        read_order({"prompt": "a", "inputs": [1]}, inputs=True)


def test_the_plain_question_says_width_and_height() -> None:
    order = read_generate({"prompt": "a", "width": 64, "height": 32, "steps": 2, "seed": 1})
    assert (order.size, order.steps, order.seed, order.number) == ((64, 32), 2, 1, 1)
    assert read_generate({"prompt": "a"}).size is None
    for body, why in (
        ({"width": 64}, "height is missing"),
        ({"width": 64, "height": "x"}, "height must be a whole"),
        ({"model": "m"}, "model is not known"),
    ):
        with pytest.raises(EngineFault, match=why):
            read_generate({"prompt": "a", **body})


def test_each_image_has_a_seed_of_its_own() -> None:
    assert seeds_of(read_order({"prompt": "a", "n": 2, "seed": (1 << 63) - 1})) == [(1 << 63) - 1, 0]
    by_chance = seeds_of(read_order({"prompt": "a", "n": 10}))
    assert len(set(by_chance)) == 10
    assert seeds_of(read_order({"prompt": "a", "n": 10})) != by_chance


def test_a_side_that_the_model_cannot_make_is_told_with_one_that_it_can() -> None:
    check_multiple((64, 128), 16)
    for size, like in (((60, 64), "64x64"), ((1, 1), "16x16"), ((100, 200), "96x192")):
        with pytest.raises(EngineFault, match=f"multiples of 16, like {like}"):
            check_multiple(size, 16)


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
NAMES = st.sampled_from(
    ["prompt", "n", "size", "seed", "steps", "stream", "guidance_scale", "negative_prompt", "inputs", "background", "x"]
)


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.booleans())
def test_any_body_is_an_order_or_a_refusal(body: dict[str, Any], plain: bool) -> None:
    try:
        order = read_generate(body) if plain else read_order(body)
    except EngineFault:  # every one of them is a 400 (above)
        return
    assert order.prompt
    assert 1 <= order.number <= 10
    assert cost_of(order.number, order.size or (64, 64), order.steps or 1).startswith("images=")
