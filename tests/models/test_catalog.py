"""The models that are there, as one looks at them."""

from __future__ import annotations

import pytest

from hive.domain import ModelInfo, Tier
from hive.errors import NotFound
from hive.models.catalog import Catalog
from hive.models.names import parse
from hive.models.routing import preferences

NAMES = (
    "llama3.2:3b-instruct-q4_0",
    "llama3.2:3b-instruct-q8_0",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8",
    "hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "tiny",
    "phi-4@main",
    "q4_0",
)


def catalog(*names: str, **settings: object) -> Catalog:
    return Catalog([ModelInfo(name=name) for name in names], preferences(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_alone_is_what_every_tier_may_have_of_it_is_given(name: str) -> None:
    """Its base is read back as the same base: else no tier would be given anything for it."""
    found = catalog(name, routing=True, allow_larger=True)
    assert found.tiers(name) == list(Tier), parse(name)


def test_each_tier_is_given_one_of_the_variants() -> None:
    found = catalog(*NAMES[:4], routing=True)
    assert [found.tiers(name) for name in NAMES[:4]] == [
        [Tier.LOW],
        [Tier.MEDIUM, Tier.HIGH],
        [Tier.LOW],
        [Tier.MEDIUM, Tier.HIGH],
    ]
    assert catalog(*NAMES[:2]).tiers(NAMES[0]) == list(Tier)


def test_two_publishers_of_one_model_are_two_models() -> None:
    found = catalog("a/x-7b-awq", "b/x-7b-awq", routing=True)
    assert (found.tiers("a/x-7b-awq"), found.variants("a/x-7b-awq")) == (list(Tier), [])


def test_an_adapter_belongs_to_its_model_and_is_given_by_its_name_alone() -> None:
    models = [ModelInfo(name="x-awq"), ModelInfo(name="support", parent="x-awq")]
    found = Catalog(models, preferences(routing=True))
    assert (found.adapters("x-awq"), found.tiers("support"), found.variants("support")) == (["support"], list(Tier), [])


def test_an_alias_is_found_and_one_that_leads_nowhere_is_not() -> None:
    found = catalog("llama3.2:q4_0", aliases="fast = gone | llama3.2:q4_0, old = gone")
    assert (found.find("FAST").name, found.aliases("llama3.2:q4_0")) == ("llama3.2:q4_0", ["fast"])
    assert found.targets() == {"fast": ["gone", "llama3.2:q4_0"], "old": ["gone"]}
    for name, nearest in (("lama3.2:q4_0", "llama3.2:q4_0"), ("fats", "fast"), ("old", "")):
        with pytest.raises(NotFound) as refused:
            found.find(name)
        assert nearest in refused.value.hint


def test_a_tenant_is_given_what_it_may_have() -> None:
    found = catalog("x:q4_0", "x:q8_0", routing=True)
    assert found.given("x", Tier.HIGH).model == "x:q8_0"
    assert found.given("x", Tier.HIGH, "x:q4_0").model == "x:q4_0"
