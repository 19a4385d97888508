"""Weights, the cache of keys and values, and the share of it in use: a sum with an unknown part is unknown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hive.lifecycle.memory_split import ModelMemory, kv_usage_of, total

SIZES = st.none() | st.integers(min_value=1, max_value=1 << 40)
SHARES = st.none() | st.floats(min_value=0, max_value=1)
MODELS = st.lists(st.builds(ModelMemory, st.just("m"), SIZES, SIZES, SHARES), max_size=5)


@given(st.lists(SIZES, max_size=5))
def test_a_sum_is_of_all_its_parts_or_not_known(parts: list[int | None]) -> None:
    known = [part for part in parts if part is not None]
    assert total(parts) == (sum(known) if parts and len(known) == len(parts) else None)


@given(MODELS)
def test_the_share_in_use_is_between_those_of_the_servers_or_not_known(models: list[ModelMemory]) -> None:
    shares = [model.kv_usage for model in models if model.kv_usage is not None]
    found = kv_usage_of(models)
    if len(shares) < len(models) or not models:
        assert found is None, "what one does not tell is not taken for 0"
    elif len(models) > 1 and total([model.kv_bytes for model in models]) is None:
        assert found is None
    else:
        assert found is not None
        assert min(shares) - 0.0001 <= found <= max(shares) + 0.0001
