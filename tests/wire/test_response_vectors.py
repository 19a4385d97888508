"""Answers that backends may send, and their handling: over a real socket, up to the data path."""

from __future__ import annotations

import asyncio

import pytest

from hive.errors import BackendDown
from tests.wire.asker import Asker
from tests.wire.response_vectors import ANSWERS, Answer
from tests.wire.test_upstream import pooled


@pytest.mark.parametrize("answer", ANSWERS, ids=[answer.name for answer in ANSWERS])
async def test_an_answer_is_taken_whole_or_given_up(answer: Answer) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01 if len(answer.pieces) < 10 else 0)
        if not answer.closes:
            await reader.read()

    async with pooled(serve) as pool:
        asker = Asker(pool)
        outcome = await asyncio.wait_for(asker.ask(), 5)
        if answer.outcome == "relayed":
            assert outcome == answer.body
            assert repr(pool).startswith(f"<Pool {pool.address} {0 if answer.closes else 1} idle")
            return
        assert isinstance(outcome, BackendDown)
        assert outcome.status == 502
        assert asker.body.startswith(answer.body)
        assert repr(pool).endswith("0 idle, 0 connecting>"), "a connection out of step is never used again"


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len({answer.name for answer in ANSWERS}) == len(ANSWERS) >= 60
