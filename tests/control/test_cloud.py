"""The cloud guard at a real daemon: the seed of the first start, the words of the API, and what outlives restarts."""

from __future__ import annotations

from typing import Any

import pytest

from hive.control.cloud import SEED
from hive.control.left_box import EVENT
from hive.domain import CloudUse, UsageEvent
from hive.store.audit import Filter
from tests.control.box import Box, Caller

CONFIG = "/api/v1/config"


def word(box: Box) -> str:
    return box.services.effects.settings.inference.cloud


async def answered(box: Box, method: str, body: Any = None) -> Any:
    return await Caller(box.services.paths.api_socket).ask(method, CONFIG, body)


async def test_the_environment_says_it_at_the_first_start_alone(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "true")
    await box.start_daemon()
    assert word(box) == "fallback"
    assert await answered(box, "GET") == {"allowCloudFallback": True}
    assert await answered(box, "PUT", {"allowCloudFallback": False}) == {"allowCloudFallback": False}
    assert word(box) == "asked"
    await box.stop_daemon()
    await box.start_daemon()
    assert word(box) == "asked", "it is kept, and the seed counts no more"
    rows = await box.audit(Filter(act="order.change_cloud"))
    assert [row["detail"]["settings"] for row in rows] == [["inference.cloud=asked"]]
    assert [row["detail"]["value"] for row in await box.audit(Filter(act="config.seeded"))] == ["fallback"]


async def test_a_later_start_is_no_first_one(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    await box.start_daemon()
    await box.stop_daemon()
    monkeypatch.setenv(SEED, "true")
    await box.start_daemon()
    assert word(box) == "asked"


async def test_under_never_it_says_no_and_saying_no_widens_nothing(box: Box) -> None:
    await box.start_daemon()
    await box.services.config.change({"inference.cloud": "never"}, "uid:0")
    assert await answered(box, "GET") == {"allowCloudFallback": False}
    assert await answered(box, "PUT", {"allowCloudFallback": False}) == {"allowCloudFallback": False}
    assert word(box) == "never"


async def test_an_agents_word_outlives_the_daemon(box: Box) -> None:
    await box.everything()
    await box.create("bob", cloud=CloudUse.NEVER)
    await box.stop_daemon()
    await box.start_daemon()
    assert (await box.view("bob"))["cloud"] == "never"
    life = box.life("bob")
    assert box.services.effects.row(life.agent, life).cloud is CloudUse.NEVER


async def test_a_request_that_left_is_an_event_with_their_number(box: Box) -> None:
    await box.everything()
    agent = (await box.create("bob"))["id"]
    assert box.daemon is not None
    one = UsageEvent(
        id="e-1", epoch="e", event_no=1, agent_id=agent, tenant="default", model="sonnet", backend="remote",
        endpoint="/v1/chat/completions", far=True,
    )  # fmt: skip
    box.daemon._used([one, one])
    box.daemon._used([one])

    async def told() -> list[dict[str, Any]]:
        return await box.audit(Filter(act=EVENT))

    await box.services.audit_log.flush()
    (row,) = await told()
    assert row["detail"] == {"name": "bob", "model": "sonnet", "tenant": "default", "requests": 2}
