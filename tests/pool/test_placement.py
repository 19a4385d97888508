"""The accounts a load is placed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.pool.placement import groups, permitted_accounts, place, split
from hive.pool.state import CPU, MemoryAccount, SlotFacts

MARGIN = 10
FREE = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(-50, 200), min_size=1)


@pytest.mark.parametrize(
    ("need", "free", "accounts"),
    [
        (50, {"a": 80, "b": 60}, ["b"]),  # the tightest
        (50, {"a": 80, "b": 50}, ["b"]),
        (81, {"a": 80, "b": 60}, ["a", "b"]),
        (120, {"a": 80, "b": 60}, ["a", "b"]),
        (121, {"a": 80, "b": 60}, None),  # 512 MiB of each are for the driver
        (100, {"a": 60, "b": 60, "c": 60}, ["a", "b"]),  # as few as it takes
        (110, {"a": 60, "b": 60, "c": 60}, ["a", "b", "c"]),
        (90, {"a": 80, CPU: 80}, None),  # a GPU is not split with the host
        (70, {CPU: 80}, [CPU]),
        (1, {}, None),
    ],
)
def test_a_load_is_placed(need: int, free: dict[str, int], accounts: list[str] | None) -> None:
    grants = place(need, free, MARGIN)
    assert (None if grants is None else [grant.account for grant in grants]) == accounts


@given(st.integers(1, 400), FREE)
def test_no_grant_is_larger_than_what_is_free_and_all_together_are_enough(need: int, free: dict[str, int]) -> None:
    grants = place(need, free, MARGIN)
    if grants is None:
        assert max(free.values()) < need
        assert split(need, free, MARGIN) is None
        return
    assert all(grant.charged_bytes <= free[grant.account] for grant in grants)
    margin = MARGIN * len(grants) if len(grants) > 1 else 0
    assert sum(grant.charged_bytes for grant in grants) == need + margin


@given(st.integers(2, 400), FREE)
def test_a_split_is_in_proportion(need: int, free: dict[str, int]) -> None:
    grants = split(need, free, MARGIN)
    if grants is not None:
        total = sum(free[grant.account] - MARGIN for grant in grants)
        for grant in grants:
            fair = need * (free[grant.account] - MARGIN) / total
            assert abs(grant.charged_bytes - MARGIN - fair) <= len(grants)


def test_an_entry_names_its_accounts() -> None:
    accounts = [MemoryAccount(id, 1) for id in ("a", "b", CPU)]
    assert permitted_accounts(SlotFacts("s", "m", 1), accounts) == ["a", "b"]
    assert permitted_accounts(SlotFacts("s", "m", 1, permitted=("b", CPU)), accounts) == ["b", CPU]
    assert permitted_accounts(SlotFacts("s", "m", 1, permitted=("gone",)), accounts) == []


def test_many_gpus_are_split_over_all_at_once() -> None:
    assert list(groups([str(number) for number in range(9)])) == [tuple("012345678")]
