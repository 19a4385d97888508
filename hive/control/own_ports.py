"""The ports of this host that are Hive's own: no agent can listen there, and ingress must not lead there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from hive.control.hosts import LOOPBACK
from hive.domain import AgentSpec
from hive.errors import BadRequest


def own_ports(*, model: int | None, ingress: int | None, api: int | None, backend: str) -> dict[int, str]:
    """Each port that is known → what is there. `backend`: its address, as `BackendInfo` has it.

    >>> own_ports(model=11435, ingress=8480, api=None, backend="127.0.0.1:8000")
    {8000: 'the inference server is', 11435: 'agents reach the model', 8480: 'callers reach agents'}
    >>> own_ports(model=None, ingress=None, api=3000, backend="https://10.0.0.1:8000/v1")
    {3000: 'the REST API is'}
    """
    found = {
        _port_here(backend): "the inference server is",
        model: "agents reach the model",
        ingress: "callers reach agents",
        api: "the REST API is",
    }
    return {port: what for port, what in found.items() if port}


def _port_here(address: str) -> int | None:
    """The port of an address on this host, None of a socket's path or another host's."""
    if address.startswith("/"):
        return None
    split = urlsplit(address if "://" in address else f"//{address}")
    return split.port if split.hostname in LOOPBACK else None


def refuse_own(spec: AgentSpec, ports: Mapping[int, str]) -> None:
    """Raises BadRequest where an agent that shares this host's network would listen at a port of Hive's.

    >>> refuse_own(AgentSpec(name="a", port=11435), {11435: "agents reach the model"})
    Traceback (most recent call last):
    hive.errors.BadRequest: port: 11435 is where agents reach the model: a could not listen there
    """
    if spec.port is not None and (what := ports.get(spec.port)):
        raise BadRequest(
            f"port: {spec.port} is where {what}: {spec.name} could not listen there",
            hint="any other one, at which the agent itself listens for callers",
        )
