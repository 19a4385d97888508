"""The time at which a prompt is sent ahead: once for as long as a backend runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hive.models.prompts import RETRY_S, Prefix, Warmth, hash_prompt

MINE, OTHERS = Prefix("a", "tenant mine", "m"), Prefix("a", "tenant other", "m")
STEPS = st.one_of(
    st.tuples(st.just("start"), st.sampled_from([MINE, OTHERS])),
    st.tuples(st.just("read"), st.sampled_from([MINE, OTHERS])),
    st.tuples(st.just("fail"), st.sampled_from([MINE, OTHERS])),
    st.tuples(st.just("began"), st.none()),
    st.tuples(st.just("wait"), st.none()),
    st.tuples(st.just("forget"), st.none()),
)


def test_the_hash_is_the_one_of_the_original_specification() -> None:
    assert hash_prompt("") == "e3b0c44298fc1c14"
    assert hash_prompt("ü") != hash_prompt("u")


@given(st.lists(STEPS, max_size=40))
def test_it_is_read_at_most_once_in_each_run_of_a_backend(steps: list[tuple[str, Prefix | None]]) -> None:
    """Also where an answer comes after the backend it was asked of is gone."""
    warmth, now = Warmth(), 0.0
    under_way: list[tuple[Prefix, int]] = []
    read: dict[tuple[Prefix, int], int] = {}
    for step, prefix in steps:
        match step:
            case "start" if prefix is not None and warmth.choose(prefix, now).send:
                assert (prefix, warmth.epoch) not in under_way, "single flight"
                under_way.append((prefix, warmth.begin(prefix)))
            case "read" | "fail":
                mine = [one for one in under_way if one[0] == prefix]
                if mine:
                    under_way.remove(mine[0])
                    if step == "fail":
                        warmth.failed(*mine[0], "down", now)
                    else:
                        warmth.read(*mine[0], tokens=1, at=now)
                        read[mine[0]] = read.get(mine[0], 0) + 1
            case "began":
                warmth.backend_began()
            case "wait":
                now += RETRY_S
            case "forget":
                warmth.forget_all_but([MINE, OTHERS])
    assert max(read.values(), default=1) == 1
