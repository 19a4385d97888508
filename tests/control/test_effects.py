"""The effects of the daemon: what an agent finds in its environment, where it is reached, boots, memory, wake times."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.wake_queue import WakeQueue
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects, environment, has_own_network
from hive.domain import (
    MOUNTED_SOCKET,
    Agent,
    AgentSpec,
    AgentStatus,
    Dialect,
    DockerSpec,
    FirecrackerSpec,
    RestartPolicy,
    RuntimeKind,
    SleepDepth,
    WakeCause,
)
from hive.store import agents, runtime_settings
from hive.store.runtime_settings import BOOT
from hive.store.usage import CostSums
from tests.control.box import SLEEPER, Box
from tests.control.held_database import cancelled_while_it_writes
from tests.waiting import until

PROCESS = AgentSpec(name="bob", command=SLEEPER, port=9000)
DOCKER = AgentSpec(name="bob", runtime=RuntimeKind.DOCKER, docker=DockerSpec(image="busybox"), port=9000)
FIRECRACKER = AgentSpec(
    name="bob", runtime=RuntimeKind.FIRECRACKER, firecracker=FirecrackerSpec(kernel="/k", rootfs="/r"), port=9000
)
LISTED = msgspec.structs.replace(PROCESS, egress=["192.0.2.0/24"])
NOWHERE = msgspec.structs.replace(PROCESS, egress=[])


def agent_of(spec: AgentSpec, status: AgentStatus = AgentStatus.CREATED) -> Agent:
    return Agent(id="a1", spec=spec, status=status)


async def effects_of(box: Box) -> DaemonEffects:
    """Of a daemon with its helper and no proxy."""
    if box.helper is None:
        await box.start_helper()
    await box.start_daemon()
    assert box.daemon is not None
    return box.daemon.effects


# Environment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [DOCKER, FIRECRACKER, NOWHERE])
def test_in_a_network_of_its_own_hive_is_where_every_sdk_can_be_pointed_at(spec: AgentSpec) -> None:
    assert has_own_network(spec)
    found = environment(agent_of(spec), port=None, token="hm_x", socket="/s", dialect=Dialect.OLLAMA, model=None)
    assert (found["OLLAMA_HOST"], found["OPENAI_BASE_URL"]) == ("http://127.0.0.1:11434", "http://127.0.0.1:11434/v1")
    assert found["OPENAI_API_KEY"] == "hm_x"
    sockets = {RuntimeKind.DOCKER: MOUNTED_SOCKET, RuntimeKind.PROCESS: "/s", RuntimeKind.FIRECRACKER: None}
    assert found.get("HIVE_PROXY_SOCKET") == sockets[spec.runtime]


def test_process_agents_have_a_network_of_their_own_where_their_units_have() -> None:
    assert [has_own_network(PROCESS, processes_too=units) for units in (False, True)] == [False, True]
    assert [has_own_network(LISTED, processes_too=units) for units in (False, True)] == [False, False]


async def test_one_that_names_networks_finds_hive_at_the_proxys_port_of_the_host(box: Box) -> None:
    effects = await effects_of(box)
    await box.start_proxy()
    spec = await effects.sandbox_spec(agent_of(LISTED))
    assert spec.proxy_port == effects.started_with_port["a1"] > 0
    assert spec.env["OPENAI_BASE_URL"] == f"http://127.0.0.1:{spec.proxy_port}/v1"
    assert effects.row(agent_of(LISTED), None).address == "127.0.0.1:9000"
    assert (await effects.sandbox_spec(agent_of(NOWHERE))).proxy_port is None


@given(st.dictionaries(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1), st.text(max_size=5)))
def test_nothing_an_agent_brings_replaces_what_is_hives(env: dict[str, str]) -> None:
    ours = environment(agent_of(PROCESS), port=1, token="t", socket="/s", dialect=Dialect.OPENAI, model="m")
    mine = msgspec.structs.replace(PROCESS, env={**env, "OPENAI_API_KEY": "stolen"})
    found = environment(agent_of(mine), port=1, token="t", socket="/s", dialect=Dialect.OPENAI, model="m")
    assert found == {**env, **ours}


async def test_a_private_agent_is_defined_without_a_proxy_and_does_not_care_where_that_listens(box: Box) -> None:
    effects = await effects_of(box)
    effects.started_with_port["a1"] = 11435  # by an earlier spec
    spec = await effects.sandbox_spec(agent_of(NOWHERE))
    assert spec.env["OLLAMA_HOST"] == "http://127.0.0.1:11434"
    assert "a1" not in effects.started_with_port


@pytest.mark.parametrize(("spec", "address"), [(PROCESS, "127.0.0.1:9000"), (DOCKER, None), (FIRECRACKER, None)])
async def test_what_listens_in_a_network_of_its_own_is_nowhere_on_the_host_until_it_was_started(
    box: Box, spec: AgentSpec, address: str | None
) -> None:
    """Else a caller of the agent would be led to any process with that port on the host."""
    assert (await effects_of(box)).row(agent_of(spec), None).address == address


# Boots ------------------------------------------------------------------------------------------------------------


async def noted(box: Box, boot: str) -> None:
    assert box.daemon is not None
    await box.daemon._database.write(lambda conn: runtime_settings.put(conn, BOOT, boot, actor="hive", now=1.0))


async def test_a_boot_is_new_until_it_is_noted_and_never_where_none_was(box: Box) -> None:
    """The daemon itself notes its boot soon after its start, so another one is written down behind its back."""
    effects = await effects_of(box)
    assert not await effects.is_new_boot(), "none was noted"
    assert box.daemon is not None
    while await box.daemon._database.read(lambda conn: runtime_settings.get(conn, BOOT)) is None:  # noqa: ASYNC110 - a database sends no events
        await asyncio.sleep(0.01)
    await noted(box, "another-boot")
    effects._is_new_boot = None  # as a daemon that has just started
    assert await effects.is_new_boot()
    await effects.note_boot()
    assert not await effects.is_new_boot()
    effects._is_new_boot = None
    assert not await effects.is_new_boot()


async def test_after_a_boot_what_ran_runs_again_and_what_was_stopped_does_not(box: Box) -> None:
    """The processes end while no daemon is there and the boot id is another one: as far as Hive can see, a reboot."""
    await box.everything()
    for name, restart in (("ran", RestartPolicy.NO), ("stopped", RestartPolicy.UNLESS_STOPPED)):
        await box.create(name=name, restart=restart)
    await box.stop("stopped", "uid:0")
    await noted(box, "another-boot")
    ran = (await box.view("ran"))["id"]
    await box.stop_daemon()
    assert box.helper is not None
    await box.helper._held[ran].stop(grace_s=0)
    effects = await effects_of(box)
    assert await effects.is_new_boot()
    await box.start_proxy()  # whose port an agent needs in its environment
    await box.until(ran, "running")
    views = {view["name"]: view["status"] for view in await box.services.agent_views.all()}
    assert views == {"ran": "running", "stopped": "stopped"}
    assert (await box.view("ran"))["reason"].startswith("started, pid ")
    assert box.services.counters.answer(len(box.services.roster))["errors"] == 0
    await until(lambda: not effects._is_new_boot)


async def test_a_caller_that_leaves_while_an_agent_is_saved_has_no_row_written_twice(box: Box) -> None:
    """Work that had begun was committed, and its rows were given back to be written again."""
    effects = await effects_of(box)
    assert box.daemon is not None
    database, bob = box.daemon._database, agent_of(PROCESS, AgentStatus.RUNNING)
    await database.write(lambda conn: agents.insert(conn, bob))
    life = AgentLifecycle(bob, effects, WakeQueue(effects))
    effects.changed(bob, msgspec.structs.replace(bob, status=AgentStatus.STOPPED), "uid:0")
    await cancelled_while_it_writes(database, life.keep_awake(99.0, "uid:0"))
    assert [event["kind"] for event in await box.services.audit_log.past(10) if event["agent"] == "a1"] == [
        "agent.stopped"
    ]
    assert [found.keep_awake_until for found in await database.read(agents.all)] == [99.0]


# Memory and figures -----------------------------------------------------------------------------------------------


async def test_the_world_knows_this_hosts_memory(box: Box) -> None:
    memory = (await effects_of(box)).memory()
    assert memory.available_bytes is not None
    assert 0 < memory.available_bytes < 1 << 50
    assert memory.swap_free_bytes is not None


async def test_a_deeper_sleep_is_an_event_and_wanting_one_is_none(box: Box) -> None:
    effects = await effects_of(box)
    light = msgspec.structs.replace(
        agent_of(PROCESS, AgentStatus.PAUSED), depth=SleepDepth.LIGHT, depth_goal=SleepDepth.LIGHT, generation=7
    )
    wanted = msgspec.structs.replace(light, depth_goal=SleepDepth.DEEP)
    deep = msgspec.structs.replace(wanted, depth=SleepDepth.DEEP)
    effects.changed(light, wanted, "idle")
    effects.changed(wanted, deep, "idle")
    effects.changed(deep, light, "hive")
    events = [event for event in await box.services.audit_log.past(10) if event["agent"] == "a1"]
    assert [(event["kind"], event["from"], event["to"], event["actor"]) for event in events] == [
        ("agent.sleeps_deep", "light", "deep", "idle"),
        ("agent.sleeps_light", "deep", "light", "hive"),
    ]
    assert box.services.counters.answer(len(box.services.roster))["deep_sleeps"] == 1


def test_wake_times_are_kept_by_the_depth_an_agent_slept_at() -> None:
    counters = Counters([], CostSums())
    for took_ms, depth in ((1.0, SleepDepth.LIGHT), (3.0, SleepDepth.LIGHT), (9.0, SleepDepth.DEEP)):
        counters.woke(WakeCause.INGRESS, took_ms, depth)
    counters.woke(WakeCause.REQUEST, 5.0, SleepDepth.AWAKE)  # thawed again before it was committed asleep
    found = counters.answer(3)
    assert found["wakes"] == 4
    assert found["wake_ms"] == {"p50": 3.0, "p99": 9.0}
    assert found["wake_ms_from"] == {
        "light": {"p50": 1.0, "p99": 3.0, "wakes": 2},
        "deep": {"p50": 9.0, "p99": 9.0, "wakes": 1},
    }
