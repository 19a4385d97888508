"""The environment of an agent: its way to the model, and its identity. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath

from hive.backends.kinds import spec_of
from hive.domain import INNER_PORT, MOUNTED_SOCKET, Agent, AgentSpec, BackendInfo, Dialect, RuntimeKind


def dialect_of(backend: BackendInfo | None) -> Dialect:
    """The dialect for an agent that speaks both: Ollama where the backend does, else OpenAI, which all speak."""
    speaks_ollama = backend is not None and Dialect.OLLAMA in spec_of(backend.kind).dialects
    return Dialect.OLLAMA if speaks_ollama else Dialect.OPENAI


def has_own_network(spec: AgentSpec, *, processes_too: bool = False) -> bool:
    """Whether 127.0.0.1 inside is not the host's. `processes_too`: so it is of process agents that name no networks
    (systemd units).

    >>> has_own_network(AgentSpec(name="a")), has_own_network(AgentSpec(name="a", egress=[]))
    (False, True)
    >>> has_own_network(AgentSpec(name="a", egress=["192.0.2.0/24"]), processes_too=True)
    False
    """
    return spec.runtime is not RuntimeKind.PROCESS or spec.egress == [] or (spec.egress is None and processes_too)


NODE_OPTIONS = "--max-semi-space-size=1"
"""V8 else lets the space for what is young grow: 8 MiB more of an agent after 15 turns, the same CPU time a turn."""


def is_node(spec: AgentSpec) -> bool:
    """Whether its command is Node itself, on this host: an image may have options of its own in its environment.

    >>> [is_node(AgentSpec(name="a", command=[word])) for word in ("node", "/usr/bin/nodejs", "npx", "/srv/node.py")]
    [True, True, False, False]
    """
    return spec.runtime is RuntimeKind.PROCESS and PurePosixPath((spec.command or [""])[0]).name in ("node", "nodejs")


def environment(
    agent: Agent, *, port: int | None, token: str, socket: str, dialect: Dialect, model: str | None
) -> dict[str, str]:
    """The environment of an agent: what it can replace, its own variables, then Hive's, which it cannot replace.

    `port`: the proxy's, None for an agent with a network of its own; `token`: the model token, which is the API key
    everywhere; `socket`: the agent's own, as the host sees it.

    >>> from hive.domain import AgentSpec
    >>> agent = Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/bob"], port=9000))
    >>> found = environment(agent, port=11435, token="hm_x", socket="/s", dialect=Dialect.OPENAI, model=None)
    >>> found["OPENAI_BASE_URL"], found["OLLAMA_HOST"], found["HIVE_AGENT_PORT"]
    ('http://127.0.0.1:11435/v1', 'http://127.0.0.1:11435/a/hm_x', '9000')
    >>> found = environment(agent, port=None, token="hm_x", socket="/s", dialect=Dialect.OPENAI, model=None)
    >>> found["OPENAI_BASE_URL"], found["OLLAMA_HOST"], found["OPENAI_API_KEY"]
    ('http://127.0.0.1:11434/v1', 'http://127.0.0.1:11434', 'hm_x')
    """
    hive = f"http://127.0.0.1:{INNER_PORT if port is None else port}"
    found = {
        **({"NODE_OPTIONS": NODE_OPTIONS} if is_node(agent.spec) else {}),
        **agent.spec.env,
        "OPENAI_BASE_URL": f"{hive}/v1",
        "OPENAI_API_KEY": token,
        "OLLAMA_HOST": hive if port is None else f"{hive}/a/{token}",
        "HIVE_AGENT": agent.name,
        "HIVE_DIALECT": str(dialect),
    }
    match agent.spec.runtime:
        case RuntimeKind.PROCESS:
            found["HIVE_PROXY_SOCKET"] = socket
        case RuntimeKind.DOCKER:
            found["HIVE_PROXY_SOCKET"] = MOUNTED_SOCKET
        case RuntimeKind.FIRECRACKER:
            pass  # nothing of the host's file system is inside
        case RuntimeKind.EXTERNAL:
            pass  # its starter gives it what it needs
    if agent.spec.port is not None:
        found["HIVE_AGENT_PORT"] = str(agent.spec.port)
    if model:
        found["HIVE_MODEL"] = model
    return found
