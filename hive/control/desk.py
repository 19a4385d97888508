"""What the API needs of the daemon: one protocol, so that the API is tested without one.

{ref} is an agent's id or name. Every answer is what goes out as JSON; its shape is written at each method. Every
method raises a `HiveError` that says what is wrong: NotFound for an unknown ref, WrongState naming the state, …
`actor` is who asked (`uid:0`), for the audit table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from hive.domain import AgentSpec

Answer = dict[str, Any]


class Desk(Protocol):
    """The daemon as the API sees it. A transition that is called is carried through even if its caller leaves."""

    def health(self) -> Answer:
        """`{"status", "problems", "version", "pid", "isolation", "proxy", "helper", "redis", "backend", …}`."""
        ...

    async def views(self) -> list[Answer]:
        """Every agent, by name."""
        ...

    async def view(self, ref: str) -> Answer:
        """One agent."""
        ...

    async def create(self, spec: AgentSpec, actor: str) -> Answer:
        """Its view. WrongState where the name is taken."""
        ...

    async def apply(self, spec: AgentSpec, actor: str) -> Answer:
        """`{"agent": view, "created": bool, "changed": [field, …], "restart_needed": bool}`."""
        ...

    async def start(self, ref: str, actor: str) -> Answer: ...

    async def stop(self, ref: str, actor: str) -> Answer: ...

    async def restart(self, ref: str, actor: str) -> Answer: ...

    async def resume(self, ref: str, actor: str) -> Answer: ...

    async def pause(self, ref: str, *, timeout_s: float, now: bool, actor: str) -> Answer:
        """Its view, asleep. TimedOut after `timeout_s`; with `now` a busy agent is refused at once, code `busy`."""
        ...

    async def remove(self, ref: str, actor: str) -> Answer:
        """`{"removed": id, "name": name}`."""
        ...

    def tokens(self, ref: str) -> Answer:
        """`{"model", "ingress", "openai_base_url", "ollama_host", "ingress_url", "socket"}`."""
        ...

    def log_path(self, ref: str) -> Path:
        """The file with the agent's output; it may not exist yet."""
        ...

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> Answer:
        """`{"agentId", "period", "totals", "byModel", "recent"}`, the shape of the original specification."""
        ...

    async def usage(self, since_s: float) -> Answer:
        """`{"token_tracking", "agents": [...], "totals"}` of the last `since_s` seconds."""
        ...

    def inference(self) -> Answer:
        """`{"backend", "label", "address", "running", "version", "models"}`."""
        ...

    def stats(self) -> Answer:
        """`{"agents", "requests", "tokens_in", "tokens_out", "pauses", "wakes", "wake_ms", "errors"}`."""
        ...

    def access(self) -> Answer:
        """How an operator reaches the model through Hive: `{"openai_base_url", "ollama_host", "token"}`."""
        ...

    async def shutdown(self, actor: str) -> Answer:
        """Ingress refuses from now on, every agent is stopped: `{"stopped": [name, …], "failed": [name, …]}`."""
        ...

    async def past_events(self, limit: int) -> list[Answer]:
        """The last `limit` events, oldest first: `{"at", "kind", "agent", "name", "from", "to", "reason", …}`."""
        ...

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Answer]]:
        """Events from now on (`feed.Events.subscribe` is one)."""
        ...
