"""The daemon as the API needs it: one protocol, so that the API is tested without a daemon.

{ref} is an agent's id or name. Every answer is what goes out as JSON; its type says what is in it (system.py). Every
method raises a `HiveError` that says what is wrong: NotFound for an unknown ref, WrongState naming the state, …
`actor` is the caller (`uid:0`), for the audit table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hive.control.executing import ExecOrder, Inside
from hive.control.feed import Event
from hive.control.pull_order import PullOrder
from hive.control.state_queries import StateQueries
from hive.control.tail import Output
from hive.domain import AgentSpec, By, Role, Tier
from hive.shapes import prompts, system
from hive.shapes.agents import (
    AgentChanges,
    AgentPage,
    AgentUsage,
    AgentView,
    Applied,
    KeptDeleted,
    KeptOfAgent,
    MessageDropped,
    MessageList,
    MessageOf,
    Removals,
    Removed,
    ScheduleCancelled,
    ScheduleList,
    ScheduleOf,
    ShortPage,
    Tokens,
)
from hive.shapes.models import ModelList, ModelView
from hive.shapes.tokens import ApiToken, ApiTokens, NewApiToken
from hive.store.audit import AuditRecord, Filter
from hive.store.usage import UsageFilter


class Desk(Protocol):
    """The daemon as the API sees it. A transition that is called is carried through even if its caller leaves."""

    @property
    def state_queries(self) -> StateQueries:
        """Hive's own database, read with SQL."""
        ...

    def health(self) -> system.Health:
        """The state of Hive, and its problems."""
        ...

    def route(self, model: str, tier: Tier, tenant: str = "") -> system.Route:
        """The model, of those there are, that an agent of this tier is given; with a tenant, within its limits."""
        ...

    async def models(self) -> ModelList:
        """The models of the inference server, by its last answer."""
        ...

    async def model(self, model: str) -> ModelView:
        """One of them, or what an alias stands for. Raises NotFound with the nearest name."""
        ...

    async def refresh_models(self) -> ModelList:
        """Asks now. Raises DependencyDown, WrongState in the middle of a switch."""
        ...

    async def pull_model(self, order: PullOrder, actor: str) -> system.Job:
        """A job. Raises NotFound, NotPermitted, BadRequest, NotSupported, WrongState (models.py)."""
        ...

    async def remove_model(self, model: str, *, force: bool, actor: str) -> system.Job:
        """A job. Raises NotFound, WrongState where it is in use."""
        ...

    def prompts(self) -> prompts.Prompts:
        """Every system prompt of living agents, without its text."""
        ...

    async def views(self) -> list[AgentView]:
        """Every agent, by name."""
        ...

    async def page(self, after: str, limit: int) -> AgentPage:
        """A page of agents by name: those behind `after`, at most `limit`."""
        ...

    def shorts(self, after: str, limit: int) -> ShortPage:
        """The same without asking helper or proxy."""
        ...

    async def changes(self, since: str, fresh: Collection[str]) -> AgentChanges:
        """The agents changed since the answer with that cursor.

        All there are, and `is_whole`, where `since` is empty or too old. Values that move with time alone (`why`,
        `cpu_us` …), and messages and schedules, are no change; agents named in `fresh`, by id, are in `agents` in any
        case.
        """
        ...

    async def view(self, ref: str) -> AgentView:
        """One agent."""
        ...

    async def create(self, spec: AgentSpec, actor: str) -> AgentView:
        """Its view. WrongState where the name is taken."""
        ...

    async def apply(self, spec: AgentSpec, actor: str, *, dry_run: bool = False) -> Applied:
        """Applies a spec; returns the changes made, or to be made with `dry_run`. WrongState for another's cid."""
        ...

    async def start(self, ref: str, actor: str) -> AgentView: ...

    async def stop(self, ref: str, actor: str) -> AgentView: ...

    async def restart(self, ref: str, actor: str) -> AgentView: ...

    async def resume(self, ref: str, actor: str) -> AgentView: ...

    async def pause(self, ref: str, *, timeout_s: float, now: bool, deep: bool, actor: str) -> AgentView:
        """Its view, asleep. TimedOut after `timeout_s`; with `now` a busy agent is refused at once, code `busy`.

        `deep`: once its memory is paged out; NotSupported and Saturated leave it asleep, but not deep.
        """
        ...

    async def execute(self, ref: str, order: ExecOrder, actor: str) -> Inside:
        """Begun, in an agent that is awake and stays so: the caller ends it with `async with`.

        NotSupported for a kind of agent nobody gets into, NotPermitted for a program the policy does not name.
        """
        ...

    async def keep_awake(self, ref: str, for_s: float, actor: str) -> AgentView:
        """Its view; for so many seconds from now it is not put to sleep, 0 ends that."""
        ...

    async def remove(self, ref: str, actor: str) -> Removed:
        """Stopped and forgotten, with its messages and schedules; its usage stays."""
        ...

    async def remove_many(self, refs: Collection[str], actor: str) -> Removals:
        """`remove` of each; one that fails keeps no other one."""
        ...

    async def send(self, ref: str, text: str, actor: str) -> MessageOf:
        """It is kept until the agent accepts it. BadRequest where it has no port, Saturated."""
        ...

    async def messages(self, ref: str) -> MessageList:
        """All that were not accepted, the oldest first."""
        ...

    async def message(self, ref: str, message_id: str, *, wait_s: float) -> MessageOf:
        """One of them; where it waits, once that is over, or after `wait_s`."""
        ...

    async def drop_message(self, ref: str, message_id: str, actor: str) -> MessageDropped: ...

    async def responses(self, ref: str) -> KeptOfAgent:
        """Number and size; never what is in them."""
        ...

    async def delete_responses(self, ref: str, actor: str) -> KeptDeleted:
        """All of them; they are on the disk no more when this returns."""
        ...

    async def schedule(self, ref: str, when: str, every: str | None, note: str, actor: str) -> ScheduleOf:
        """A new one: `when` and `every` as a person writes them (schedule_times.py). BadRequest, Saturated."""
        ...

    def schedules(self, ref: str) -> ScheduleList:
        """The next one first."""
        ...

    async def cancel_schedule(self, ref: str, schedule_id: int, actor: str) -> ScheduleCancelled: ...

    def tokens(self, ref: str) -> Tokens:
        """LinkLost before the proxy has said its ports."""
        ...

    def output(self, ref: str) -> Output:
        """The agent's output; there may be none yet. LinkLost where only the helper knows, and is not there."""
        ...

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> AgentUsage:
        """The shape of the original specification; `recent` has at most `limit` requests."""
        ...

    async def usage(self, since_s: float, by: By, of: UsageFilter) -> system.Usage:
        """The usage of the last `since_s` seconds. `of.agent` is a ref; the id of a removed one, too."""
        ...

    def inference(self) -> system.Inference:
        """The one in use, and the job that changes to another one."""
        ...

    async def backends(self) -> system.Backends:
        """The backends to choose from, as they are now."""
        ...

    async def backend_log(self, kind: str, lines: int) -> str:
        """The last lines of the server of this kind, or of the one in use for an empty one. NotFound, NotSupported."""
        ...

    async def switch(self, backend: str, actor: str) -> system.Job:
        """A job: to the server of this kind, or at this address. WrongState where a switch is under way."""
        ...

    async def job(self, job_id: str, *, wait_s: float) -> system.Job:
        """The state of the job, once it has ended, or after `wait_s`. Raises NotFound."""
        ...

    async def jobs(self, limit: int) -> list[system.Job]:
        """The last ones, the newest first."""
        ...

    async def cancel_job(self, job_id: str) -> system.Job:
        """The job, when it has ended. WrongState where it is too late for that."""
        ...

    def memory(self) -> system.Memory:
        """The host's."""
        ...

    async def gpus(self) -> system.Gpus:
        """The host's, as they were seen at most a second ago."""
        ...

    async def inference_stats(self) -> system.InferenceStats:
        """The shape of the original specification."""
        ...

    async def metrics(self) -> bytes:
        """For Prometheus (docs/metrics.md)."""
        ...

    def stats(self) -> system.Stats:
        """Counts of all time, and since this daemon started."""
        ...

    def access(self) -> system.Access:
        """The addresses and the token for an operator. LinkLost before the proxy has said its ports."""
        ...

    async def queue(self) -> system.Queue:
        """Raises LinkLost without a proxy."""
        ...

    async def request(self, request_id: str) -> system.RequestView:
        """One request, under way or ended. Raises NotFound."""
        ...

    async def cancel_request(self, request_id: str) -> system.CancelledRequest:
        """Its client gets an error, or a stream that is cut. Raises NotFound where it is not under way, LinkLost."""
        ...

    def config(self) -> system.Config: ...

    async def change_config(self, changes: Mapping[str, Any], actor: str) -> system.Config:
        """All of them or none, text or value by `section.key`, None takes one back. Raises BadRequest, WrongState."""
        ...

    async def shutdown(self, actor: str) -> system.Shutdown:
        """Ingress refuses from now on, every agent is stopped."""
        ...

    def meant(self, ref: str) -> tuple[str, str]:
        """Id and name of the agent that is meant; `ref` itself and nothing where there is none."""
        ...

    async def ordered(self, row: AuditRecord) -> None:
        """Records an order and its end: in the audit table when this returns."""
        ...

    async def audit(self, asked: Filter, limit: int) -> system.AuditPage:
        """The newest first, at most `limit`."""
        ...

    def once_known(self, ref: str) -> str:
        """An agent's id; one that was removed has no name any more. Raises NotFound."""
        ...

    async def past_events(self, limit: int, agent: str = "") -> list[Event]:
        """The last `limit` events, oldest first, of the agent with this id alone where one is named.

        `{"at", "kind", "agent", "name", "from", "to", "reason", …}`.
        """
        ...

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Event]]:
        """Events from now on (`feed.Events.subscribe` is one)."""
        ...

    async def api_tokens(self, *, also_dead: bool) -> ApiTokens:
        """`{"tokens": [{"id", "name", "role", "state", "created_by", …}]}`, without what they are."""
        ...

    async def create_api_token(self, name: str, role: Role, expires_in_s: float | None, actor: str) -> NewApiToken:
        """One of these, and `token`, which nobody can be told again. WrongState where the name is taken."""
        ...

    async def revoke_api_token(self, ref: str, actor: str) -> ApiToken:
        """Revokes by id or name; the token is refused, and answers that are open to it end. NotFound, WrongState."""
        ...
