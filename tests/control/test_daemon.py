"""The daemon with a real helper, real processes and a real database; the proxy is its end of the link only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.agents.tokens import TokenKind, digest
from hive.control import registration, views
from hive.domain import AgentSpec, BackendKind, Isolation, Limits, RestartPolicy
from hive.errors import AgentBusy, HiveError, LinkLost, NotFound, NotSupported, Saturated, TimedOut, WrongState
from hive.link.messages import Activity, Leaving, Open, Refused
from hive.link.usage import UsageBatch, UsageItem
from hive.settings.table import Agents, InferenceSection, Settings
from hive.store.database import Database
from tests.control.box import AWAKE, SLEEPER, SLEEPY, Box, Caller, daemon_process, is_alive
from tests.fakes.proxy_peer import ProxyPeer
from tests.fakes.usage_events import usage_event
from tests.listening import listening
from tests.swapspace import without_swap, zram_swap
from tests.waiting import until

HEAVY = ["/usr/bin/python3", "-u", "-c", "import time; x = bytes(range(256)) * 120_000; print('up'); time.sleep(1000)"]
"""30 MB of its own."""


# Agents ---------------------------------------------------------------------------------------------------------------


async def test_an_agent_runs_with_its_way_to_the_model_in_its_environment(box: Box) -> None:
    await box.everything()
    view = await box.create(port=9000, model="llama3.2", env={"MINE": "1"})
    assert (view["status"], view["depth"], view["uid"]) == ("running", "awake", None)
    assert (view["processes"] or 0) >= 1
    environment = await box.environment(view["id"])
    tokens = box.tokens("bob")
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:11435/v1" == tokens["openai_base_url"]
    assert environment["OPENAI_API_KEY"] == tokens["model"]
    assert environment["OLLAMA_HOST"] == tokens["ollama_host"] == f"http://127.0.0.1:11435/a/{tokens['model']}"
    assert environment["HIVE_PROXY_SOCKET"] == tokens["socket"] == str(box.paths.agent_socket(view["id"]))
    assert stat.S_ISSOCK(os.stat(tokens["socket"]).st_mode)
    assert (environment["HIVE_AGENT"], environment["HIVE_AGENT_PORT"]) == ("bob", "9000")
    assert (environment["HIVE_MODEL"], environment["HIVE_DIALECT"], environment["MINE"]) == ("llama3.2", "openai", "1")
    await until(lambda: box.output("bob").path.read_text() == "up\n")


NODE = shutil.which("node")
SAYS_OPTIONS = """
require("fs").writeFileSync("environment", `HIVE_AGENT=\nNODE_OPTIONS=${process.env.NODE_OPTIONS}\n`);
setTimeout(() => 0, 1e6);
"""


MEASURED = ("rss_bytes", "held_bytes", "held_at", "swap_cached_bytes", "pss_bytes", "pss_at")
"""Parts of an agent's view that are measured anew for each answer."""


@pytest.mark.skipif(NODE is None, reason="no Node here")
@pytest.mark.parametrize("set_by_operator", [None, "--max-old-space-size=64", ""])
async def test_node_keeps_its_space_for_the_young_small_unless_its_operator_says_otherwise(
    box: Box, set_by_operator: str | None
) -> None:
    await box.everything()
    env = {} if set_by_operator is None else {"NODE_OPTIONS": set_by_operator}
    view = await box.create(command=["node", "-e", SAYS_OPTIONS], env=env)
    expected = "--max-semi-space-size=1" if set_by_operator is None else set_by_operator
    assert (await box.environment(view["id"]))["NODE_OPTIONS"] == expected


async def test_the_proxy_knows_an_agent_by_digests_only(box: Box) -> None:
    await box.everything()
    view = await box.create(port=9000)
    tokens = box.tokens(view["id"])
    row = box.proxy.rows[view["id"]]
    assert (row.model_digest, row.ingress_digest) == (digest(tokens["model"]), digest(tokens["ingress"]))
    assert (row.name, row.address, row.gate) == ("bob", "127.0.0.1:9000", "closed")
    assert box.proxy.gates[view["id"]] == "open"
    assert tokens["model"] not in repr(box.proxy.told)
    table = await box.proxy.until_table()
    assert table.internal_digest == digest(box.paths.internal_token.read_text())


async def test_pause_and_resume_reach_processes_record_and_gate(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    view = await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    assert (view["status"], view["depth"], view["pauses"]) == ("paused", "light", 1)
    assert view["why"].startswith("asleep since ")
    assert (await box.truth(agent), box.proxy.gates[agent]) == ("frozen", "asleep")
    again = await box.pause("bob", timeout_s=5, now=True, actor="uid:0")
    assert again == view | {name: again[name] for name in MEASURED}
    view = await box.resume("bob", "uid:0")
    assert (view["status"], view["wakes"], view["last_wake_cause"]) == ("running", 1, "operator")
    assert (await box.truth(agent), box.proxy.gates[agent]) == ("running", "open")
    assert box.services.counters.answer(len(box.services.roster))["wake_ms"]["p50"] == view["last_wake_ms"]


async def test_keep_awake_outlives_the_daemon_and_holds_off_idle_sleep_only(box: Box) -> None:
    await box.everything(SLEEPY)
    agent = (await box.create())["id"]
    until_s = time.time() + 3600
    view = await box.keep_awake("bob", 3600, "uid:0")
    assert until_s <= view["kept_awake_until"] < until_s + 60
    await box.resume("bob", "uid:0")  # it may have been idle for long enough before it was told
    await asyncio.sleep(5 * SLEEPY.inference.auto_sleep_idle_seconds)
    await box.stop_daemon()
    await box.start_daemon(SLEEPY)
    found = await box.view("bob")
    assert (found["status"], found["kept_awake_until"]) == ("running", view["kept_awake_until"])
    assert "kept awake" in found["why"]
    assert (await box.pause("bob", timeout_s=5, now=False, actor="uid:0"))["status"] == "paused"
    await box.resume("bob", "uid:0")
    assert (await box.keep_awake("bob", 0, "uid:0"))["kept_awake_until"] is None
    await box.proxy.until_gate(agent, "asleep")


@pytest.mark.root
async def test_a_deep_pause_ends_with_the_memory_in_swap(box: Box) -> None:
    with zram_swap(64):
        await box.everything()
        agent = (await box.create(command=HEAVY))["id"]
        await until(lambda: "up" in box.output("bob").path.read_text())
        awake = await box.view("bob")
        view = await box.pause("bob", timeout_s=20, now=False, deep=True, actor="uid:0")
        assert (view["status"], view["depth"], view["deep_note"]) == ("paused", "deep", "")
        assert view["swap_bytes"] > 20_000_000
        assert view["rss_bytes"] < awake["rss_bytes"] - 20_000_000
        assert await box.truth(agent) == "frozen"
        assert (await box.resume("bob", "uid:0"))["depth"] == "awake"


@pytest.mark.root
async def test_a_deep_pause_without_swap_leaves_it_asleep_and_says_why(box: Box) -> None:
    with without_swap():
        await box.everything()
        await box.create()
        with pytest.raises((NotSupported, Saturated)) as caught:
            await box.pause("bob", timeout_s=20, now=False, deep=True, actor="uid:0")
        view = await box.view("bob")
        assert (view["status"], view["depth"], view["swap_bytes"]) == ("paused", "light", 0)
        assert caught.value.message == f"bob sleeps light; {view['deep_note']}"


async def test_a_dry_run_of_apply_says_what_would_change_and_changes_nothing(box: Box) -> None:
    await box.everything()
    spec = AgentSpec(name="bob", command=SLEEPER, env={"KEY": "secret"})
    plan = await box.services.agents.apply(spec, "uid:0", dry_run=True)
    assert (plan["created"], plan["agent"], plan["restart_needed"]) == (True, None, False)
    assert [change["field"] for change in plan["changes"]] == ["name", "command", "env"]
    assert "secret" not in repr(plan)
    assert await box.services.agent_views.all() == []
    await box.create(env={"KEY": "secret"})
    changed = AgentSpec(name="bob", command=SLEEPER, env={"KEY": "secret"}, idle_s=9.0, port=9000)
    plan = await box.services.agents.apply(changed, "uid:0", dry_run=True)
    assert plan["restart_needed"] is True
    assert plan["changes"] == [
        {"field": "port", "from": None, "to": 9000, "at_restart": True},
        {"field": "idle_s", "from": None, "to": 9.0, "at_restart": False},
    ]
    assert (await box.view("bob"))["port"] is None
    done = await box.services.agents.apply(changed, "uid:0")
    assert (done["changes"], done["dry_run"]) == (plan["changes"], False)


async def test_two_orders_at_once_make_an_agent_once(box: Box) -> None:
    """Of two `apply` at once one was refused: `there is an agent named bob already`."""
    await box.everything()
    apply, spec = box.services.agents.apply, AgentSpec(name="bob", command=SLEEPER)
    first, second = await asyncio.gather(
        apply(spec, "uid:0"), apply(msgspec.structs.replace(spec, idle_s=9.0), "uid:0")
    )
    assert (first["created"], second["created"], second["changed"]) == (True, False, ["idle_s"])
    assert first["agent"] is not None
    assert second["agent"] is not None
    assert first["agent"]["id"] == second["agent"]["id"]
    ann = AgentSpec(name="ann", command=SLEEPER)
    made, refused = await asyncio.gather(apply(ann, "uid:0"), box.create("ann"), return_exceptions=True)
    assert not isinstance(made, BaseException)
    assert str(refused) == "there is an agent named ann already"
    assert len(await box.services.agent_views.all()) == 2


async def test_an_idle_agent_falls_asleep_and_a_request_wakes_it(box: Box) -> None:
    await box.everything(SLEEPY)
    agent = (await box.create())["id"]
    await box.proxy.until_gate(agent, "asleep")
    view = await box.until(agent, "paused")
    assert view["reason"].startswith("idle: quiet for ")
    assert await box.truth(agent) == "frozen"
    answer = await box.proxy.wake(agent)
    assert isinstance(answer, Open)
    assert answer.generation > view["generation"]
    assert await box.truth(agent) == "running"
    await box.proxy.until_gate(agent, "asleep")


async def test_work_in_flight_keeps_an_agent_awake_and_why_says_so(box: Box) -> None:
    await box.everything(SLEEPY)
    agent = (await box.create())["id"]
    box.proxy.seen = {agent: Activity(in_flight=2, quiet_s=100.0)}
    with contextlib.suppress(HiveError):  # on a slow machine it was idle before that was seen
        await box.resume(agent, "uid:0")
    await box.until(agent, "running")
    view = await box.view(agent)
    assert view["why"] == "awake: 2 requests in flight"
    assert view["in_flight"] == 2


async def test_a_busy_agent_is_refused_at_once_or_waited_for(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    box.proxy.busy[agent] = "1 request is in flight"
    with pytest.raises(AgentBusy, match="1 request is in flight"):
        await box.pause(agent, timeout_s=5, now=True, actor="uid:0")
    with pytest.raises(TimedOut, match="it is awake"):
        await box.pause(agent, timeout_s=0.1, now=False, actor="uid:0")
    waiting = asyncio.ensure_future(box.pause(agent, timeout_s=20, now=False, actor="uid:0"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    box.proxy.become_quiet(agent)
    assert (await waiting)["status"] == "paused"


async def test_a_command_that_does_not_exist_leaves_nothing_behind(box: Box) -> None:
    await box.everything()
    with pytest.raises(NotFound, match="no such command: /nonexistent/agent"):
        await box.create(command=["/nonexistent/agent"])
    assert await box.services.agent_views.all() == []
    assert list((box.paths.state / "agents").iterdir()) == []
    assert list((box.paths.runtime / "a").iterdir()) == []
    assert (await box.create())["status"] == "running"


async def test_a_taken_name_is_refused_and_the_first_agent_untouched(box: Box) -> None:
    await box.everything()
    view = await box.create()
    with pytest.raises(WrongState, match="there is an agent named bob already"):
        await box.create(command=["/bin/true"])
    assert (await box.view("bob"))["pid"] == view["pid"]


async def test_apply_changes_what_can_be_changed_at_once_and_says_what_needs_a_restart(box: Box) -> None:
    await box.everything()
    spec = AgentSpec(name="bob", command=SLEEPER, port=9000)
    answer = await box.services.agents.apply(spec, "uid:0")
    assert answer["agent"] is not None
    assert (answer["created"], answer["agent"]["status"], answer["restart_needed"]) == (True, "created", False)
    await box.start("bob", "uid:0")
    idle = AgentSpec(name="bob", command=SLEEPER, port=9000, idle_s=7.0)
    answer = await box.services.agents.apply(idle, "uid:0")
    assert answer["agent"] is not None
    assert (answer["changed"], answer["restart_needed"], answer["agent"]["idle_s"]) == (["idle_s"], False, 7.0)
    other_port = AgentSpec(name="bob", command=SLEEPER, port=9001, idle_s=7.0)
    answer = await box.services.agents.apply(other_port, "uid:0")
    assert (answer["changed"], answer["restart_needed"]) == (["port"], True)
    assert answer["agent"] is not None
    agent = answer["agent"]["id"]
    assert box.proxy.rows[agent].address == "127.0.0.1:9000"
    assert (await box.services.agents.apply(other_port, "uid:0"))["restart_needed"] is True
    await box.restart("bob", "uid:0")
    assert box.proxy.rows[agent].address == "127.0.0.1:9001"
    assert (await box.services.agents.apply(other_port, "uid:0"))["restart_needed"] is False


async def test_a_cid_is_one_agents_and_changes_only_while_nothing_of_it_lives(box: Box) -> None:
    await box.everything()
    bob = await box.create(cid=5)
    assert box.proxy.rows[bob["id"]].cid == 5
    for refused in (
        box.create("eve", cid=5),
        box.services.agents.apply(AgentSpec(name="mal", command=SLEEPER, cid=5), "uid:0"),
    ):
        with pytest.raises(WrongState, match="cid 5 is that of bob already"):
            await refused
    assert [view["name"] for view in await box.services.agent_views.all()] == ["bob"]
    moved = AgentSpec(name="bob", command=SLEEPER, cid=6)
    with pytest.raises(WrongState, match="the cid of an agent that is running cannot be changed") as caught:
        await box.services.agents.apply(moved, "uid:0")
    assert caught.value.hint == "hive agent stop bob, then change it"
    assert box.proxy.rows[bob["id"]].cid == 5
    await box.stop("bob", "uid:0")
    assert (await box.services.agents.apply(moved, "uid:0"))["changed"] == ["cid"]
    assert box.proxy.rows[bob["id"]].cid == 6
    eve = await box.create("eve", cid=5)
    with pytest.raises(WrongState, match="cid 5 is that of eve already"):
        await box.services.agents.apply(AgentSpec(name="bob", command=SLEEPER, cid=5), "uid:0")
    assert (await box.view("bob"))["cid"] == 6
    await box.services.agents.remove("eve", "uid:0")
    assert eve["id"] not in box.proxy.rows
    assert (await box.services.agents.apply(AgentSpec(name="bob", command=SLEEPER, cid=5), "uid:0"))["changed"] == [
        "cid"
    ]


async def test_an_agent_that_fails_is_started_again_and_one_that_ends_well_is_stopped(box: Box) -> None:
    await box.everything()
    once = "test -e again && exec sleep 1000; touch again; exit 3"
    failing = (await box.create("fails", ["/bin/sh", "-c", once], restart=RestartPolicy.ON_FAILURE))["id"]
    ending = (await box.create("ends", ["/bin/sh", "-c", "exit 0"]))["id"]
    unlucky = (await box.create("unlucky", ["/bin/sh", "-c", "exit 3"]))["id"]
    assert (await box.until(ending, "stopped"))["reason"] == "exited with 0"
    assert (await box.until(unlucky, "error"))["reason"] == "exited with 3"
    await until(lambda: (box.paths.home(failing) / "again").exists())
    await until(lambda: (box.life(failing).status, box.life(failing).agent.generation) == ("running", 2))
    assert box.services.counters.answer(len(box.services.roster))["errors"] == 2
    assert isinstance(await box.proxy.wake(ending), Refused)


async def test_a_removed_agent_leaves_no_process_file_or_row(box: Box) -> None:
    await box.everything()
    view = await box.create()
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    assert await box.services.agents.remove("bob", "uid:0") == {"removed": view["id"], "name": "bob"}
    assert not is_alive(view["pid"])
    assert not box.paths.home(view["id"]).exists()
    assert not box.paths.agent_socket(view["id"]).exists()
    with pytest.raises(NotFound):
        await box.view("bob")
    await asyncio.sleep(0.05)
    assert view["id"] not in box.proxy.rows


@pytest.mark.root
async def test_each_agent_has_a_uid_of_its_own(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run agents as other users")
    monkeypatch.setattr(registration, "UIDS_KEPT_S", 0.0)
    box.paths.state.parent.chmod(0o711)
    first = 1_000_000 + 1000 * os.getpid() % 1_000_000_000  # other tests run agents of their own
    settings = Settings(inference=AWAKE.inference, agents=Agents(first_uid=first, stop_grace_s=1))
    await box.everything(settings, isolation=Isolation.UID)
    one, two = await box.create("one"), await box.create("two")
    assert (one["uid"], two["uid"]) == (first, first + 1)
    assert os.stat(f"/proc/{one['pid']}").st_uid == first
    await box.services.agents.remove("one", "uid:0")
    three = await box.create("three")
    assert three["uid"] == first


async def test_shutdown_makes_ingress_refuse_and_stops_everyone(box: Box) -> None:
    await box.everything()
    one, two = await box.create("one"), await box.create("two")
    await box.pause("two", timeout_s=5, now=False, actor="uid:0")
    answer = await box.services.agents.shutdown("uid:0")
    assert answer == {"stopped": ["one", "two"], "failed": []}
    assert any(isinstance(message, Leaving) for message in box.proxy.told)
    assert not is_alive(one["pid"])
    assert not is_alive(two["pid"])


async def test_who_went_down_with_hive_comes_back_with_it_and_who_was_stopped_does_not(box: Box) -> None:
    await box.everything()
    for name, restart in zip(("one", "two", "three"), RestartPolicy, strict=False):
        await box.create(name, restart=restart)
    await box.stop("two", "uid:0")
    await box.services.agents.shutdown("uid:0")
    await box.stop_daemon()
    await box.start_daemon()
    for name in ("one", "three"):
        assert (await box.until(name, "running"))["pid"]
    assert (await box.view("two"))["status"] == "stopped"


async def test_an_agent_that_started_while_it_was_looked_at_is_shown_with_its_pid(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper was asked before the start: the view said `running` and had no pid."""
    await box.everything()
    await box.create("one")
    await box.stop("one", "uid:0")
    helper, seen, started = type(box.services.effects.helper), asyncio.Event(), asyncio.Event()
    ask = helper.stat

    async def late(*arguments: Any, **options: Any) -> Any:
        stats = await ask(*arguments, **options)
        seen.set()
        await started.wait()
        return stats

    monkeypatch.setattr(helper, "stat", late)
    shown = asyncio.create_task(box.view("one"))
    await seen.wait()
    monkeypatch.setattr(helper, "stat", ask)
    now = await box.start("one", "uid:0")
    started.set()
    view = await shown
    assert (view["status"], view["pid"]) == ("running", now["pid"])
    assert is_alive(now["pid"])


# Losing others --------------------------------------------------------------------------------------------------------


async def test_a_restarted_daemon_finds_sleepers_asleep_and_runners_running(box: Box) -> None:
    await box.everything()
    asleep, awake = (await box.create("asleep"))["id"], await box.create("awake")
    await box.pause("asleep", timeout_s=5, now=False, actor="uid:0")
    await box.stop_daemon()
    await box.start_daemon()
    assert (await box.view("asleep"))["status"] == "paused"
    assert await box.truth(asleep) == "frozen"
    assert (await box.view("awake"))["pid"] == awake["pid"]
    await box.proxy.until_gate(asleep, "asleep")
    assert isinstance(await box.proxy.wake(asleep), Open)
    assert await box.truth(asleep) == "running"


async def test_a_daemon_that_died_while_pausing_is_followed_by_one_that_ends_it_awake(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await box.stop_daemon()
    database = Database.open(box.paths.database)
    await database.write(lambda conn: conn.execute("UPDATE agents SET status = 'pausing', generation = 7"))
    database.close()
    await box.start_daemon()
    view = await box.until(agent, "running")
    assert view["generation"] > 7
    assert view["reason"] == "found running, recorded pausing"


async def test_a_sleeper_the_database_holds_to_be_awake_is_thawed(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    await box.stop_daemon()
    database = Database.open(box.paths.database)
    await database.write(lambda conn: conn.execute("UPDATE agents SET status = 'running'"))
    database.close()
    await box.start_daemon()
    await box.until(agent, "running")
    assert await box.truth(agent) == "running"


async def test_a_leaving_helper_wakes_everyone_and_the_next_one_finds_them(box: Box) -> None:
    await box.everything()
    view = await box.create()
    agent = view["id"]
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    await box.stop_helper()
    found = await box.until(agent, "running")
    assert "helper" in found["reason"]
    await box.proxy.until_gate(agent, "open")
    assert (found["rss_bytes"], box.services.health.view()["helper"]["connected"]) == (None, False)
    with pytest.raises(LinkLost):
        await box.stop("bob", "uid:0")
    await box.start_helper()
    stopped = await box.until(agent, "stopped")
    assert stopped["pid"] is None
    assert not is_alive(view["pid"])


async def test_without_a_proxy_nobody_sleeps_and_starting_waits_for_one(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(SLEEPY)
    creating = asyncio.ensure_future(box.create())
    await asyncio.sleep(0.2)
    assert not creating.done()
    assert (await box.view("bob"))["status"] == "starting"
    await box.start_proxy()
    agent = (await creating)["id"]
    box.proxy.close()
    await until(lambda: not box.services.health.view()["proxy"]["connected"])
    await asyncio.sleep(0.5)
    view = await box.view(agent)
    assert view["status"] == "running"
    assert view["why"] == "awake: the proxy is not connected, and nobody is put to sleep without it"


async def test_a_newer_proxy_replaces_the_older_and_wakes_who_has_work_waiting(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    old = box.proxy
    old.client._closed = True  # it does not dial again
    new = await box.start_proxy(seen={agent: Activity(parked=1)})
    await new.until_gate(agent, "open")
    assert await box.truth(agent) == "running"
    assert not old.client.connected


async def test_a_proxy_on_another_port_makes_adopted_agents_start_anew(box: Box) -> None:
    await box.everything()
    view = await box.create()
    agent = view["id"]
    await box.environment(agent)
    await box.stop_daemon()
    box.proxy.close()
    (box.paths.home(agent) / "environment").unlink()
    await box.start_daemon()
    await box.start_proxy(port=11436)
    environment = await box.environment(agent)
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:11436/v1"
    after = await box.until(agent, "running")
    assert after["pid"] != view["pid"]
    said = [event for event in await box.services.audit_log.past(100) if event["kind"] == "agent.port_moved"]
    assert [(event["name"], event["was"], event["now"]) for event in said] == [("bob", 11435, 11436)]


async def test_a_stranger_on_the_link_is_hung_up_on(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon()
    stranger = ProxyPeer(box.paths.link_socket)
    stranger.role = "up"
    await asyncio.sleep(0.3)
    assert stranger.table is None
    assert not box.services.health.view()["proxy"]["connected"]
    stranger.close()


# What it tells --------------------------------------------------------------------------------------------------------


async def test_every_transition_is_told_at_once_and_found_again_in_the_past(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    with box.services.audit_log.subscribe() as feed:
        await box.pause("bob", timeout_s=5, now=False, actor="uid:7")
        await box.proxy.wake(agent, "ingress")
        live = [await asyncio.wait_for(anext(feed), 5) for _ in range(4)]
    steps = [(event["kind"], event["from"], event["to"], event["actor"]) for event in live]
    assert steps == [
        ("agent.pausing", "running", "pausing", "uid:7"),
        ("agent.paused", "pausing", "paused", "uid:7"),
        ("agent.resuming", "paused", "resuming", "proxy"),
        ("agent.running", "resuming", "running", "proxy"),
    ]
    assert live[3]["reason"] == "woken by ingress"
    assert (await box.services.audit_log.past(100))[-4:] == live


async def test_a_pause_that_was_refused_is_told_as_that(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    box.proxy.busy[agent] = "an answer is not read yet"
    with pytest.raises(AgentBusy):
        await box.pause("bob", timeout_s=5, now=True, actor="uid:0")
    event = (await box.services.audit_log.past(1))[0]
    assert (event["kind"], event["reason"]) == ("agent.stayed_awake", "an answer is not read yet")


async def test_health_names_what_is_missing(box: Box, redis_server: Any) -> None:
    await box.start_helper()
    await box.start_daemon()
    health = box.services.health.view()
    assert (health["status"], health["isolation"]) == ("degraded", "none")
    assert health["limits"] == "as far as this host enforces them; hive agent show says what is not"
    assert (health["proxy"]["connected"], health["proxy"]["port"], health["helper"]["connected"]) == (False, None, True)
    assert (health["redis"]["up"], health["backend"], health["token_tracking"]) == (False, None, True)
    assert "No such file" in health["redis"]["why"]
    assert any(health["redis"]["why"] in problem for problem in health["problems"])
    os.symlink(redis_server.socket, box.paths.redis_socket)
    await box.start_proxy()
    await until(lambda: box.services.health.view()["status"] == "ok")


async def test_redis_shows_who_sleeps_and_what_it_used_and_forgets_who_is_removed(box: Box, redis_server: Any) -> None:
    import redis.asyncio as aioredis

    os.symlink(redis_server.socket, box.paths.redis_socket)
    await box.everything()
    agent = (await box.create())["id"]
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    async with aioredis.Redis(unix_socket_path=str(redis_server.socket), decode_responses=True) as client:

        async def until_key(key: str, value: str | None) -> None:
            for _ in range(2000):
                if await client.get(key) == value:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"{key} never became {value}")

        await until_key(f"hive:agent:paused:{agent}", "1")
        assert await client.get(f"hive:agent:tier:{agent}") == "medium"
        await box.resume("bob", "uid:0")
        await until_key(f"hive:agent:paused:{agent}", None)
        assert box.daemon is not None
        box.daemon.active({agent: 1000.0, "gone": 1000.0})
        await until_key(f"hive:agent:activity:{agent}", "1000.000")
        line = msgspec.json.encode(usage_event(1, agent_id=agent, tokens_in=7, tokens_out=3))
        box.daemon.usage(UsageBatch(epoch="p1", committed_to=0, items=[UsageItem(1, 1, line)]))
        for _ in range(2000):
            if await client.exists("hive:usage"):
                break
            await asyncio.sleep(0.01)
        used = await client.hgetall(f"hive:agent:tokens:{agent}")
        assert (await client.xlen("hive:usage"), used) == (1, {"input": "7", "output": "3", "requests": "1"})
        await box.services.agents.remove("bob", "uid:0")
        await until_key(f"hive:agent:tier:{agent}", None)
        await until_key(f"hive:agent:activity:{agent}", None)
        assert await client.exists("hive:agent:activity:gone", f"hive:agent:tokens:{agent}") == 0


async def test_usage_says_whether_tokens_are_tracked(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(Settings(inference=InferenceSection(token_tracking=False, enabled="false")))
    answer = await box.services.usage.spent(3600)
    assert answer == {
        "token_tracking": False,
        "by": "agent",
        "agents": [],
        "totals": {
            "requests": 0,
            "tokens_in": 0,
            "tokens_out": 0,
            "cached_tokens": 0,
            "unknown": 0,
            "cut": 0,
            "far": 0,
            "audio_s": 0.0,
            "images": 0,
            "pixel_steps": 0,
        },
    }
    assert box.services.health.view()["token_tracking"] is False


async def test_the_backend_and_its_models_reach_proxy_and_agents(box: Box) -> None:
    answers = {"/api/version": b'{"version":"0.9"}', "/api/tags": b'{"models":[{"name":"tiny:1b","size":5}]}'}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body, status = answers.get(target, b""), b"200 OK" if target in answers else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    await box.start_helper()
    address = box.paths.runtime / "b.sock"
    await box.start_daemon(backend=(BackendKind.OLLAMA, str(address)))
    await box.start_proxy()
    assert box.inference()["running"] is False
    async with listening(answer, address):
        await until(lambda: box.inference()["running"])
        found = box.inference()
        assert (found["backend"], found["version"], found["models"][0]["name"]) == ("ollama", "0.9", "tiny:1b")
        agent = (await box.create())["id"]
        environment = await box.environment(agent)
        assert (environment["HIVE_DIALECT"], environment["HIVE_MODEL"]) == ("ollama", "tiny:1b")
        address.unlink()  # before the server closes: asyncio 3.11 leaves a connection open that it accepts just then
        await until(lambda: not box.inference()["running"])
    kinds = [event["kind"] for event in await box.services.audit_log.past(100)]
    told = [kind for kind in kinds if kind.startswith("backend.")]
    assert told == ["backend.up", "backend.down"] * max(1, len(told) // 2), "more often where all stood still for 2 s"


async def test_access_names_the_operators_token(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVE_INTERNAL_TOKEN", "an-operators-own-token")
    await box.everything()
    assert views.access_view(box.services.proxy_link.known_port, box.services.internal_token) == {
        "openai_base_url": "http://127.0.0.1:11435/v1",
        "ollama_host": "http://127.0.0.1:11435/a/an-operators-own-token",
        "token": "an-operators-own-token",
    }
    assert not box.paths.internal_token.exists()


async def test_tokens_stay_the_same_over_restarts_and_differ_between_kinds(box: Box) -> None:
    await box.everything()
    await box.create()
    before = box.tokens("bob")
    await box.stop_daemon()
    await box.start_daemon()
    await box.start_proxy()
    assert box.tokens("bob") == before
    assert before["model"].startswith("hm_")
    assert before["ingress"].startswith("hi_")
    assert set(TokenKind) == {"model", "ingress"}


# The program ----------------------------------------------------------------------------------------------------------


async def test_the_program_leaves_on_sigterm_and_takes_its_sockets_along(box: Box) -> None:
    process = daemon_process(box)
    await until(box.paths.api_socket.exists)
    other = daemon_process(box)
    _, complaint = await asyncio.to_thread(other.communicate)
    assert other.returncode == 1
    assert f"in use by process {process.pid}" in complaint
    process.send_signal(signal.SIGTERM)
    _, complaint = await asyncio.to_thread(process.communicate)
    assert (process.returncode, "Traceback" in complaint) == (0, False), complaint
    assert list(box.paths.runtime.iterdir()) == []


async def test_the_program_leaves_when_its_parent_is_gone(box: Box) -> None:
    read, write = os.pipe()
    process = daemon_process(box, pass_fds=(read,))
    os.close(read)
    await until(box.paths.api_socket.exists)
    os.close(write)
    _, complaint = await asyncio.to_thread(process.communicate)
    assert (process.returncode, "Traceback" in complaint) == (0, False), complaint


async def test_a_killed_daemon_leaves_agents_to_the_next_one(box: Box) -> None:
    """kill -9 in the middle of sleeping and waking, six times: afterwards record, truth and gate agree."""
    await box.start_helper()
    process = daemon_process(box)
    proxy = ProxyPeer(box.paths.link_socket)
    box.proxies.append(proxy)
    await proxy.until_table()
    reader = Caller(box.paths.api_socket)
    view = await reader.ask("POST", "/api/agents", {"name": "bob", "command": SLEEPER})
    for round_number in range(6):
        pausing = asyncio.ensure_future(reader.ask("POST", "/api/agents/bob/pause", {"timeout_s": 5}))
        await asyncio.sleep(0.006 * round_number)
        process.kill()
        process.communicate()
        await asyncio.gather(pausing, return_exceptions=True)
        proxy.table = None
        process = daemon_process(box)
        await proxy.until_table()
        for _ in range(500):
            found = await reader.ask("GET", "/api/agents/bob", None)
            if found["status"] in ("running", "paused"):
                break
            await asyncio.sleep(0.01)
        assert found["pid"] == view["pid"]
        state = (await asyncio.to_thread(Path(f"/proc/{view['pid']}/stat").read_text)).rpartition(")")[2].split()[0]
        assert (found["status"], state) in (("running", "S"), ("paused", "T"))
        await reader.ask("POST", "/api/agents/bob/resume", None)
        await proxy.until_gate(view["id"], "open")
    await reader.ask("DELETE", "/api/agents/bob", None)
    process.terminate()
    _, complaint = await asyncio.to_thread(process.communicate)
    assert (process.returncode, "Traceback" in complaint) == (0, False), complaint


async def test_an_agent_is_made_with_what_does_not_limit_it_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to its creation, which `hive agent create --memory` says it from; no control groups are here."""
    monkeypatch.setattr("hive.host.limits.mount_of_v1", lambda *_: None)
    await box.everything()
    view = await box.create("bob", limits=Limits(memory_mb=64))
    assert (view["limits_not_enforced"] or "").startswith("memory_mb is not enforced: ")
    assert (await box.create("carol"))["limits_not_enforced"] == ""
