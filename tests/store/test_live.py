"""Live state against a real redis-server that is killed, restarted empty, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import redis.asyncio as aioredis
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.errors import DependencyDown
from hive.store import keys, live
from hive.store.channels import AgentChanged, SystemEvent
from hive.store.live import Live, in_parts
from hive.store.write_behind import ENTRIES, MESSAGES, AgentKeys, Batch, WriteBehind
from hive.tasks import spawn
from tests.waiting import until

if TYPE_CHECKING:
    from tests.conftest import RedisServer


async def until_it_holds(condition: Callable[[], Any]) -> None:
    """As `until`; a question that fails is a no."""

    async def asked() -> bool:
        with contextlib.suppress(Exception):
            found = condition()
            return bool(await found if asyncio.iscoroutine(found) else found)
        return False

    await until(asked)


@pytest.fixture
async def store(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Live]:
    monkeypatch.setattr(live, "PING_S", 0.05)
    monkeypatch.setattr(live, "GATHER_S", 0.005)
    monkeypatch.setattr(live, "RETRY_S", (0.01, 0.05))
    store = Live(redis_server.socket, op_timeout_s=0.5)
    spawn(store.run(), name="live")
    yield store
    await store.close()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Any]:
    client = aioredis.Redis(unix_socket_path=str(redis_server.socket), decode_responses=True)
    yield client
    await client.aclose()


async def names(client: Any) -> set[str]:
    return set(await client.keys("*"))


async def test_an_agents_keys_are_written_with_a_day_to_live(store: Live, client: Any) -> None:
    store.put_agent("a1", paused=True, tier=Tier.HIGH, instance="vm-7")
    await until_it_holds(lambda: client.get(keys.vm_instance("vm-7")))
    assert await client.get("hive:agent:paused:a1") == "1"
    assert await client.get("hive:agent:tier:a1") == "high"
    assert await client.get("hive:vm:instance:vm-7") == "a1"
    for key in await names(client):
        assert 86000 < await client.ttl(key) <= 86400
    store.put_agent("a1", paused=False, tier=Tier.LOW, instance="vm-8")
    await until_it_holds(lambda: client.get(keys.vm_instance("vm-8")))
    assert await names(client) == {"hive:agent:tier:a1", "hive:vm:instance:vm-8"}


async def test_a_cid_leads_to_its_agent_and_to_its_tier_as_long_as_the_agent_has_it(store: Live, client: Any) -> None:
    await client.set("hive:vm:cid:9", "a1")  # of an earlier daemon
    await client.set("hive:agent:tier:9", "low")
    store.put_agent("a1", paused=False, tier=Tier.HIGH, cid=5)
    await until_it_holds(lambda: client.get("hive:agent:tier:5"))
    assert (await client.get("hive:vm:cid:5"), await client.get("hive:agent:tier:5")) == ("a1", "high")
    assert 86000 < await client.ttl("hive:vm:cid:5") <= 86400
    store.put_agent("a1", paused=False, tier=Tier.HIGH, cid=6)
    store.put_agent("b2", paused=False, tier=Tier.LOW, cid=5)
    await until_it_holds(lambda: client.get("hive:agent:tier:6"))
    assert (await client.get("hive:vm:cid:5"), await client.get("hive:vm:cid:6")) == ("b2", "a1")
    store.forget_agent("a1")
    store.set_backend(None)
    await until_it_holds(lambda: client.exists(keys.INFERENCE_BACKEND))
    of_b2 = {"hive:agent:tier:b2", "hive:vm:cid:5", "hive:agent:tier:5"}
    assert await names(client) == {*of_b2, "hive:inference:backend"}


PROMPT, ANOTHER = ("0123456789abcdef", "Be kind."), ("fedcba9876543210", "Be brief.")


async def test_a_prompt_is_there_for_as_long_as_somebody_has_it(store: Live, client: Any) -> None:
    for agent in ("a1", "a2"):
        store.put_agent(agent, paused=False, tier=Tier.LOW, prompt=PROMPT)
    await until_it_holds(lambda: client.exists(keys.prompt_agents(PROMPT[0])))
    assert await client.get("hive:prompt:0123456789abcdef") == "Be kind."
    assert await client.smembers("hive:prompt:agents:0123456789abcdef") == {"a1", "a2"}
    assert await client.get("hive:agent:prompt:a1") == PROMPT[0]
    for key in (keys.prompt(PROMPT[0]), keys.prompt_agents(PROMPT[0]), keys.agent_prompt("a1")):
        assert 86000 < await client.ttl(key) <= 86400
    store.put_agent("a1", paused=True, tier=Tier.LOW, prompt=ANOTHER)
    await until_it_holds(lambda: client.exists(keys.prompt(ANOTHER[0])))
    assert await client.smembers(keys.prompt_agents(PROMPT[0])) == {"a2"}
    assert await client.get(keys.agent_prompt("a1")) == ANOTHER[0]
    store.put_agent("a1", paused=True, tier=Tier.LOW)
    store.forget_agent("a2")

    async def is_gone() -> bool:
        return not await client.exists(keys.prompt(PROMPT[0]), keys.prompt_agents(PROMPT[0]), keys.agent_prompt("a1"))

    await until_it_holds(is_gone)
    assert [key for key in await names(client) if "prompt" in key] == []


async def test_a_redis_that_comes_back_empty_is_told_the_prompts_again(
    redis_server: RedisServer, store: Live, client: Any
) -> None:
    store.put_agent("a1", paused=False, tier=Tier.LOW, prompt=PROMPT)
    await until_it_holds(lambda: client.exists(keys.prompt(PROMPT[0])))
    redis_server.kill()
    store.put_agent("a2", paused=False, tier=Tier.LOW, prompt=PROMPT)
    store.put_agent("a3", paused=False, tier=Tier.LOW, prompt=ANOTHER)
    store.forget_agent("a3")
    redis_server.start()
    await until_it_holds(lambda: client.exists(keys.prompt(PROMPT[0]), keys.agent_prompt("a2")))
    assert await client.smembers(keys.prompt_agents(PROMPT[0])) == {"a1", "a2"}
    assert not await client.exists(keys.prompt(ANOTHER[0]), keys.prompt_agents(ANOTHER[0]))


async def ping(store: Live) -> None:
    await store._do(("PING",))


async def active(client: Any) -> dict[str, float]:
    return dict(await client.zrange(keys.AGENTS_ACTIVITY, 0, -1, withscores=True))


async def test_activity_and_totals_are_written_behind(store: Live, client: Any) -> None:
    for second in range(5):
        store.touch("a1", 1000.0 + second)
        store.set_totals("a1", tokens_in=10 * second, tokens_out=2 * second, requests=1 + second)
    store.touch("b2", 1002.5)
    await until_it_holds(lambda: client.hget(keys.agent_tokens("a1"), "requests"))
    assert await client.hgetall("hive:agent:tokens:a1") == {"input": "40", "output": "8", "requests": "5"}
    assert await client.get("hive:agent:activity:a1") == "1004.000"
    assert await active(client) == {"a1": 1004.0, "b2": 1002.5}


async def test_activity_older_than_a_day_leaves_the_set(store: Live, client: Any) -> None:
    store.touch("old", 1000.0)
    await until_it_holds(lambda: active(client))
    store.touch("new", 1000.0 + 86401)

    async def only_new() -> bool:
        return await active(client) == {"new": 87401.0}

    await until_it_holds(only_new)


async def test_forgetting_an_agent_deletes_every_key_of_it_and_no_other(store: Live, client: Any) -> None:
    await client.set("hive:agent:prompt:a1", "of an earlier daemon")
    await client.set("hive:vm:instance:vm-old", "a1")
    store.put_agent("a1", paused=True, tier=Tier.LOW, instance="vm-7")
    store.put_agent("a11", paused=True, tier=Tier.LOW)
    store.touch("a1", 1000.0)
    store.set_totals("a1", tokens_in=1, tokens_out=1, requests=1)
    await until_it_holds(lambda: client.get("hive:agent:activity:a1"))
    store.touch("a1", 1001.0)
    store.forget_agent("a1")
    store.set_totals("a1", tokens_in=1, tokens_out=1, requests=2)
    store.set_backend(None)
    await until_it_holds(lambda: client.exists(keys.INFERENCE_BACKEND))
    assert await names(client) == {"hive:agent:paused:a11", "hive:agent:tier:a11", "hive:inference:backend"}


async def test_what_leads_to_many_forgotten_agents_is_looked_for_once(
    store: Live, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that was forgotten took three searches through every key there is, in daemon and proxy: two thirds of what a
    removal cost with 10,000 agents."""
    monkeypatch.setattr(live, "SWEEP_AGAIN_S", 0.3)
    for number in range(20):
        await client.set(f"hive:vm:instance:old-{number}", f"a{number}")
        await client.set(f"hive:vm:cid:{number}", f"a{number}")
        await client.set(f"hive:agent:tier:{number}", "low")
    await client.set("hive:vm:cid:99", "another")
    await client.config_resetstat()
    for number in range(20):
        store.forget_agent(f"a{number}")
        store.set_backend(None)
        await asyncio.sleep(0.02)
    await until_it_holds(lambda: client.exists(keys.INFERENCE_BACKEND))
    store.put_agent("a7", paused=False, tier=Tier.LOW, cid=7)  # it is there again: what leads to it stays

    async def is_swept() -> bool:
        return not {name for name in await names(client) if "old" in name} - {"hive:vm:instance:old-7"}

    await until_it_holds(is_swept)
    left = {name for name in await names(client) if name.startswith("hive:vm:cid:")}
    assert left == {"hive:vm:cid:7", "hive:vm:cid:99"}
    assert (await client.info("commandstats"))["cmdstat_scan"]["calls"] <= 4


async def test_models_age_and_the_backend_does_not(store: Live, client: Any) -> None:
    store.set_models([ModelInfo(name="llama3.2:3b", size_bytes=5)])
    store.set_backend(BackendInfo(kind=BackendKind.OLLAMA, address="127.0.0.1:11434"))
    await until_it_holds(lambda: client.get(keys.MODELS_AVAILABLE))
    assert msgspec.json.decode(await client.get("hive:models:available"))[0]["name"] == "llama3.2:3b"
    assert 290 < await client.ttl("hive:models:available") <= 300
    assert (await client.get("hive:inference:backend"), await client.ttl("hive:inference:backend")) == ("ollama", -1)


async def test_published_events_have_the_documented_json(store: Live, client: Any) -> None:
    listener = client.pubsub(ignore_subscribe_messages=True)
    await listener.subscribe(keys.AGENT_STATUS, keys.SYSTEM_EVENTS)
    await listener.get_message(timeout=0.2)
    store.publish(AgentChanged(at=1.0, agent="a1", name="alice", was="running", now="paused", generation=4))
    store.publish(SystemEvent(at=2.0, kind="backend.up", detail={"kind": "ollama"}))
    got: list[tuple[str, Any]] = []
    async with asyncio.timeout(60):
        while len(got) < 2:
            if message := await listener.get_message(timeout=1):
                got.append((message["channel"], msgspec.json.decode(message["data"])))
    await listener.aclose()
    changed = {"at": 1.0, "agent": "a1", "name": "alice", "from": "running", "to": "paused", "generation": 4}
    changed |= {"reason": "", "actor": "", "outcome": "ok"}
    event = {"at": 2.0, "kind": "backend.up", "detail": {"kind": "ollama"}}
    assert got == [("hive:agent:status", changed), ("hive:system:events", event)]


async def test_a_redis_that_comes_back_empty_is_told_everything_about_agents_again(
    store: Live, client: Any, redis_server: RedisServer
) -> None:
    told: list[str] = []
    store._on_new_run = lambda: told.append(store.run_id)
    store.put_agent("a1", paused=True, tier=Tier.LOW)
    await until_it_holds(lambda: client.get("hive:agent:tier:a1"))
    before = store.run_id
    redis_server.kill()
    await until_it_holds(lambda: not store.up)
    store.touch("a1", 1000.0)
    redis_server.start()
    await until_it_holds(lambda: client.get("hive:agent:tier:a1"))
    await until_it_holds(lambda: client.get("hive:agent:activity:a1"))
    assert store.up
    assert told == [store.run_id] != [before]


async def test_very_many_agents_are_all_written_and_told_of_last(
    store: Live, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "AGENTS_AT_ONCE", 2)
    listener = client.pubsub()
    await listener.subscribe("hive:system:events")
    await listener.get_message(timeout=5)
    for number in range(7):
        store.put_agent(f"a{number}", paused=True, tier=Tier.LOW)
        store.set_totals(f"a{number}", tokens_in=number, tokens_out=0, requests=1)
    store.publish(SystemEvent(at=2.0, kind="said"))
    assert (await listener.get_message(timeout=5))["type"] == "message"
    await listener.aclose()
    assert await client.mget([f"hive:agent:paused:a{number}" for number in range(7)]) == ["1"] * 7
    assert await client.hget("hive:agent:tokens:a6", "input") == "6"


async def test_a_silent_restart_between_two_commands_is_noticed(redis_server: RedisServer) -> None:
    """A dead idle connection is replaced without an error."""
    store = Live(redis_server.socket)
    await ping(store)
    before = store.run_id
    redis_server.kill()
    redis_server.start()
    await asyncio.sleep(0.05)  # the loop sees the end of the idle connection
    await ping(store)
    assert store.run_id not in ("", before)
    await store.close()


async def test_a_redis_that_hangs_is_down_after_the_timeout_and_says_nothing_else(
    redis_server: RedisServer,
) -> None:
    store = Live(redis_server.socket, op_timeout_s=0.1)
    await ping(store)
    redis_server.stop()
    with pytest.raises(DependencyDown) as caught:
        await ping(store)
    assert (store.up, caught.value.exit_code) == (False, 5)
    redis_server.go_on()
    await ping(store)
    assert store.up
    await store.close()


async def test_without_a_redis_saying_never_fails_and_asking_is_a_dependency_down(tmp_path: Any) -> None:
    store = Live(tmp_path / "no.sock")
    task = spawn(store.run(), name="live")
    for number in range(MESSAGES + 10):
        store.publish(SystemEvent(at=0.0, kind=str(number)))
    store.put_agent("a1", paused=True, tier=Tier.LOW)
    store.forget_agent("a1")
    with pytest.raises(DependencyDown, match=r"no\.sock"):
        await ping(store)
    await until_it_holds(lambda: store.messages_dropped == MESSAGES + 10)
    await store.close()
    assert task.cancelled()


async def test_a_redis_that_refuses_to_write_is_a_dependency_down(redis_server: RedisServer, client: Any) -> None:
    await client.config_set("maxmemory", "1")
    store = Live(redis_server.socket)
    store.touch("a1", 1000.0)
    with pytest.raises(DependencyDown, match=r"OOM|maxmemory"):
        await store._flush()
    await store.close()


async def test_old_usage_is_given_again_until_it_is_settled_and_its_group_ends_with_it(
    store: Live, client: Any
) -> None:
    assert await store.old_usage(10) == []
    assert not await client.exists(keys.USAGE_STREAM)
    await client.xgroup_create(keys.USAGE_STREAM, keys.USAGE_GROUP, id="0", mkstream=True)
    for n in range(3):
        await client.xadd(keys.USAGE_STREAM, {"e": "p1", "n": n})
    given = await store.old_usage(2)
    assert [entry.fields for entry in given] == [{b"e": b"p1", b"n": b"0"}, {b"e": b"p1", b"n": b"1"}]
    assert await store.old_usage(10) == given
    await store.settle_old_usage([entry.id for entry in given])
    (last,) = await store.old_usage(10)
    await store.settle_old_usage([last.id])
    assert await store.old_usage(10) == []
    assert (await client.xlen(keys.USAGE_STREAM), await client.xinfo_groups(keys.USAGE_STREAM)) == (0, [])
    assert await store.old_usage(10) == []


async def test_usage_that_comes_while_redis_is_away_is_bounded(
    store: Live, client: Any, redis_server: RedisServer
) -> None:
    store.set_backend(None)
    await until_it_holds(lambda: client.exists(keys.INFERENCE_BACKEND))
    redis_server.kill()
    await until_it_holds(lambda: not store.up)
    for n in range(1, 3 * ENTRIES + 1):
        store.add_usage([{"e": "p1", "n": n}])
    redis_server.start()
    await until_it_holds(lambda: client.exists(keys.USAGE_STREAM))
    found = [int(fields["n"]) for _, fields in await client.xrange(keys.USAGE_STREAM)]
    assert found == list(range(2 * ENTRIES + 1, 3 * ENTRIES + 1))


SAID = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("ab"), st.booleans(), st.sampled_from([None, PROMPT, ANOTHER])),
    st.tuples(st.just("forget"), st.sampled_from("ab")),
    st.tuples(st.just("count"), st.sampled_from("ab")),
    st.tuples(st.just("lose"), st.integers(0, 4)),
    st.tuples(st.just("write"), st.just("")),
)


@given(st.lists(SAID, max_size=30))
def test_whatever_fails_on_the_way_the_last_word_on_each_agent_is_written(steps: list[tuple[Any, ...]]) -> None:
    waiting = WriteBehind()
    said: dict[str, AgentKeys | None] = {}
    counted = {"a": 0, "b": 0}
    redis: dict[str, AgentKeys | None] = {}
    tokens = {"a": 0, "b": 0}
    prompts: dict[str, set[str]] = {}
    prompt_of: dict[str, str] = {}

    def write(parts: list[Batch]) -> None:
        for batch in parts:
            for agent in batch.forgotten:
                redis[agent], tokens[agent] = None, 0
                prompt_of.pop(agent, None)
            for agent in batch.gone_prompts:
                prompt_of.pop(agent, None)
            for agent, keys_of in batch.agents.items():
                if keys_of.prompt is not None:
                    prompt_of[agent] = keys_of.prompt[0]
            prompts.update({hashed: set(agents) for hashed, (_, agents) in batch.prompts.items()})
            redis.update(batch.agents)
            for agent, totals in batch.totals.items():
                tokens[agent] = totals[2]

    for step in steps:
        match step:
            case ("put", agent, paused, prompt):
                said[agent] = AgentKeys(paused, Tier.LOW, prompt=prompt)
                waiting.put_agent(agent, AgentKeys(paused, Tier.LOW, prompt=prompt))
            case ("forget", agent):
                said[agent], counted[agent] = None, 0
                waiting.forget_agent(agent)
            case ("count", agent):
                if said.get(agent, waiting) is not None:
                    counted[agent] += 1
                    waiting.set_totals(agent, 0, 0, counted[agent])
            case ("lose", written):
                parts = in_parts(waiting.take(), 1)
                write(parts[:written])
                for part in reversed(parts[written:]):
                    waiting.give_back(part)
            case ("write", _):
                write(in_parts(waiting.take(), 1))
    write([waiting.take()])
    assert redis == said
    assert tokens == counted
    having = {agent: one.prompt[0] for agent, one in said.items() if one is not None and one.prompt is not None}
    assert prompt_of == having
    found = {hashed: agents for hashed, agents in prompts.items() if agents}
    assert found == {hashed: {agent for agent, one in having.items() if one == hashed} for hashed in having.values()}
