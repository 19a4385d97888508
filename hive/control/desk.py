"""What the API needs of the daemon: one protocol, so that the API is tested without one.

{ref} is an agent's id or name. Every answer is what goes out as JSON; its shape is written at each method. Every
method raises a `HiveError` that says what is wrong: NotFound for an unknown ref, WrongState naming the state, …
`actor` is who asked (`uid:0`), for the audit table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hive.control.tail import Output
from hive.domain import AgentSpec
from hive.store.audit import AuditRow, Filter
from hive.store.usage import Asked, By

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

    async def apply(self, spec: AgentSpec, actor: str, *, dry_run: bool = False) -> Answer:
        """`{"agent": view, "created": bool, "changed": [field, …], "changes": […], "restart_needed", "dry_run"}`.

        A change is `{"field", "from", "to", "at_restart"}`. `dry_run`: what would be; `agent` is None for a new one.
        """
        ...

    async def start(self, ref: str, actor: str) -> Answer: ...

    async def stop(self, ref: str, actor: str) -> Answer: ...

    async def restart(self, ref: str, actor: str) -> Answer: ...

    async def resume(self, ref: str, actor: str) -> Answer: ...

    async def pause(self, ref: str, *, timeout_s: float, now: bool, deep: bool, actor: str) -> Answer:
        """Its view, asleep. TimedOut after `timeout_s`; with `now` a busy agent is refused at once, code `busy`.

        `deep`: once its memory is paged out; NotSupported and Saturated leave it asleep, but not deep.
        """
        ...

    async def keep_awake(self, ref: str, for_s: float, actor: str) -> Answer:
        """Its view; for so many seconds from now it is not put to sleep, 0 ends that."""
        ...

    async def remove(self, ref: str, actor: str) -> Answer:
        """`{"removed": id, "name": name}`."""
        ...

    async def send(self, ref: str, text: str, actor: str) -> Answer:
        """`{"id", "state", …}`, kept until the agent accepts it. BadRequest where it has no port, Saturated."""
        ...

    async def messages(self, ref: str) -> Answer:
        """`{"agent", "name", "status", "why", "messages": [{"id", "text", "from", "sent_at", "state", …}]}`: all that
        were not accepted, oldest first; `why` the first one waits. `state`: `waiting`, `refused`, `delivered`."""
        ...

    async def message(self, ref: str, message_id: str, *, wait_s: float) -> Answer:
        """One of them; where it waits, once that is over, or after `wait_s`."""
        ...

    async def drop_message(self, ref: str, message_id: str, actor: str) -> Answer: ...

    async def schedule(self, ref: str, when: str, every: str | None, note: str, actor: str) -> Answer:
        """`{"agent", "name", "status", "id", "at", "spoken", "every_s", "clock", "note", "actor", …}`."""
        ...

    def schedules(self, ref: str) -> Answer:
        """`{"agent", "name", "status", "schedules": […]}`, the next one first."""
        ...

    async def cancel_schedule(self, ref: str, schedule_id: int, actor: str) -> Answer: ...

    def tokens(self, ref: str) -> Answer:
        """`{"model", "ingress", "openai_base_url", "ollama_host", "ingress_url", "socket"}`."""
        ...

    def output(self, ref: str) -> Output:
        """Where the agent's output is; there may be none yet. LinkLost where only the helper knows and is not there."""
        ...

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> Answer:
        """`{"agentId", "period", "totals", "byModel", "recent"}`, the shape of the original specification."""
        ...

    async def usage(self, since_s: float, by: By, of: Asked) -> Answer:
        """`{"token_tracking", "by", "agents": [...], "totals"}` of the last `since_s` seconds; `tenants`, `models`,
        `backends` or `hours` (Unix seconds) instead of `agents`. `of.agent` is a ref; the id of a removed one, too."""
        ...

    def inference(self) -> Answer:
        """`{"backend", "label", "address", "running", "version", "models", "switch": job or None, …}`."""
        ...

    async def backends(self) -> Answer:
        """`{"backends": [{"backend", "address", "unit", "in_use", "state", "answers", "version"}]}`: what there is."""
        ...

    async def backend_log(self, kind: str, lines: int) -> str:
        """What the server of this kind wrote last, or the one in use for an empty `kind`. NotFound, NotSupported."""
        ...

    async def switch(self, backend: str, actor: str) -> Answer:
        """A job: to the server of this kind, or at this address. WrongState where a switch is under way."""
        ...

    async def job(self, job_id: str, *, wait_s: float) -> Answer:
        """`{"id", "kind", "state", "step", "progress", "eta_s", "result", "error", "actor", …}`; where it runs, once it
        has ended, or after `wait_s`. `state`: `running`, `done`, `failed`, `cancelled`."""
        ...

    async def jobs(self, limit: int) -> list[Answer]:
        """The last ones, the newest first."""
        ...

    async def cancel_job(self, job_id: str) -> Answer:
        """The job, when it has ended. WrongState where it is too late for that."""
        ...

    def memory(self) -> Answer:
        """The host's: `{"total_bytes", "available_bytes", "swap_total_bytes", "swap_free_bytes", "zram": […], …}`."""
        ...

    async def gpus(self) -> Answer:
        """`{"why_not", "gpus": [{"number", "name", "total_bytes", "used_bytes", "busy_percent", "processes", …}]}`."""
        ...

    async def inference_stats(self) -> Answer:
        """`{"backend", "tokensLastHour", "tokensLastDay", "topAgents", "vram", "activeAgents", "concurrentRequests"}`,
        the shape of the original specification."""
        ...

    async def metrics(self) -> bytes:
        """For Prometheus (docs/metrics.md)."""
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

    def meant(self, ref: str) -> tuple[str, str]:
        """Id and name of the agent that is meant; `ref` itself and nothing where there is none."""
        ...

    async def ordered(self, row: AuditRow) -> None:
        """What somebody ordered, and how it ended: in the audit table when this returns."""
        ...

    async def audit(self, asked: Filter, limit: int) -> Answer:
        """`{"rows": [{"id", "at", "actor", "act", "target", …}], "next": id or None}`, the newest first. `next`: what
        `before` is for the rows that follow."""
        ...

    async def past_events(self, limit: int) -> list[Answer]:
        """The last `limit` events, oldest first: `{"at", "kind", "agent", "name", "from", "to", "reason", …}`."""
        ...

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Answer]]:
        """Events from now on (`feed.Events.subscribe` is one)."""
        ...
