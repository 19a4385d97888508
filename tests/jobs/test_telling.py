"""Words of a job on their way to the daemon."""

from __future__ import annotations

import pytest

from hive.errors import HiveError
from hive.jobs.telling import Telling
from hive.link.jobs import JobWord


async def test_pieces_of_text_are_told_together_and_in_their_order() -> None:
    told: list[JobWord] = []

    async def keep(words: list[JobWord]) -> None:
        told.extend(words)

    telling = Telling(keep)
    for text in ("a", "b"):
        await telling.say("delta", {"turn": 1, "text": text})
    await telling.say("turn", {"turn": 1})
    await telling.flush()
    assert [(word.event, word.data.get("text")) for word in told] == [("delta", "ab"), ("turn", None)]


@pytest.mark.parametrize("error", [HiveError("the disk is full"), OverflowError("int too big")])
async def test_whatever_keeps_a_word_from_being_told_ends_the_job(error: Exception) -> None:
    async def keep(words: list[JobWord]) -> None:
        raise error

    telling = Telling(keep)
    await telling.say("delta", {"turn": 1, "text": "a"})
    with pytest.raises(HiveError, match=str(error.args[0] if error.args else "")):
        await telling.flush()
    with pytest.raises(HiveError):
        await telling.say("delta", {"turn": 1, "text": "b"})
