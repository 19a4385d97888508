"""The wish that a supervisor waits, on its way to the helper, which is played."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from hive.errors import NotFound
from hive.host.memory_box import BoxMemory
from hive.pooling import preparing
from hive.pooling.preparing import Preparing
from hive.sandbox.client import SandboxClient
from tests.waiting import until

ROOMY = BoxMemory(64 << 30, 32 << 30)


class PlayedHelper:
    """Answers when `may_answer` is set; `fails`: with an error."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def slot_prepare(self, id: str) -> None:
        self.asked.append(id)
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if self.fails:
            raise NotFound("no such model")


def made(helper: PlayedHelper, box: BoxMemory = ROOMY) -> Preparing:
    return Preparing(cast("SandboxClient", cast("Any", helper)), box=lambda: box)


async def test_what_is_wished_meanwhile_is_asked_for_last_and_once() -> None:
    helper = PlayedHelper()
    wish = made(helper)
    helper.may_answer.clear()
    wish.want("a", at_once=True)
    await until(lambda: helper.asked == ["a"])
    for slot in ("b", "c", "d"):
        wish.want(slot)
    helper.may_answer.set()
    await until(lambda: helper.asked == ["a", "d"])
    wish.want("d")
    await asyncio.sleep(3 * preparing.LATER_S)
    assert helper.asked == ["a", "d"]


async def test_a_start_takes_what_waited_so_that_it_is_asked_for_again() -> None:
    helper = PlayedHelper()
    wish = made(helper)
    wish.want("a")
    await until(lambda: helper.asked == ["a"])
    wish.used("b")
    wish.want("a")
    wish.used("a")
    wish.want("a")
    await until(lambda: helper.asked == ["a", "a"])


async def test_it_is_asked_for_again_before_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "RENEW_S", 0.0)
    helper = PlayedHelper()
    wish = made(helper)
    wish.want("a", at_once=True)
    await until(lambda: len(helper.asked) >= 2)
    wish.want("")
    await until(lambda: helper.asked[-1] == "")


async def test_an_error_is_not_asked_for_again_at_once() -> None:
    helper = PlayedHelper()
    helper.fails = True
    wish = made(helper)
    for _ in range(3):
        wish.want("a", at_once=True)
        await until(lambda: helper.asked == ["a"])
        await asyncio.sleep(0)
    wish.helper_here()
    wish.want("a", at_once=True)
    await until(lambda: helper.asked == ["a", "a"])


async def test_on_a_box_without_memory_none_waits() -> None:
    helper = PlayedHelper()
    wish = made(helper, BoxMemory(1 << 30, preparing.ROOM_BYTES - 1))
    wish.want("a")
    await until(lambda: helper.asked == [""])
