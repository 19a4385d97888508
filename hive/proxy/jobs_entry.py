"""The listener of model jobs: their process asks the model there, and calls agents, as each job may.

A job is known by its token, which the daemon gives it and tells here, and takes away when it ends: what the job has
under way ends with that. It asks as an agent, held to all that holds that agent, or as operator for a tenant. It wakes
no agent by asking as one, and keeps none awake.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hive.dialects.translators import RESPONSES
from hive.domain import Dialect
from hive.errors import Cancelled, HiveError, NotFound, NotPermitted, Saturated, Unauthorized
from hive.link.jobs import JobGrantRow
from hive.proxy.datapath import DataPath, Prepared
from hive.proxy.forward import Exchange
from hive.proxy.identity import bearer
from hive.proxy.ingress import PREFIX, IngressExchange, IngressPath, split_target
from hive.proxy.refusals import answer_error
from hive.proxy.registry import AgentEntry, Registry
from hive.routing.wishes import NO_WISHES, Wishes
from hive.wire.connection import Connection, HttpExchange
from hive.wire.http1 import Request

AGAIN_S = 1.0


class JobsEntry:
    """The jobs that may ask, and the connections on which they do."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._grants: Mapping[str, JobGrantRow] | None = None
        self._asking: dict[Connection, str] = {}
        """Connection → the job whose request it has had."""

    def __repr__(self) -> str:
        return f"<JobsEntry {'unheard' if self._grants is None else len(self._grants)}>"

    def learn(self, grants: Mapping[str, JobGrantRow]) -> None:
        """The daemon has told all that may ask. What others have under way ends."""
        self._grants = grants
        left = {row.job for row in grants.values()}
        for connection, job in list(self._asking.items()):
            if job not in left:
                if connection.exchange is not None:
                    connection.exchange.refuse(Cancelled("the job has ended"))
                connection.close()

    def row_of(self, request: Request) -> JobGrantRow:
        """The job that asks. Raises Unauthorized, and Saturated as long as the daemon has told nothing."""
        if self._grants is None:
            raise Saturated("Hive has just started and does not know the jobs yet", retry_after_s=AGAIN_S)
        row = self._grants.get(self._registry.digest_of(bearer(request)))
        if row is None:
            raise Unauthorized("no job has this token")
        return row

    def agent_of(self, row: JobGrantRow) -> AgentEntry:
        """The agent as which it asks, or the operator. Raises NotFound where the agent is gone."""
        if not row.agent:
            return self._registry.operator
        entry = self._registry.by_id.get(row.agent)
        if entry is None:
            raise NotFound("the agent as which the job asks is removed")
        return entry

    def callee_of(self, row: JobGrantRow, name: str) -> AgentEntry:
        """The agent of this name or id, which the job calls. Raises NotFound, NotPermitted."""
        entry = self._registry.named(name)
        if entry is None:
            raise NotFound(f"there is no agent {name[:60]}")
        if entry.row.id not in row.agents or entry.row.tenant != row.tenant:
            raise NotPermitted(f"the job may not call the agent {entry.row.name}")
        return entry

    def asks(self, connection: Connection, row: JobGrantRow) -> None:
        """This connection is that job's from now on."""
        self._asking[connection] = row.job

    def closed(self, connection: Connection) -> None:
        self._asking.pop(connection, None)


class JobExchange(Exchange):
    """One question of a job to its model."""

    __slots__ = ("_jobs", "_row")

    def __init__(self, path: DataPath, jobs: JobsEntry, row: JobGrantRow, connection: Connection) -> None:
        self._jobs = jobs
        self._row = row
        super().__init__(path, connection)

    @property
    def job(self) -> str:
        return self._row.job

    def _prepare(self, request: Request) -> Prepared:
        return self._decide(request)

    def _1_who_asks(self, request: Request) -> AgentEntry:  # noqa: ARG002 - known before this was made
        """Its agent, whose gate it does not pass: a job goes on while that sleeps."""
        entry = self._jobs.agent_of(self._row)
        self._path.claim(self._connection, entry.jobs)
        self._belongs_to(entry)
        return entry

    def _3_not_too_often(self, prepared: Prepared) -> None:
        """A response that is made in the background was charged when its client asked for it."""
        if prepared.decided.endpoint.name != RESPONSES:
            super()._3_not_too_often(prepared)

    def _wishes(self, request: Request, entry: AgentEntry) -> Wishes:  # noqa: ARG002 - the daemon has said them
        wishes = Wishes(tenant="" if self._row.agent else self._row.tenant, band=self._row.band)
        return NO_WISHES if wishes == NO_WISHES else wishes

    def _is_local_only(self, request: Request) -> bool:  # noqa: ARG002 - the daemon has said it
        return self._row.is_local_only


class JobCallExchange(IngressExchange):
    """One call of a job to an agent: as any caller's, but let in by the job's token."""

    __slots__ = ("_jobs", "_row")

    def __init__(self, path: IngressPath, jobs: JobsEntry, row: JobGrantRow, connection: Connection) -> None:
        self._jobs = jobs
        self._row = row
        super().__init__(path, connection)

    def _callee(self, name: str, token: bytes) -> AgentEntry | None:  # noqa: ARG002 - its job's is what counts
        return self._jobs.callee_of(self._row, name)

    def _not_for_agent(self) -> frozenset[bytes]:
        """Nor the job's token."""
        return super()._not_for_agent() | {b"authorization"}

    def _own_lines(self) -> list[bytes]:
        """The agent may believe it: no other caller can set it."""
        return [b"x-hive-job: %b\r\n" % self._row.job.encode()]

    def _read_target(self, request: Request) -> tuple[str, bytes]:
        name, token, self._prefix, self._rest = split_target(request.target)
        return name, token


class JobsDoor:
    """Stands for a request on this listener until its head says which of the two it is."""

    parked = False

    def __init__(self, path: DataPath, ingress: IngressPath, jobs: JobsEntry, connection: Connection) -> None:
        self._connection = connection
        self._jobs = jobs
        self._ask = partial(JobExchange, path, jobs)
        self._call = partial(JobCallExchange, ingress, jobs)
        self._request: Request | None = None

    def __repr__(self) -> str:
        return "<JobsDoor>"

    def on_head(self, request: Request) -> None:
        self._request = request
        request.keep_alive = False
        try:
            row = self._jobs.row_of(request)
        except HiveError as error:
            self.refuse(error)
            return
        self._jobs.asks(self._connection, row)
        make = self._call if request.target.startswith(PREFIX) else self._ask
        inner: HttpExchange = make(row, self._connection)
        self._connection.exchange = inner
        inner.on_head(request)

    def on_body(self, size: int) -> None:
        """Its head was refused, or has not come."""

    def on_request(self, request: Request) -> None:
        """Its head was refused."""

    def refuse(self, error: HiveError) -> None:
        keep = answer_error(self._connection, self._request, error, Dialect.OPENAI)
        self._connection.finished(keep=keep)

    def on_gone(self) -> None:
        """Nothing was begun for it."""

    def on_blocked(self) -> None:
        """It writes nothing but a refusal."""

    def on_unblocked(self) -> None:
        """See `on_blocked`."""
