"""Agents that live elsewhere: with a helper that knows nothing of them, and where there is no helper at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hive.agents.spec import check
from hive.domain import AgentSpec, RestartPolicy, RuntimeKind, Tier
from hive.errors import BadRequest, NotFound, NotSupported
from hive.settings.table import Sandbox, Settings
from tests.control.box import AWAKE, SLEEPY, Box, is_alive
from tests.waiting import until

VISITOR = check(AgentSpec(name="visitor", runtime=RuntimeKind.EXTERNAL, tier=Tier.HIGH, tenant="acme"))
NO_HELPER = msgspec.structs.replace(AWAKE, sandbox=Sandbox(enabled=False))


async def start(box: Box, settings: Settings) -> str:
    """A daemon and a proxy, and the visitor's id; where there is a helper it was started before."""
    await box.start_daemon(settings)
    await box.start_proxy()
    view = await box.services.agents.create(VISITOR, "uid:0")
    assert (view["status"], view["pid"], view["tier"]) == ("running", None, "high")
    return str(view["id"])


def gate(box: Box, agent: str) -> str:
    return box.proxy.gates[agent]


@pytest.mark.parametrize("settings", [SLEEPY, NO_HELPER], ids=["beside a helper", "without a helper"])
async def test_it_may_ask_from_start_to_stop_and_again(box: Box, settings: Settings) -> None:
    if settings.sandbox.enabled:
        await box.start_helper()
    agent = await start(box, settings)
    await until(lambda: gate(box, agent) == "open")
    assert box.proxy.rows[agent].model_digest
    view = await box.view("visitor")
    assert view["why"] == "awake: this agent is never put to sleep (idle_s = 0)"
    await box.stop("visitor", "uid:0")
    await until(lambda: gate(box, agent) == "refused")
    await box.start("visitor", "uid:0")
    await until(lambda: gate(box, agent) == "open")
    await box.services.agents.remove("visitor", "uid:0")
    await until(lambda: agent not in box.proxy.rows)


@pytest.mark.parametrize("settings", [AWAKE, NO_HELPER], ids=["beside a helper", "without a helper"])
async def test_applied_it_may_ask_at_once_as_where_it_is_created(box: Box, settings: Settings) -> None:
    """It stayed `created`, and its token was refused until somebody typed `hive agent start`."""
    if settings.sandbox.enabled:
        await box.start_helper()
    await box.start_daemon(settings)
    await box.start_proxy()
    apply = box.services.agents.apply
    assert (await apply(VISITOR, "uid:0", dry_run=True))["agent"] is None
    applied = await apply(VISITOR, "uid:0")
    assert applied["agent"] is not None
    agent = applied["agent"]["id"]
    assert (applied["created"], applied["agent"]["status"], applied["agent"]["pid"]) == (True, "running", None)
    await until(lambda: gate(box, agent) == "open")
    await box.stop(agent, "uid:0")
    stays = await apply(msgspec.structs.replace(VISITOR, tier=Tier.LOW), "uid:0")
    assert stays["agent"] is not None
    assert stays["agent"]["status"] == "stopped", "an operator wants it so"


async def test_what_was_described_as_a_process_and_never_started_may_ask_once_it_lives_elsewhere(box: Box) -> None:
    await box.everything()
    bob = AgentSpec(name="visitor", command=["/bin/true"])
    for spec, status in ((bob, "created"), (VISITOR, "running")):
        applied = await box.services.agents.apply(spec, "uid:0")
        assert applied["agent"] is not None
        assert applied["agent"]["status"] == status


async def test_a_helper_that_comes_and_finds_nothing_of_it_changes_nothing(box: Box) -> None:
    agent = await start(box, AWAKE)
    await box.start_helper()
    await until(lambda: box.daemon is not None and box.daemon._reconciled.is_set())
    assert (await box.view(agent))["status"] == "running"
    await box.stop_helper()
    await box.stop(agent, "uid:0")
    assert (await box.view(agent))["status"] == "stopped"


@pytest.mark.parametrize("settings", [AWAKE, NO_HELPER], ids=["beside a helper", "without a helper"])
async def test_it_may_still_ask_after_the_daemon_began_anew(box: Box, settings: Settings) -> None:
    if settings.sandbox.enabled:
        await box.start_helper()
    agent = await start(box, settings)
    await box.stop_daemon()
    await box.start_daemon(settings)
    await until(lambda: gate(box, agent) == "open")
    assert (await box.view(agent))["status"] == "running"


async def test_it_comes_back_after_hive_went_down_but_not_where_an_operator_stopped_it(box: Box) -> None:
    await box.start_helper()
    agent = await start(box, AWAKE)
    for act, status in (
        (lambda: box.services.agents.shutdown("hive"), "running"),
        (lambda: box.stop(agent, "uid:0"), "stopped"),
    ):
        await act()
        await box.stop_daemon()
        await box.start_daemon()
        await box.until(agent, status)


@pytest.mark.parametrize("settings", [AWAKE, NO_HELPER], ids=["beside a helper", "without a helper"])
async def test_it_cannot_be_put_to_sleep_and_is_told_so_at_once(box: Box, settings: Settings) -> None:
    if settings.sandbox.enabled:
        await box.start_helper()
    agent = await start(box, settings)
    await until(lambda: box.services.health.view()["helper"]["connected"])
    with pytest.raises(NotSupported, match="lives elsewhere"):
        await box.pause(agent, timeout_s=30, now=False, actor="uid:0")
    assert (await box.view(agent))["status"] == "running"
    await until(lambda: gate(box, agent) == "open")


async def test_a_process_that_became_an_agent_elsewhere_does_not_outlive_its_stop(box: Box) -> None:
    await box.everything()
    view = await box.create("visitor")
    await box.services.agents.apply(VISITOR, "uid:0")
    await box.stop("visitor", "uid:0")
    await until(lambda: not is_alive(view["pid"]))


async def test_without_a_helper_nothing_is_missing_and_other_agents_are_refused(box: Box) -> None:
    await start(box, NO_HELPER)
    health = box.services.health.view()
    assert health["helper"] == {"connected": True, "enabled": False}
    assert not [problem for problem in health["problems"] if "helper" in problem]
    with pytest.raises(NotSupported, match=r"runs no agents itself: \[sandbox\] enabled = false"):
        await box.create("bob")
    with pytest.raises(NotFound):
        await box.view("bob")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", ["/bin/true"]),
        ("port", 80),
        ("idle_s", 5.0),
        ("env", {"A": "1"}),
        ("autostart", True),
        ("egress", []),
    ],
)
def test_what_only_a_runtime_could_do_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"^{field}: an external agent has none that Hive knows"):
        check(msgspec.structs.replace(AgentSpec(name="a", runtime=RuntimeKind.EXTERNAL), **{field: value}))


def test_what_is_left_out_is_what_fits_it() -> None:
    assert (VISITOR.idle_s, VISITOR.restart) == (0.0, RestartPolicy.UNLESS_STOPPED)
    assert check(VISITOR) == VISITOR
