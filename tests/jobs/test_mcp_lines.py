"""The sieve of an MCP server's lines: what passes, however its bytes come."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.jobs import mcp_lines
from hive.jobs.mcp_lines import TOO_LONG, UNASKED_MAX, UNREADABLE, Flooded, MessageSieve, Sifted

ANSWER = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": []}}'
TEXT_ID = b'{"jsonrpc": "2.0", "result": {}, "id": "a"}'
NOISE = [b"", b"starting", b"[1]", b"null", b'{"id": null}', b'{"id": 7, "result": {}}', b'{"method": "x"}', b"\xff"]
QUESTION = b'{"jsonrpc": "2.0", "id": 5, "method": "ping"}'


def sifted(data: bytes, cuts: list[int], *asked: int | str, limit: int = 10_000) -> list[Sifted]:
    """Messages that pass of `data`, which comes in pieces."""
    sieve, found, at = MessageSieve(limit), [], 0
    for id in asked:
        sieve.asked(id)
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        found += sieve.feed(data[at:cut])
        at = cut
    return found


@given(st.lists(st.sampled_from([*NOISE, ANSWER, TEXT_ID, QUESTION]), max_size=12), st.lists(st.integers(0, 600)))
def test_what_passes_does_not_depend_on_how_its_bytes_come(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    found = sifted(data, cuts, 1, "a")
    assert found == sifted(data, [], 1, "a")
    assert [one.message for one in found].count(ANSWER) == (ANSWER in lines)
    assert {one.message for one in found} <= {ANSWER, TEXT_ID, QUESTION}


@given(st.booleans(), st.lists(st.integers(0, 9000)), st.integers(3000, 8000))
def test_an_answer_too_long_tells_whose_it_is_and_the_next_one_passes(
    is_first: bool, cuts: list[int], size: int
) -> None:
    long = {"id": 1, "result": "x" * size} if is_first else {"result": "x" * size, "id": 1}
    data = json.dumps(long).encode() + b"\n" + TEXT_ID + b"\n"
    assert sifted(data, cuts, 1, "a", limit=2000) == [Sifted(b"", 1, TOO_LONG), Sifted(TEXT_ID, "a")]


def test_an_id_within_a_text_is_not_taken_for_the_answers_own() -> None:
    text = json.dumps({"result": {"text": 'see "id": 1' + "x" * 5000}, "id": 2}).encode()
    assert sifted(text + b"\n", [], 1, 2, limit=2000) == [Sifted(b"", 2, TOO_LONG)]


def test_what_cannot_be_read_is_told_to_whom_it_answers() -> None:
    for line in (b'{"id": 1, "result": ' + b"[" * 9000 + b"}", b'{"id": 1, "result": "\xff', b'{"id": 1, "result": {'):
        assert sifted(line + b"\n", [], 1, limit=20_000) in ([Sifted(b"", 1, UNREADABLE)], [Sifted(line, 1)])


def test_more_than_anybody_reads_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sieve = MessageSieve()
    sieve.feed(b"{}\n" * UNASKED_MAX)
    sieve.asked(1)  # a question begins the count anew
    sieve.feed(b"{}\n" * UNASKED_MAX)
    with pytest.raises(Flooded, match="nobody asked for"):
        sieve.feed(b"{}\n")
    monkeypatch.setattr(mcp_lines, "ENDLESS_BYTES", 100_000)
    with pytest.raises(Flooded, match="without an end"):
        sifted(b"x" * 200_000, list(range(0, 200_000, 1000)), 1)


def test_an_endless_line_is_not_kept() -> None:
    sieve = MessageSieve(limit=10_000)
    for _ in range(1000):
        sieve.feed(b"x" * 1000)
        assert sieve.held <= 10_000
    assert sieve.held < 1000


def test_a_line_that_is_given_up_is_left_out_whole() -> None:
    sieve = MessageSieve()
    sieve.asked(1)
    sieve.feed(b'{"id": 1, "result": "' + b"x" * 5000)
    sieve.give_up()
    assert sieve.held < 1000
    assert sieve.feed(b'"}\n') == [Sifted(b"", 1, TOO_LONG)]
