"""Orders to the proxy to have a prompt read: a real daemon, helper and agents; the proxy's end of the link."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from hive.domain import AgentSpec, BackendInfo, BackendKind, ModelInfo, UsageEvent
from hive.link.messages import Failed
from hive.link.prompts import Prewarmed
from hive.models.prompts import hash_prompt
from hive.settings.table import TenantRow
from hive.settings.tasks import TaskRow
from tests.control.box import AWAKE, Box
from tests.waiting import until

PROMPT = "You answer for a shop. " * 40
COMMAND = ["/bin/sleep", "1000"]
WANTED: dict[str, Any] = {"command": COMMAND, "model": "m", "system_prompt": PROMPT, "prewarm_on_start": True}
READ = Prewarmed(model="m", tokens_in=200, cached_tokens=0, took_ms=1.0)
SHARING = msgspec.structs.replace(
    AWAKE, tenants={"acme": TenantRow(cache_group="us"), "beta": TenantRow(cache_group="us")}
)


async def with_backend(box: Box, settings: Any = AWAKE) -> None:
    await box.everything(settings)
    began(box)


def began(box: Box) -> None:
    assert box.daemon is not None
    effects = box.daemon.effects
    effects.backend = BackendInfo(kind=BackendKind.VLLM, address="127.0.0.1:1", up=True)
    effects.models = [ModelInfo(name="m")]
    box.daemon._audit_log.note("backend.up")


async def settled() -> None:
    """Returns once all that was to happen has: the journal's events are heard, and what they cause is sent."""
    for _ in range(5):
        await asyncio.sleep(0.01)


async def read(box: Box, number: int = 0) -> None:
    await until(lambda: len(box.proxy.prewarms) > number)
    box.proxy.prewarms[number][1](READ)
    await until(lambda: any(row["warm_since"] for row in rows(box)))


def rows(box: Box) -> list[Any]:
    return box.services.prewarmer.view()["prompts"]


async def test_siblings_that_start_at_once_have_it_read_once_and_none_of_them_waits(box: Box) -> None:
    await with_backend(box)
    siblings = await asyncio.gather(*(box.create(f"s{number}", **WANTED) for number in range(5)))
    assert {view["status"] for view in siblings} == {"running"}, "although nobody has answered"
    await settled()
    [(wanted, _)] = box.proxy.prewarms
    assert (wanted.model, wanted.system_prompt) == ("m", PROMPT)
    assert rows(box)[0]["why"] == "being read"
    await box.pause("s0", timeout_s=5, now=False, actor="uid:0")
    assert (await box.resume("s0", "uid:0"))["status"] == "running"
    await read(box)
    await box.restart("s1", "uid:0")
    await settled()
    assert len(box.proxy.prewarms) == 1
    [row] = rows(box)
    assert row | {"warm_since": 0} == {
        "hash": hash_prompt(PROMPT),
        "bytes": len(PROMPT),
        "agents": [f"s{number}" for number in range(5)],
        "shared_by": 5,
        "tenants": ["default"],
        "model": "m",
        "prewarm": True,
        "warm_since": 0,
        "tokens": 200,
        "tokens_reused": 0,
        "why": "kept by the backend",
    }
    await box.stop("s2", "uid:0")
    await box.services.agents.remove("s3", "uid:0")
    await box.services.agents.apply(AgentSpec(name="s4", **{**WANTED, "system_prompt": "Another."}), "uid:0")
    assert [row["agents"] for row in rows(box)] == [["s0", "s1"], ["s4"]]


async def test_another_run_of_the_backend_reads_it_again_and_nothing_else_does(box: Box) -> None:
    await with_backend(box)
    await box.create("bob", **WANTED)
    await box.create("silent", **{**WANTED, "prewarm_on_start": False, "system_prompt": "Not ahead."})
    await read(box)
    began(box)
    await until(lambda: len(box.proxy.prewarms) == 2)
    box.proxy.prewarms[1][1](READ)
    began(box)
    await until(lambda: len(box.proxy.prewarms) == 3)
    box.proxy.prewarms[2][1](READ)
    await box.restart("bob", "uid:0")
    await settled()
    assert len(box.proxy.prewarms) == 3
    assert {wanted.system_prompt for wanted, _ in box.proxy.prewarms} == {PROMPT}


async def test_what_began_before_the_backend_did_tells_nothing_about_it(box: Box) -> None:
    await with_backend(box)
    await box.create("bob", **WANTED)
    await until(lambda: len(box.proxy.prewarms) == 1)
    began(box)
    await until(lambda: len(box.proxy.prewarms) == 2)
    box.proxy.prewarms[0][1](READ)
    await settled()
    assert rows(box)[0]["warm_since"] is None


async def test_what_goes_wrong_is_logged_shown_and_tried_again_when_something_changed(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hive.daemon")
    await with_backend(box)
    await box.create("bob", **WANTED)
    await until(lambda: len(box.proxy.prewarms) == 1)
    box.proxy.prewarms[0][1](Failed(code="backend_unavailable", message="nobody answers"))
    await until(lambda: rows(box)[0]["why"] == "nobody answers")
    assert (await box.view("bob"))["status"] == "running"
    await box.create("ann", **WANTED)
    await settled()
    assert len(box.proxy.prewarms) == 1, "not again at once"
    await box.start_proxy()
    await read(box)
    said = [record.getMessage() for record in caplog.records if "prompt_" in record.getMessage()]
    assert said[0] == f"prompt_not_read agent=bob prompt={hash_prompt(PROMPT)} model=m error=nobody answers"
    assert said[1].startswith("prompt_read ")
    assert "You answer" not in caplog.text, "a prompt is no business of a log's"


async def test_a_request_that_reused_it_shows_that_the_backend_has_it(box: Box) -> None:
    await with_backend(box)
    view = await box.create("bob", **{**WANTED, "prewarm_on_start": False})
    assert box.daemon is not None
    event = UsageEvent(
        id="e-1",
        epoch="e",
        event_no=1,
        agent_id=view["id"],
        tenant="default",
        model="m",
        backend="vllm",
        endpoint="/v1/chat/completions",
        tokens_in=260,
        cached_tokens=20,
        created_at=5.0,
    )
    box.daemon._used([event])
    assert (rows(box)[0]["warm_since"], rows(box)[0]["tokens_reused"]) == (None, 20)
    box.daemon._used([msgspec.structs.replace(event, cached_tokens=240)])
    assert (rows(box)[0]["warm_since"], rows(box)[0]["tokens_reused"]) == (5.0, 260)
    await box.create("ann", **WANTED)
    await settled()
    assert box.proxy.prewarms == []


async def test_tenants_share_one_reading_only_where_they_share_a_group(box: Box) -> None:
    await with_backend(box, SHARING)
    for tenant in ("acme", "beta", "other"):
        await box.create(f"of-{tenant}", **WANTED, tenant=tenant)
    await until(lambda: len(box.proxy.prewarms) == 2)
    await settled()
    assert [(row["tenants"], row["shared_by"]) for row in rows(box)] == [(["acme", "beta"], 3), (["other"], 3)]
    assert len(box.proxy.prewarms) == 2


async def test_without_a_model_or_a_backend_nothing_is_asked(box: Box) -> None:
    await box.everything()
    await box.create("early", **WANTED)
    await settled()
    assert box.proxy.prewarms == []
    await box.create("lost", **{**WANTED, "model": "elsewhere", "system_prompt": "Lost."})
    began(box)
    await until(lambda: len(box.proxy.prewarms) == 1)
    await settled()
    assert [wanted.system_prompt for wanted, _ in box.proxy.prewarms] == [PROMPT]
    assert (await box.view("lost"))["prewarm_note"].startswith("elsewhere is none of the models")
    assert (await box.view("early"))["prewarm_note"] == ""


async def test_where_no_model_is_named_it_is_said(box: Box) -> None:
    """`--prewarm` without a model never happened, and said nothing."""
    await with_backend(box)
    view = await box.create("bob", **{**WANTED, "model": None})
    assert "give the agent a `model`, or set `default_model`" in view["prewarm_note"]
    assert [row["why"] for row in rows(box)] == [view["prewarm_note"]]
    silent = await box.create("silent", **{**WANTED, "model": None, "prewarm_on_start": False})
    assert silent["prewarm_note"] == ""
    assert box.daemon is not None
    effects = box.daemon.effects
    inference = msgspec.structs.replace(effects.settings.inference, default_model="m")
    effects.settings = msgspec.structs.replace(effects.settings, inference=inference)
    assert (await box.view("bob"))["prewarm_note"] == ""
    await box.restart("bob", "uid:0")
    await until(lambda: len(box.proxy.prewarms) == 1)
    assert box.proxy.prewarms[0][0].model == "m"


# --- a model of the pool ---


class PlayedPool:
    """The pool's models as the daemon sees them: `m` and `n`, loaded or not."""

    def __init__(self, box: Box) -> None:
        assert box.daemon is not None
        self._audit_log = box.daemon._audit_log
        self.loaded: set[str] = set()
        box.daemon._prewarmer._pooled = lambda: {
            name: (ModelInfo(name=name), name in self.loaded) for name in ("m", "n")
        }

    def load(self, model: str) -> None:
        self.loaded.add(model)
        self._audit_log.note("model.loaded", target=f"{model}-1", detail={"name": model, "seconds": 1.0})


async def test_where_there_is_a_pool_only_a_prompt_is_read_when_its_model_is_loaded_and_loads_none(box: Box) -> None:
    """Nothing was read ahead where there was a pool and no active backend."""
    await box.everything(AWAKE)
    pool = PlayedPool(box)
    await box.create("bob", **WANTED)
    await settled()
    assert box.proxy.prewarms == []
    assert rows(box)[0]["why"] == "its model is not loaded, and no model is loaded to read a prompt ahead"
    pool.load("n")
    await settled()
    assert box.proxy.prewarms == []
    pool.load("m")
    await read(box)
    assert (box.proxy.prewarms[0][0].model, len(box.proxy.prewarms)) == ("m", 1)
    assert rows(box)[0]["why"] == "kept by the backend"


async def test_a_default_that_is_a_task_is_read_by_the_rung_that_a_request_would_be_given(box: Box) -> None:
    """Nobody's prompt was read ahead where the default model was a task."""
    settings = msgspec.structs.replace(
        AWAKE,
        inference=msgspec.structs.replace(AWAKE.inference, default_model="gpt-4", aliases="gpt-4 = task:plan"),
        tasks={"plan": TaskRow(models="absent | m | n")},
    )
    await box.everything(settings)
    pool = PlayedPool(box)
    await box.create("bob", **{**WANTED, "model": None})
    await settled()
    assert box.proxy.prewarms == []
    assert rows(box)[0]["why"] == "its model is not loaded, and no model is loaded to read a prompt ahead"
    pool.load("n")  # a request would step down to it
    await read(box)
    pool.load("m")
    await read(box, 1)
    assert [wanted.model for wanted, _ in box.proxy.prewarms] == ["n", "m"]
    assert (await box.view("bob"))["prewarm_note"] == ""


async def test_a_task_of_which_an_agent_may_use_no_model_is_named_with_the_reason(box: Box) -> None:
    settings = msgspec.structs.replace(AWAKE, tasks={"plan": TaskRow(models="absent")})
    await box.everything(settings)
    PlayedPool(box)
    view = await box.create("bob", **{**WANTED, "model": "task:plan"})
    assert box.services.prewarmer.view()["prompts"]
    assert (await box.view("bob"))["prewarm_note"].startswith("task:plan is none of the models"), view
    assert box.proxy.prewarms == []


async def test_another_server_of_a_model_reads_its_prompts_again_and_those_of_others_stay(box: Box) -> None:
    await box.everything(AWAKE)
    pool = PlayedPool(box)
    pool.loaded = {"m", "n"}
    await box.create("bob", **WANTED)
    await read(box)
    await box.create("eve", **{**WANTED, "model": "n"})
    await until(lambda: len(box.proxy.prewarms) == 2)
    box.proxy.prewarms[1][1](msgspec.structs.replace(READ, model="n"))
    await until(lambda: all(row["warm_since"] for row in rows(box)))
    pool.load("m")
    await until(lambda: len(box.proxy.prewarms) == 3)
    assert [wanted.model for wanted, _ in box.proxy.prewarms] == ["m", "n", "m"]
