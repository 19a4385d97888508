"""An agent's port is not one of Hive's own."""

from __future__ import annotations

import pytest

from hive.control.own_ports import own_ports
from hive.domain import AgentSpec, BackendKind, RuntimeKind
from hive.errors import BadRequest
from tests.control.box import AWAKE, SLEEPER, Box


@pytest.mark.parametrize(
    ("address", "ports"),
    [
        ("127.0.0.1:8000", {8000}),
        ("localhost:8000", {8000}),
        ("http://[::1]:8000/v1", {8000}),
        ("/run/hive-inference/llama.sock", set()),
        ("192.0.2.1:8000", set()),
        ("https://models.invalid/v1", set()),
    ],
)
def test_the_port_of_a_server_on_another_host_is_free_here(address: str, ports: set[int]) -> None:
    assert set(own_ports(model=None, ingress=None, api=None, backend=address)) == ports


async def test_a_port_of_hives_own_is_refused_with_the_reason(box: Box) -> None:
    """`--port 11435` was taken; the agent could not listen, and ingress led its callers to the model."""
    await box.everything(AWAKE, backend=(BackendKind.VLLM, "127.0.0.1:8000"))
    own = {11435: "agents reach the model", 8480: "callers reach agents", 8000: "the inference server is"}
    for port, what in own.items():
        with pytest.raises(BadRequest, match=f"port: {port} is where {what}"):
            await box.create("bob", port=port)
        with pytest.raises(BadRequest, match=what):
            await box.services.agents.apply(AgentSpec(name="bob", command=SLEEPER, port=port), "uid:0", dry_run=True)
    assert box.services.agent_views.shorts("", 10)["total"] == 0
    assert (await box.create("bob", port=9000))["port"] == 9000
    with pytest.raises(BadRequest, match="callers reach agents"):
        await box.services.agents.apply(AgentSpec(name="bob", command=SLEEPER, port=8480), "uid:0")
    assert (await box.view("bob"))["port"] == 9000


async def test_before_the_proxy_is_there_its_settings_say_it(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(AWAKE)
    with pytest.raises(BadRequest, match="agents reach the model"):
        await box.create("bob", port=11435)


async def test_a_network_of_its_own_has_ports_of_its_own(box: Box) -> None:
    await box.everything()
    spec = AgentSpec(name="bob", command=SLEEPER, port=11435, egress=[])
    assert spec.runtime is RuntimeKind.PROCESS
    assert (await box.services.agents.apply(spec, "uid:0"))["created"]
