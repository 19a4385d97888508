"""What an agent finds in its environment: how it reaches the model, and who it is. Pure."""

from __future__ import annotations

from hive.domain import DIALECTS, Agent, BackendInfo, Dialect


def dialect_of(backend: BackendInfo | None) -> Dialect:
    """What an agent that speaks both should speak: Ollama where the backend does, else OpenAI, which all speak."""
    speaks_ollama = backend is not None and Dialect.OLLAMA in DIALECTS[backend.kind]
    return Dialect.OLLAMA if speaks_ollama else Dialect.OPENAI


def environment(
    agent: Agent, *, port: int, token: str, socket: str, dialect: Dialect, model: str | None
) -> dict[str, str]:
    """Its own variables, then Hive's, which it cannot replace. `port`: the proxy's; `token`: the model token.

    >>> from hive.domain import AgentSpec
    >>> agent = Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/bob"], port=9000))
    >>> found = environment(agent, port=11435, token="hm_x", socket="/s", dialect=Dialect.OPENAI, model=None)
    >>> found["OPENAI_BASE_URL"], found["OLLAMA_HOST"], found["HIVE_AGENT_PORT"]
    ('http://127.0.0.1:11435/v1', 'http://127.0.0.1:11435/a/hm_x', '9000')
    """
    found = {
        **agent.spec.env,
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": token,
        "OLLAMA_HOST": f"http://127.0.0.1:{port}/a/{token}",
        "HIVE_PROXY_SOCKET": socket,
        "HIVE_AGENT": agent.name,
        "HIVE_DIALECT": str(dialect),
    }
    if agent.spec.port is not None:
        found["HIVE_AGENT_PORT"] = str(agent.spec.port)
    if model:
        found["HIVE_MODEL"] = model
    return found
