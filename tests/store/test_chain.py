"""The chain: whatever is done to the rows is found at the first one it was done to, and what cannot be is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.store.chain import GENESIS, PRUNED, START, TAKEN_IN, ChainLink, ChainVerdict, Head, hash_of, verify

ROW = ChainLink(0, 1.5, "uid:0", "agent.paused", "a1", "socket", "ok", '{"name":"bob"}', None, None)


def chained(rows: list[ChainLink], after: Head = START) -> list[ChainLink]:
    """The same rows, numbered and chained from `after` on."""
    done: list[ChainLink] = []
    for row in rows:
        link = row._replace(id=after.id + 1, prev=after.hash)
        done.append(link._replace(hash=hash_of(link, after.hash)))
        after = head_of(done[-1])
    return done


def head_of(link: ChainLink) -> Head:
    return Head(link.id, str(link.hash))


texts = st.text(max_size=8)
rows = st.builds(
    ChainLink,
    st.just(0),
    st.floats(allow_nan=False),
    *[texts] * 6,
    st.none(),
    st.none(),
)
chains = st.lists(rows, min_size=1, max_size=12).map(chained)


@given(chains)
def test_rows_as_they_were_written_are_right(links: list[ChainLink]) -> None:
    assert verify(links) == ChainVerdict(len(links), head_of(links[-1]), None, 0)
    assert verify(links, [head_of(links[-1])]).unanchored == 0


@given(st.data(), chains)
def test_a_changed_row_is_the_first_bad_one(data: st.DataObject, links: list[ChainLink]) -> None:
    number = data.draw(st.integers(0, len(links) - 1))
    field = data.draw(st.sampled_from(ChainLink._fields[1:]))
    others: Any = st.floats(allow_nan=False) if field == "at" else texts
    new = data.draw(others.filter(lambda found: repr(found) != repr(getattr(links[number], field))))
    links[number] = links[number]._replace(**{field: new})
    bad = verify(links).bad
    assert bad is not None
    assert bad.id == number + 1


@given(st.data(), chains)
def test_a_row_taken_out_of_the_middle_is_the_first_bad_one(data: st.DataObject, links: list[ChainLink]) -> None:
    number = data.draw(st.integers(0, len(links) - 1))
    rest = links[:number] + links[number + 1 :]
    bad = verify(rest, [head_of(links[-1])]).bad
    assert bad is not None
    assert bad.id == number + 1
    # and numbered anew, to hide it
    hidden = [link._replace(id=row) for row, link in enumerate(rest, 1)]
    assert (verify(hidden).bad is None) is (number == len(links) - 1)


@given(st.data(), chains.filter(lambda links: len(links) > 1))
def test_two_rows_that_changed_places_are_found_at_the_first_of_them(
    data: st.DataObject, links: list[ChainLink]
) -> None:
    one, other = sorted(data.draw(st.lists(st.integers(0, len(links) - 1), min_size=2, max_size=2, unique=True)))
    moved = list(links)
    moved[one], moved[other] = links[other]._replace(id=one + 1), links[one]._replace(id=other + 1)
    bad = verify(moved).bad
    assert bad is not None
    assert bad.id == one + 1


@given(st.data(), chains)
def test_a_cut_off_end_is_found_by_an_anchor_or_a_number_and_else_said_to_be_possible(
    data: st.DataObject, links: list[ChainLink]
) -> None:
    kept, anchored = data.draw(st.integers(0, len(links) - 1)), data.draw(st.integers(1, len(links)))
    verdict = verify(links[:kept], [head_of(links[anchored - 1])])
    if anchored > kept:
        assert verdict.bad is not None
        assert verdict.bad.id == kept + 1
    else:
        assert (verdict.bad, verdict.anchored, verdict.unanchored) == (None, anchored, kept - anchored)
    numbered = verify(links[:kept], numbered_to=len(links)).bad
    assert numbered is not None
    assert numbered.id == kept + 1


@given(st.data(), chains)
def test_a_chain_written_anew_is_found_up_to_the_last_anchor(data: st.DataObject, links: list[ChainLink]) -> None:
    number, anchored = data.draw(st.integers(1, len(links))), data.draw(st.integers(1, len(links)))
    forged = [link._replace(actor=link.actor + "x") if link.id == number else link for link in links]
    verdict = verify(chained(forged), [head_of(links[anchored - 1])])
    if number <= anchored:
        assert verdict.bad is not None
        assert verdict.bad.id == anchored
    else:
        assert (verdict.bad, verdict.anchored) == (None, anchored)


def test_a_row_that_is_not_in_the_chain_is_bad() -> None:
    links = chained([ROW, ROW])
    bad = verify([*links, ROW._replace(id=3)]).bad
    assert bad is not None
    assert (bad.id, "not in the chain" in bad.why) == (3, True)


def told(act: str, before: Head, **more: int) -> ChainLink:
    detail = f'{{"to":{before.id},"hash":"{before.hash}","rows":{more.get("rows", 1)}}}'
    return ROW._replace(act=act, detail=detail)


@pytest.mark.parametrize("act", [PRUNED, TAKEN_IN])
def test_the_beginning_is_right_only_if_a_row_of_the_chain_says_so(act: str) -> None:
    whole = chained([ROW, ROW, ROW, ROW])
    before = head_of(whole[1])
    rest = [*whole[2:], *chained([told(act, before)], head_of(whole[3]))]
    assert verify(rest, [head_of(whole[0])], begun_after=before).bad is None
    without = verify(whole[2:], begun_after=before).bad
    assert without is not None
    assert (without.id, "pruned" in without.why) == (3, True)
    another = verify(rest[1:], begun_after=head_of(whole[2])).bad
    assert another is not None
    assert another.id == 4
    unnoted = verify(rest, begun_after=before, begins_as_noted=False).bad
    assert unnoted is not None
    assert (unnoted.id, "no anchor says so" in unnoted.why) == (3, True)
    unlike = verify(rest, [Head(2, GENESIS)], begun_after=before).bad
    assert unlike is not None
    assert unlike.id == 2


def test_rows_that_were_taken_in_are_counted_and_a_forged_count_harms_nobody() -> None:
    assert verify(chained([ROW, told(TAKEN_IN, START, rows=7)])).taken_in == 7
    assert verify(chained([ROW._replace(act=TAKEN_IN, detail='{"to":"x"}')])).taken_in == 0


def test_two_anchors_of_one_row_cannot_both_be_right() -> None:
    links = chained([ROW, ROW])
    bad = verify(links, [head_of(links[0]), Head(1, GENESIS)]).bad
    assert bad is not None
    assert bad.id == 1
