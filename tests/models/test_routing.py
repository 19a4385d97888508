"""The model that a request is given: the specification's examples, every rule, and what holds for all lists of
models."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import Caller, CallerKind, ModelInfo, Tier
from hive.errors import ConfigError, NotFound
from hive.models.names import parse, quantization_of
from hive.models.routing import (
    MOST_NAMED,
    TIER_QUANTIZATIONS,
    Offer,
    Preferences,
    aliases_of,
    explain,
    offer,
    offers_of,
    permits,
    preferences,
    route,
)
from hive.policy import Act, may

LOW, MEDIUM, HIGH = Tier.LOW, Tier.MEDIUM, Tier.HIGH
ON, OFF = preferences(routing=True), preferences()


def taken(asked: str, tier: Tier, there: list[str], prefs: Preferences = ON) -> str:
    """The model, empty where none is taken."""
    return explain(asked, tier, offers_of(there), prefs).model


# by tier --------------------------------------------------------------------------------------------------------------

ALL = ["llama3.2:q4_0", "llama3.2:q8_0", "llama3.2:f16"]


@pytest.mark.parametrize(("tier", "model"), [(LOW, ALL[0]), (MEDIUM, ALL[1]), (HIGH, ALL[2])])
def test_the_examples_of_the_specification(tier: Tier, model: str) -> None:
    assert taken("llama3.2", tier, ALL) == model


def test_every_tier_has_a_list_and_there_is_no_other_tier() -> None:
    assert {tier: [wanted.text for wanted in ON.tiers[tier]] for tier in Tier} == {
        LOW: ["q4_0", "q4_K_M", "q4_K_S"],
        MEDIUM: ["q8_0", "q5_K_M", "q5_K_S"],
        HIGH: ["f16", "q8_0"],
    }
    with pytest.raises(ValueError, match="gold"):
        Tier("gold")


BASE = "llama3.2:3b-instruct"


@pytest.mark.parametrize(
    ("tier", "variants", "model"),
    [
        # the list in its order
        (LOW, ["q4_K_S", "q4_K_M"], "q4_K_M"),
        (LOW, ["q4_K_S", "q8_0"], "q4_K_S"),
        (MEDIUM, ["q5_K_S", "q5_K_M", "q4_0"], "q5_K_M"),
        (HIGH, ["q8_0", "q4_0"], "q8_0"),
        # then the largest that is not larger
        (LOW, ["q2_K", "q3_K_M", "q5_K_M"], "q3_K_M"),
        (LOW, ["iq4_xs", "q3_K_M"], "iq4_xs"),
        (MEDIUM, ["q6_K", "q4_0", "f16"], "q6_K"),
        (HIGH, ["q6_K", "q4_0", "f32"], "q6_K"),
        (HIGH, ["bf16", "q6_K"], "bf16"),
        # and none that is larger
        (LOW, ["q8_0", "f16"], ""),
        (LOW, ["q4_1"], ""),
        (MEDIUM, ["f16"], ""),
        (HIGH, ["f32"], ""),
    ],
)
def test_the_list_then_the_largest_that_the_tier_may_have(tier: Tier, variants: list[str], model: str) -> None:
    there = [f"{BASE}-{variant}" for variant in variants]
    assert taken(BASE, tier, there) == (f"{BASE}-{model}" if model else "")


@pytest.mark.parametrize(
    ("tier", "model"),
    [(LOW, "TheBloke/Llama-2-7B-AWQ"), (MEDIUM, "TheBloke/Llama-2-7B-FP8"), (HIGH, "TheBloke/Llama-2-7B-BF16")],
)
def test_other_families_of_quantizations_are_taken_by_their_size(tier: Tier, model: str) -> None:
    there = [f"TheBloke/Llama-2-7B-{variant}" for variant in ("AWQ", "FP8", "BF16")]
    assert taken("llama2:7b", tier, there) == model


def test_a_larger_one_is_taken_only_where_that_is_allowed_and_then_the_smallest() -> None:
    there = ["llama3.2:f16", "llama3.2:q8_0", "llama3.2:q6_K"]
    found = explain("llama3.2", LOW, offers_of(there), ON)
    assert (found.model, "larger than tier low may have" in found.why) == ("", True)
    assert "tier_allow_larger" in found.hint
    assert taken("llama3.2", LOW, there, preferences(routing=True, allow_larger=True)) == "llama3.2:q6_K"
    there.append("llama3.2:q2_K")
    assert taken("llama3.2", LOW, there, preferences(routing=True, allow_larger=True)) == "llama3.2:q2_K"


def test_one_that_does_not_say_its_size_comes_after_those_known_to_be_small() -> None:
    assert taken("llama3.2", LOW, ["llama3.2:latest"]) == "llama3.2:latest"
    assert taken("llama3.2", LOW, ["llama3.2:latest", "llama3.2:q2_K"]) == "llama3.2:q2_K"
    assert taken("llama3.2", LOW, ["llama3.2:latest", "llama3.2:q8_0"]) == "llama3.2:latest"
    assert taken("x:v1", LOW, ["x-v1", "x:v1"]) == "x:v1", "of two alike the one that was named"


def test_what_the_server_tells_goes_before_what_the_name_says() -> None:
    latest = offer("llama3.2:latest", quantization="F16", size_bytes=6_000_000_000)
    assert explain("llama3.2", LOW, [latest], ON).model == ""
    assert route("llama3.2", HIGH, [latest], ON).why == "f16 is the first of tier high that is there"
    assert offer("x-q8_0.gguf", quantization="Q4_K_M").ref.variant == quantization_of("Q4_K_M")
    assert offer("x-q8_0.gguf", quantization="unknown").ref.variant == quantization_of("Q8_0")
    measured = offer("tiny", size_bytes=850, parameters=800)
    assert measured.bits == 8.5
    assert explain("tiny", LOW, [measured], ON).model == ""
    assert explain("tiny", MEDIUM, [measured], ON).model == "tiny"


def test_what_is_measured_is_compared_by_whole_bits_and_what_is_named_by_its_name() -> None:
    """A file holds more than its weights: a Q8_0 measures 8.508 bits, an F16 16.005, the Q4_K_M of a small model 5.1.
    Each was refused to the very tier that asks for it, as soon as its size was known."""
    sizes = {"x-Q8_0.gguf": (8508, MEDIUM), "x-F16.gguf": (16005, HIGH), "x-Q4_K_M.gguf": (5100, LOW)}
    for name, (size_bytes, tier) in sizes.items():
        one = offer(name, size_bytes=size_bytes, parameters=8000)
        assert explain("x", tier, [one], ON).model == name, name
    unnamed = offer("tiny", size_bytes=8508, parameters=8000)
    assert explain("tiny", MEDIUM, [unnamed], ON).model == "tiny"
    assert explain("tiny", LOW, [unnamed], ON).model == ""
    assert explain("x", LOW, [offer("x-Q8_0.gguf", size_bytes=4000, parameters=8000)], ON).model == ""


# which model is meant -------------------------------------------------------------------------------------------------


def test_two_sizes_of_one_name_never_stand_for_each_other() -> None:
    there = ["llama3.2:1b-q4_0", "llama3.2:3b-q8_0"]
    assert taken("llama3.2:3b", LOW, there) == ""
    assert taken("llama3.2:1b", HIGH, there) == "llama3.2:1b-q4_0"
    both = explain("llama3.2", LOW, offers_of(there), ON)
    assert (both.model, both.why) == ("", '"llama3.2" may be more than one model here')
    assert both.hint == "name one: llama3.2:1b-q4_0 (Q4_0), llama3.2:3b-q8_0 (Q8_0)"


@pytest.mark.parametrize(
    ("asked", "there", "model"),
    [
        ("llama3.2", ["llama3.2:3b-instruct-q4_0"], "llama3.2:3b-instruct-q4_0"),
        ("llama3.2:3b", ["meta-llama/Llama-3.2-3B-Instruct"], "meta-llama/Llama-3.2-3B-Instruct"),
        (
            "llama3.2:3b-instruct-q4_0",
            ["casperhansen/Llama-3.2-3B-Instruct-AWQ"],
            "casperhansen/Llama-3.2-3B-Instruct-AWQ",
        ),
        ("llama3.2", ["llama3.2:latest", "llama3.2:3b-q4_0"], "llama3.2:latest"),  # nobody says that latest is 3b
        ("meta-llama/X-7B", ["X-7B-Q4_0.gguf"], "X-7B-Q4_0.gguf"),
        ("meta-llama/X-7B", ["other/X-7B-AWQ"], ""),
        ("meta-llama/X-7B", ["other/X-7B-AWQ", "meta-llama/X-7B-AWQ"], "meta-llama/X-7B-AWQ"),
        ("X-7B", ["other/X-7B-AWQ", "meta-llama/X-7B-AWQ"], ""),
        ("X-7B", ["other/X-7B-AWQ", "X-7B-Q4_0.gguf"], "X-7B-Q4_0.gguf"),
        ("meta-llama/X-7B", ["meta-llama/X-7B-Instruct"], ""),  # there it is another model
        ("X-7B@r1", ["X-7B@r2"], ""),
        ("X-7B", ["X-7B@r2"], "X-7B@r2"),
        ("qwen2.5", ["qwen2.5-coder:7b-q4_0"], ""),
        ("llama", ["llama3.2:q4_0"], ""),
    ],
)
def test_a_name_means_what_has_it_or_the_one_thing_that_only_says_more(
    asked: str, there: list[str], model: str
) -> None:
    assert taken(asked, LOW, there) == model


def test_an_adapter_is_only_what_has_its_name_and_never_stands_for_its_parent() -> None:
    there = [offer("Llama-3.2-3B-AWQ"), offer("support", parent="Llama-3.2-3B-AWQ")]
    assert route("support", LOW, there, ON).why == "an adapter has no other variants"
    assert route("Llama-3.2-3B", LOW, there, ON).model == "Llama-3.2-3B-AWQ"
    assert explain("Llama-3.2-3B", LOW, there[1:], ON).model == ""
    anothers = [offer("Llama-3.2-3B"), offer("support", parent="other/Llama-3.2-3B-AWQ")]
    listed = preferences(routing=True, tiers={LOW: "support"})
    assert route("Llama-3.2-3B", LOW, anothers, listed).model == "Llama-3.2-3B"


# a variant that the name spells ---------------------------------------------------------------------------------------


def test_a_variant_asked_for_by_name_is_taken_whatever_the_tier_unless_that_is_set() -> None:
    there = ["llama3.2:q4_0", "llama3.2:q8_0"]
    assert taken("llama3.2:q8_0", LOW, there) == "llama3.2:q8_0"
    assert taken("llama3.2:q4_0", HIGH, there) == "llama3.2:q4_0"
    capped = preferences(routing=True, cap_explicit=True)
    assert taken("llama3.2:q8_0", LOW, there, capped) == "llama3.2:q4_0"
    assert taken("llama3.2:q8_0", MEDIUM, there, capped) == "llama3.2:q8_0"
    assert taken("llama3.2:q4_0", HIGH, there, capped) == "llama3.2:q4_0"


def test_the_same_variant_in_another_spelling_is_the_one_asked_for() -> None:
    there = ["Llama-3.2-3B-Q4_K_M.gguf", "Llama-3.2-3B-Q8_0.gguf"]
    assert taken("llama3.2:3b-q8_0", LOW, there) == "Llama-3.2-3B-Q8_0.gguf"


def test_a_variant_that_vanished_is_replaced_by_none_that_is_larger() -> None:
    there = ["llama3.2:q4_0", "llama3.2:q5_K_M", "llama3.2:q8_0"]
    assert route("llama3.2:q8_0", MEDIUM, offers_of(there), ON).model == "llama3.2:q8_0"
    assert route("llama3.2:q8_0", MEDIUM, offers_of(there[:2]), ON).model == "llama3.2:q5_K_M"
    assert taken("llama3.2:q5_0", MEDIUM, ["llama3.2:q4_0", "llama3.2:q8_0"]) == "llama3.2:q4_0"
    assert taken("llama3.2:q5_0", MEDIUM, ["llama3.2:q8_0"]) == ""
    assert taken("llama3.2:q8_0", MEDIUM, []) == ""


# with routing off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "there", "model"),
    [
        ("llama3.2", ["llama3.2:latest", "llama3.2:q4_0"], "llama3.2:latest"),
        ("llama3.2:latest", ["llama3.2"], "llama3.2"),
        ("LLAMA3.2", ["llama3.2:latest"], "llama3.2:latest"),
        ("Tiny", ["tiny", "Tiny"], "Tiny"),
        ("tiny", ["tiny", "Tiny"], "tiny"),
        ("llama3.2:f16", ["llama3.2:f16"], "llama3.2:f16"),
        ("library/llama3.2", ["llama3.2:latest"], "llama3.2:latest"),
        ("llama3.2", ["llama3.2:q4_0"], ""),
        ("llama3.2:3b", ["Llama-3.2-3B.gguf"], ""),
        ("nope", ["tiny"], ""),
        ("", ["tiny"], "tiny"),
        ("", ["tiny", "other"], ""),
    ],
)
def test_with_routing_off_a_model_is_taken_under_its_name_or_not_at_all(
    asked: str, there: list[str], model: str
) -> None:
    assert taken(asked, LOW, there, OFF) == model


def test_routing_is_off_by_default() -> None:
    assert preferences().routing is False


def test_a_refusal_says_what_there_is_the_nearest_first() -> None:
    there = [f"model{number}" for number in range(8)] + ["llama3.2:1b", "llama3.1"]
    with pytest.raises(NotFound) as error:
        route("llama3.2:3b", LOW, offers_of(there), OFF)
    assert error.value.message == "model 'llama3.2:3b' not found"
    assert error.value.hint.startswith("there is llama3.2:1b, llama3.1, model0")
    assert error.value.hint.endswith(f" and {len(there) - MOST_NAMED} more")
    with pytest.raises(NotFound, match="not found") as error:
        route("x" * 500, LOW, (), OFF)
    assert len(error.value.message) < 120
    assert "offers no model" in error.value.hint


# what settings say ----------------------------------------------------------------------------------------------------


def test_a_tiers_own_list_takes_the_place_of_the_default() -> None:
    own = preferences(routing=True, tiers={LOW: " q3_K_M ,q2_K", MEDIUM: ""})
    assert taken("llama3.2", LOW, ["llama3.2:q4_0", "llama3.2:q2_K"], own) == "llama3.2:q2_K"
    assert taken("llama3.2", LOW, ["llama3.2:q4_0"], own) == "", "q3_K_M is now the largest"
    assert taken("llama3.2", MEDIUM, ["llama3.2:q8_0"], own) == "llama3.2:q8_0"


def test_a_tiers_list_may_name_models_and_never_another_one_for_it() -> None:
    own = preferences(routing=True, tiers={LOW: "TheBloke/Llama-2-7B-AWQ, qwen3:0.6b, q4_0"})
    there = ["meta-llama/Llama-2-7B", "TheBloke/Llama-2-7B-AWQ", "qwen3:0.6b", "llama3.1:70b-q8_0"]
    assert taken("meta-llama/Llama-2-7B", LOW, there, own) == "TheBloke/Llama-2-7B-AWQ"
    assert taken("meta-llama/Llama-2-7B", LOW, there) == "meta-llama/Llama-2-7B"
    assert taken("llama3.1:70b", LOW, there, own) == ""
    only = preferences(routing=True, tiers={LOW: "llama3.2:latest"})
    assert taken("llama3.2", LOW, ["llama3.2:q4_0", "llama3.2:latest"], only) == "llama3.2:latest"
    assert taken("llama3.2", LOW, ["llama3.2:q8_0"], only) == "", "bounded by the default where it says no size"
    large = preferences(routing=True, tiers={LOW: "llama3.2:q8_0"})
    assert taken("llama3.2", LOW, ["llama3.2:q8_0", "llama3.2:f16"], large) == "llama3.2:q8_0"


def test_an_alias_stands_for_the_first_of_its_targets_that_is_there() -> None:
    prefs = preferences(
        aliases="GPT-4 = llama3.1 | meta-llama/Llama-3.2-3B-Instruct, llama3.2 = llama3.2 | Llama-3.2-3B"
    )
    assert taken("gpt-4", LOW, ["meta-llama/Llama-3.2-3B-Instruct"], prefs) == "meta-llama/Llama-3.2-3B-Instruct"
    assert taken("gpt-4:latest", LOW, ["llama3.1:latest"], prefs) == "llama3.1:latest"
    assert taken("llama3.2", LOW, ["llama3.2:latest", "Llama-3.2-3B"], prefs) == "llama3.2:latest"
    assert taken("llama3.2", LOW, ["Llama-3.2-3B"], prefs) == "Llama-3.2-3B"
    assert taken("gpt-4", LOW, ["gpt-4"], prefs) == "", "an alias hides the model of its name"
    found = explain("gpt-4", LOW, offers_of(["other"]), prefs)
    assert "GPT-4 is an alias of llama3.1, or else" not in found.steps
    assert "gpt-4 is an alias of llama3.1, or else meta-llama/Llama-3.2-3B-Instruct" in found.steps
    assert "llama3.1 is not there" in found.steps


def test_an_alias_is_chosen_by_tier_like_its_target() -> None:
    prefs = preferences(routing=True, aliases="fast = llama3.2")
    assert taken("fast", LOW, ALL, prefs) == "llama3.2:q4_0"
    assert taken("fast", MEDIUM, ALL, prefs) == "llama3.2:q8_0"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "NAME = TARGET"),
        ("a =", "NAME = TARGET"),
        ("= b", "NAME = TARGET"),
        ("a = |", "NAME = TARGET"),
    ],
)
def test_aliases_that_lead_nowhere_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        preferences(aliases=text)


def test_an_alias_is_never_followed_to_another_one() -> None:
    prefs = preferences(aliases="a = b, b = a, c = x, C = y")
    assert taken("a", LOW, ["b"], prefs) == "b"
    assert taken("a", LOW, ["a"], prefs) == ""
    assert taken("b", LOW, ["a", "b"], prefs) == "a"
    assert taken("c", LOW, ["y"], prefs) == "y", "what is said twice is one list"


def test_no_alias_is_an_alias_of_nothing() -> None:
    assert aliases_of("") == aliases_of(" , ") == {}


# permitted models -----------------------------------------------------------------------------------------------------


def limited(models: str, aliases: str = "") -> tuple[Caller, Preferences]:
    names = frozenset(models.split())
    return Caller(CallerKind.AGENT, "a1", "acme", LOW, names), preferences(routing=True, aliases=aliases)


@pytest.mark.parametrize(
    ("models", "aliases", "asked", "there", "model"),
    [
        ("llama3.2", "", "llama3.2", ["llama3.2:q4_0", "llama3.2:latest"], "llama3.2:q4_0"),
        ("llama3.2 llama3.2:q2_K", "", "llama3.2", ["llama3.2:q4_0", "llama3.2:q2_K"], "llama3.2:q2_K"),
        ("llama3.2:q2_K", "", "llama3.2:q2_K", ["llama3.2:q4_0"], ""),
        ("llama3.1", "", "llama3.1", ["llama3.1:405b-q4_0"], ""),
        ("llama2-7b", "", "llama2-7b", ["other/Llama-2-7B-AWQ"], ""),
        ("fast", "fast=llama3.2", "fast", ["llama3.2:q4_0"], "llama3.2:q4_0"),
        ("fast", "fast=llama3.2", "llama3.2", ["llama3.2:q4_0"], None),
        ("fast", "fast=llama3.2:q2_K", "fast", ["llama3.2:q4_0"], ""),
    ],
)
def test_a_tenants_models_are_not_widened(
    models: str, aliases: str, asked: str, there: list[str], model: str | None
) -> None:
    caller, prefs = limited(models, aliases)
    if model is None:
        assert may(caller, Act.USE, asked) is not None
        return
    assert may(caller, Act.USE, asked) is None
    found = explain(asked, LOW, offers_of(there), prefs, permits(caller.models, prefs.aliases))
    assert found.model == model


def test_a_refusal_names_no_model_that_the_caller_may_not_use() -> None:
    caller, prefs = limited("llama3.2")
    there = offers_of(["llama3.2:q8_0", "secret:1b", "secret:3b", "llama3.2:q4_0"])
    may_take = permits(caller.models, prefs.aliases)
    for asked in ("secret", "secret:1b", "llama3.2:70b", "", "x"):
        found = explain(asked, LOW, there, prefs, may_take)
        assert found.model == ""
        assert "secret:3b" not in "\n".join((*found.steps, found.why, found.hint))
        assert "more than one" not in found.why


def test_who_is_not_limited_may_take_everything() -> None:
    assert permits(None, {})("anything:70b")


# in words -------------------------------------------------------------------------------------------------------------


def test_the_steps_tell_a_person_what_was_decided_and_why() -> None:
    prefs = preferences(routing=True, aliases="fast=llama3.2:q5_0")
    there = offers_of(["llama3.2:q8_0", "llama3.2:q3_K_M", "llama3.2:latest"])
    assert explain("fast", LOW, there, prefs).steps == (
        "asked for fast, tier low",
        "fast is an alias of llama3.2:q5_0",
        "tier low prefers q4_0, q4_K_M, q4_K_S",
        "there are llama3.2:latest (size unknown), llama3.2:q3_K_M (Q3_K_M), llama3.2:q8_0 (Q8_0)",
        "Q5_0 is not there: nothing larger is taken for it",
        "takes llama3.2:q3_K_M: the largest there that tier low may have",
    )
    assert explain("llama3.2", LOW, there[:1], ON).steps[-1].startswith("takes none: every variant of")
    assert "quantization_routing is off" in explain("llama3.2", LOW, there, OFF).steps[1]


def test_a_list_with_braces_is_only_text() -> None:
    own = preferences(routing=True, tiers={LOW: "{tier}, llama3.2:{0}"})
    assert taken("llama3.2:{0}", LOW, ["llama3.2:{0}"], own) == "llama3.2:{0}"


def test_the_models_that_the_proxy_knows_are_offers() -> None:
    found = offers_of([ModelInfo(name="llama3.2:q4_0", size_bytes=2), "TheBloke/Llama-2-7B-AWQ"])
    assert [(one.name, one.bits) for one in found] == [("llama3.2:q4_0", 4.64), ("TheBloke/Llama-2-7B-AWQ", 4.16)]


# any list of models ---------------------------------------------------------------------------------------------------

VARIANTS = ["", "q2_K", "q4_0", "q4_K_M", "q5_K_M", "q6_K", "q8_0", "f16", "f32"]
NAMES = [
    name
    for model in ("llama3.2", "llama3.2:1b", "llama3.2:3b", "qwen3:8b")
    for variant in VARIANTS
    for name in [f"{model}{'-' if ':' in model else ':'}{variant}" if variant else model]
]
FILES = [f"{who}Llama-3.2-3B-{variant}" for who in ("", "a/", "b/") for variant in ("AWQ", "FP8", "Q4_0", "F16")]
there_is = st.lists(st.sampled_from(NAMES + FILES), min_size=1, max_size=12, unique=True)
asked_for = st.sampled_from([*NAMES, *FILES, "a/Llama-3.2-3B", "Llama-3.2-3B", "llama3.2:3b-q3_K_M", "nope"])
tiers = st.sampled_from(list(Tier))
lists = st.sampled_from(["", "q4_0", "q8_0,q4_0", "iq4_xs", "llama3.2:3b-q8_0, q4_0", "nonsense"])
prefs_for = st.builds(
    lambda low, allow_larger, cap_explicit: preferences(
        routing=True, tiers={LOW: low}, allow_larger=allow_larger, cap_explicit=cap_explicit
    ),
    lists,
    st.booleans(),
    st.booleans(),
)


def most_bits(tier: Tier, prefs: Preferences) -> float:
    """By another way than the code's: the largest size of the list, of models named there too."""
    bits = [
        found.bits for item in prefs.tiers[tier] if (found := quantization_of(item.text) or parse(item.text).variant)
    ]
    return max(bits or [found.bits for name in TIER_QUANTIZATIONS[tier] if (found := quantization_of(name))])


@given(asked_for, tiers, there_is, prefs_for)
def test_what_is_taken_is_there_and_never_larger_than_allowed(
    asked: str, tier: Tier, there: list[str], prefs: Preferences
) -> None:
    offers = {one.name: one for one in offers_of(there)}
    model = explain(asked, tier, list(offers.values()), prefs).model
    if not model:
        return
    bits = offers[model].bits
    assert bits is not None or parse(model).variant is None
    spelled_out = parse(asked).variant is not None and parse(asked).variant == offers[model].ref.variant
    if bits is not None and not prefs.allow_larger and not (spelled_out and not prefs.cap_explicit):
        assert bits <= most_bits(tier, prefs)
    size = {"1b", "3b", "8b"} & set(parse(asked).base.split("-"))
    assert size <= set(parse(model).base.split("-")), "another size"


@given(asked_for, tiers, there_is, prefs_for, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(
    asked: str, tier: Tier, there: list[str], prefs: Preferences, chance: random.Random
) -> None:
    shuffled = list(there)
    chance.shuffle(shuffled)
    assert explain(asked, tier, offers_of(there), prefs) == explain(asked, tier, offers_of(shuffled), prefs)


@given(asked_for, tiers, there_is, prefs_for)
def test_what_is_taken_is_taken_again_when_it_is_asked_for(
    asked: str, tier: Tier, there: list[str], prefs: Preferences
) -> None:
    offers = offers_of(there)
    model = explain(asked, tier, offers, prefs).model
    if model and parse(asked).variant is None:
        assert route(model, tier, offers, prefs).model == model


@given(asked_for, tiers, there_is, prefs_for)
def test_a_model_that_vanishes_is_not_taken_any_more(
    asked: str, tier: Tier, there: list[str], prefs: Preferences
) -> None:
    model = explain(asked, tier, offers_of(there), prefs).model
    left = [name for name in there if name != model]
    assert explain(asked, tier, offers_of(left), prefs).model in {"", *left}


@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=6, unique=True), tiers, st.booleans())
def test_any_text_is_routed_or_refused(asked: str, there: list[str], tier: Tier, routing: bool) -> None:
    offers: tuple[Offer, ...] = offers_of(there)
    found = explain(asked, tier, offers, preferences(routing=routing))
    assert found.model in {"", *there}
    assert found.steps
    assert found.why
