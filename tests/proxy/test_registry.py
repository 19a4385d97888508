"""The proxy's table of agents: what is asked of a few is not asked of all."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hive.link.messages import AgentRow
from hive.proxy.registry import Registry
from hive.settings.table import Proxy, TenantRow
from tests.proxy.harness import MODEL_TOKEN, Client, post, proxied

TENANTS = {"acme": TenantRow(cache_group="us"), "other": TenantRow(cache_group="us"), "third": TenantRow()}
ROW = AgentRow(id="", name="", generation=1, gate="open", status="running")


def row(agent: str, tenant: str = "acme") -> AgentRow:
    return msgspec.structs.replace(ROW, id=agent, name=agent, tenant=tenant)


def counted(registry: Registry) -> int:
    return len({entry.tenant.cache_group for entry in registry.by_id.values()})


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("learn"), st.sampled_from("abcd"), st.sampled_from(["acme", "other", "third", "new"])),
            st.tuples(st.just("unheard"), st.sampled_from("abcd")),
            st.tuples(st.just("forget"), st.sampled_from("abcd")),
            st.tuples(st.just("settings"), st.sampled_from(["", "us", "them"])),
            st.tuples(st.just("all"), st.sets(st.sampled_from("abcd"))),
        ),
        max_size=20,
    )
)
def test_the_groups_that_share_a_cache_are_counted_as_agents_come_and_go(steps: list[tuple[object, ...]]) -> None:
    """They were counted anew, over all agents, by the first request after each change of any of them."""
    registry = Registry(Mock(), Proxy(), TENANTS)
    for step in steps:
        match step:
            case ("learn", str(agent), str(tenant)):
                registry.learn(row(agent, tenant))
            case ("unheard", str(agent)):
                registry.unheard(agent)
            case ("forget", str(agent)):
                registry.forget(agent)
            case ("settings", str(group)):
                registry.use_settings(Proxy(), {**TENANTS, "third": TenantRow(cache_group=group)})
            case ("all", set(agents)):
                registry.replace_all([row(str(agent)) for agent in agents], "")
        assert registry.cache_groups() == counted(registry)


def test_activity_is_looked_up_of_those_named_alone() -> None:
    registry = Registry(Mock(), Proxy(), {})
    asked: list[str] = []
    for agent in "abc":
        registry.learn(row(agent))
        listener = Mock(accept_waiting=partial(asked.append, agent))
        registry.by_id[agent].listeners["model"] = listener
    assert list(registry.activity(["b", "nobody"], 1.0)) == ["b"]
    assert asked == ["b"]
    assert sorted(registry.activity([], 1.0)) == ["a", "b", "c"]


async def test_prompts_that_an_operator_sends_for_a_tenant_are_kept_from_the_agents_ones(tmp_path: Path) -> None:
    """A llama-server has no salts: where two groups ask it, it may use nothing that it kept."""
    body = b'{"model":"m","prompt":"x"}'
    async with proxied(tmp_path) as (proxy, backend):
        for token, fields in ((MODEL_TOKEN, b""), (b"internal", b"x-tenant-id: acme\r\n"), (MODEL_TOKEN, b"")):
            client = await Client.tcp(proxy.port)
            status, _, said = await client.ask(post(b"/v1/completions", body, token=token, fields=fields))
            assert status == 200, said
        assert [json.loads(sent).get("cache_prompt") for _, sent in backend.requests] == [None, False, False]
        assert proxy.registry.cache_groups() == 2
