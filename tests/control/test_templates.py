"""Templates in a real daemon beside a real helper: what the helper is told of one, and what is told of it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from hive.control.templates import TemplateDesk
from hive.domain import Agent, AgentSpec, Isolation
from hive.errors import BadRequest, NotPermitted, WrongState
from hive.link.helper import TemplateStat
from hive.link.specs import TemplateSpec
from hive.settings.templates import TemplateRow
from hive.store import template_uids
from tests.control.box import AWAKE, Box

ROWS = {
    "lg": TemplateRow(
        python="/venv/bin/python",
        imports="json, email",
        warm="openai",
        script="/srv/ann.py",
        env="A=1",
        memory_mb=256,
    ),
    "other": TemplateRow(python="/venv/bin/python", imports="json", owner="acme"),
}
WITH_TEMPLATES = msgspec.structs.replace(AWAKE, templates=ROWS)


def spec(name: str = "a", **more: Any) -> AgentSpec:
    return AgentSpec(**{"name": name, "command": ["-m", "agent"], "template": "lg", **more})


def desk_of(box: Box) -> TemplateDesk:
    assert box.daemon is not None
    return box.daemon._templates


async def test_the_helper_is_told_of_a_template_with_its_block_once_agents_have_users(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(WITH_TEMPLATES)
    desk = desk_of(box)
    agent = Agent(id="a1", spec=spec())
    assert await desk.spec_of(agent) == TemplateSpec(
        name="lg",
        python="/venv/bin/python",
        imports=["json", "email"],
        warm=["openai"],
        script="/srv/ann.py",
        env={"A": "1"},
        memory_mb=256,
    )
    assert await desk.spec_of(Agent(id="b", spec=spec(template=None))) is None
    desk._has_uids = True
    with pytest.raises(WrongState, match="a uid that is not of lg's block"):
        await desk.spec_of(msgspec.structs.replace(agent, uid=70001))
    assert box.daemon is not None
    block = await box.daemon._database.write(
        lambda conn: template_uids.reserve(conn, "lg", "default", first_uid=70000, in_use=())
    )
    told = await desk.spec_of(msgspec.structs.replace(agent, uid=block.first + 1))
    assert told is not None
    assert (told.first_uid, told.uids) == (block.first, 256)
    with pytest.raises(WrongState):
        await desk.spec_of(msgspec.structs.replace(agent, uid=block.first))  # the template's own
    assert (await desk.one("lg"))["first_uid"] == block.first


async def test_an_agent_with_a_user_gets_one_of_its_templates_block(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(WITH_TEMPLATES, isolation=Isolation.UID)
    agents = box.services.agents
    made = [await agents.apply(spec(name), "uid:0") for name in ("a", "b")]
    plain = await agents.apply(AgentSpec(name="c", command=["/bin/true"]), "uid:0")
    first, second, third = (one["agent"]["uid"] for one in (*made, plain) if one["agent"] is not None)
    block = (await desk_of(box).one("lg"))["first_uid"]
    assert block is not None
    assert (first, second) == (block + 1, block + 2)
    assert third == block + 256


async def test_another_template_or_another_tenant_is_refused_by_apply(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(WITH_TEMPLATES)
    agents = box.services.agents
    await agents.apply(spec(), "uid:0")
    for template in ("other", None):
        with pytest.raises(WrongState, match="a was created with lg, and stays so"):
            await agents.apply(spec(template=template), "uid:0", dry_run=True)
    with pytest.raises(NotPermitted, match="lg is for agents of tenant default"):
        await agents.apply(spec(tenant="acme"), "uid:0")
    with pytest.raises(BadRequest, match="there is none named lh"):
        await agents.apply(spec("b", template="lh"), "uid:0")
    await agents.apply(AgentSpec(name="plain", command=["/bin/true"]), "uid:0")
    with pytest.raises(WrongState, match="plain was created with none"):
        await agents.apply(spec("plain"), "uid:0")
    changed = await agents.apply(spec(idle_s=5.0), "uid:0")
    assert changed["changed"] == ["idle_s"]


async def test_the_template_of_an_agent_outlives_the_daemon_and_one_that_is_gone_is_said_at_the_start(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(WITH_TEMPLATES)
    await box.services.agents.apply(spec(), "uid:0")
    await box.stop_daemon()
    await box.start_daemon(AWAKE)  # hive.conf describes none any more
    life = box.services.roster.find("a")
    assert life.agent.spec.template == "lg"
    with pytest.raises(BadRequest, match="there is none named lg"):
        await life.start("uid:0")
    changed = await box.services.agents.apply(spec(idle_s=5.0), "uid:0")  # what else is changed needs no template
    assert changed["changed"] == ["idle_s"]


async def test_one_that_fails_and_one_that_is_stale_are_told_once(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    await box.start_helper()
    await box.start_daemon(WITH_TEMPLATES)
    desk = desk_of(box)
    failed = TemplateStat(state="failed", why="template lg does not start: no")
    stale = TemplateStat(state="ready", is_stale=True, agents=("a1",))
    with caplog.at_level(logging.WARNING):
        for found in (failed, failed, TemplateStat(state="ready"), stale, stale, failed):
            desk._tell({"lg": found})
    told = [record.getMessage().split()[0] for record in caplog.records if "template_" in record.getMessage()]
    assert told == ["template_failed", "template_stale", "template_failed"]
    desk._seen = {"lg": failed}
    assert desk.failed == {"lg": "template lg does not start: no"}
    assert [one.code for one in box.services.health.conditions() if one.code == "template_failed"]
