"""The runner's listener: trusted clients with a token of the API.

They ask the model as agents do, and may say for whom (`X-Tenant-ID`, `X-Priority`, `X-Cache-Mode`, `X-Cache-Tag`). The
runner's own paths are an exact table; a request for one is relayed to the daemon, which knows what its token may do.
Nothing of a stranger reaches the daemon, and none of a stranger's bytes are kept: who asks is known from the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from hive.dialects.errors import error_fields
from hive.domain import Dialect, Role
from hive.endpoints.runner_paths import is_runners
from hive.errors import HiveError, LinkLost, NotPermitted, RunnerNotReady, Saturated, TooLarge, Unauthorized
from hive.link.link import Link
from hive.link.runner import CALLS_MAX, RunnerCall, RunnerSaid, TokenRow
from hive.proxy.datapath import DataPath, Prepared
from hive.proxy.forward import Exchange
from hive.proxy.identity import bearer
from hive.proxy.registry import AgentEntry
from hive.shapes.runner import runner_error
from hive.tasks import spawn
from hive.wire.connection import Connection
from hive.wire.http1 import Request, answer_head, answered_later

BODY_MAX_BYTES = 1024 * 1024
"""Of a request that is relayed, as the API takes it."""
ANSWERED_S = 900.0
"""An unload waits for what is in flight; the daemon answers sooner than this."""
AGAIN_S = 2.0
CHALLENGE = b"www-authenticate: Bearer\r\n"


class RunnerEntry:
    """The tokens that let in at the runner's listener, and the way to the daemon."""

    def __init__(self, link: Callable[[], Link]) -> None:
        """`link`: to the daemon; raises LinkLost where there is none."""
        self._link = link
        self._tokens: Mapping[str, TokenRow] | None = None
        self._calls = 0

    def __repr__(self) -> str:
        return f"<RunnerEntry {'unheard' if self._tokens is None else len(self._tokens)}, {self._calls} calls>"

    def learn(self, tokens: Mapping[str, TokenRow]) -> None:
        """The daemon has told all tokens."""
        self._tokens = tokens

    def row_of(self, digest: str, now: float) -> TokenRow:
        """The token of this digest. Raises Unauthorized, and RunnerNotReady as long as the daemon has told nothing.
        `now`: Unix seconds."""
        if self._tokens is None:
            raise RunnerNotReady("Hive has just started and does not know the tokens yet", retry_after_s=AGAIN_S)
        row = self._tokens.get(digest)
        if row is None or (row.expires_at is not None and row.expires_at <= now):
            raise Unauthorized("no valid token", hint="Authorization: Bearer TOKEN; hive token create makes one")
        return row

    def check_operator(self, digest: str, now: float) -> TokenRow:
        """The same of an operator's token. Raises NotPermitted for a viewer's."""
        row = self.row_of(digest, now)
        if row.role.rank < Role.OPERATOR.rank:
            raise NotPermitted(f"this token is {row.role}'s, and the model is asked with an operator's")
        return row

    async def ask(self, call: RunnerCall) -> RunnerSaid:
        """The daemon's answer. Raises RunnerNotReady where it is not there, Saturated where too much is asked of it at
        once, and what it raises."""
        if self._calls >= CALLS_MAX:
            raise Saturated(f"{self._calls} requests to the runner are being answered", retry_after_s=AGAIN_S)
        self._calls += 1
        try:
            return await self._link().ask(call, RunnerSaid, timeout_s=ANSWERED_S)
        except LinkLost:
            raise RunnerNotReady("Hive is starting, or stopping", retry_after_s=AGAIN_S) from None
        finally:
            self._calls -= 1


class RunnerExchange(Exchange):
    """One request at the runner's listener."""

    __slots__ = ("_entry", "_is_relayed")

    def __init__(self, path: DataPath, entry: RunnerEntry, connection: Connection) -> None:
        self._entry = entry
        self._is_relayed = False
        super().__init__(path, connection)

    # what is relayed --------------------------------------------------------------------------------------------------

    def on_head(self, request: Request) -> None:
        self._is_relayed = is_runners(request.target)
        if not self._is_relayed:
            super().on_head(request)
            return
        self._request = request
        try:
            self._let_in(request, self._entry.row_of)
            if (request.content_length or 0) > BODY_MAX_BYTES:
                raise _too_large()
        except HiveError as error:
            self._refusal = error
            if not answered_later(request):
                self.refuse(error)

    def on_body(self, size: int) -> None:
        request = self._request
        if self._is_relayed and self._refusal is None and request is not None and request.body_bytes > BODY_MAX_BYTES:
            raise _too_large()
        super().on_body(size)

    def on_request(self, request: Request) -> None:
        if not self._is_relayed:
            super().on_request(request)
            return
        self._held.is_in(self)
        if self._refusal is not None:
            self.refuse(self._refusal)
        else:
            self._pending = spawn(self._relay(request), name="runner call")

    def refuse(self, error: HiveError, *, cut: bool = True) -> None:
        if self.left or not self._is_relayed:
            super().refuse(error, cut=cut)
            return
        self._path.metrics.refused(error.code)
        self._close_if_draining()
        request, connection = self._request, self._connection
        keep = request is not None and request.complete and request.keep_alive
        content = msgspec.json.encode(runner_error(error))
        fields = error_fields(error) + (CHALLENGE if error.status == Unauthorized.status else b"")
        head = answer_head(error.status, len(content), fields, keep=keep)
        connection.write(head if connection.asks_head else head + content)
        self._leave(time.monotonic())
        connection.finished(keep=keep)

    async def _relay(self, request: Request) -> None:
        try:
            said = await self._entry.ask(call_of(request, self._connection.peer))
        except HiveError as error:
            self._pending = None
            self.refuse(error)
            return
        self._pending = None
        self._close_if_draining()
        keep = request.keep_alive
        kind = said.fields.get("content-type", "application/json").encode("latin-1")
        fields = b"".join(
            b"%b: %b\r\n" % (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in said.fields.items()
            if name != "content-type"
        )
        head = answer_head(said.status, len(said.body), fields, keep=keep, content_type=kind)
        self._connection.write(head if request.method == b"HEAD" else head + said.body)
        self._leave(time.monotonic())
        self._connection.finished(keep=keep)

    # what asks the model ----------------------------------------------------------------------------------------------

    def _prepare(self, request: Request) -> Prepared:
        """Its token is looked at each time: it may have been revoked, or have expired."""
        return self._decide(request)

    def _1_who_asks(self, request: Request) -> AgentEntry:
        """The operator, for whoever shows an operator's token."""
        return self._let_in(request, self._entry.check_operator)

    def _let_in(self, request: Request, check: Callable[[str, float], TokenRow]) -> AgentEntry:
        """The operator, whose connection it is from now on, where `check` raises nothing about its token."""
        registry = self._path.registry
        try:
            check(registry.digest_of(bearer(request)), time.time())
        except HiveError:
            request.keep_alive = False
            raise
        if self.entry is None:
            entry = registry.operator
            if not self._path.has_room(entry):
                request.keep_alive = False
                raise Saturated("too many connections of trusted clients are open", retry_after_s=1)
            self._path.claim(self._connection, entry.connections)
            self._connection.owner = entry
            self._0_enter(entry)
        if self._refusal is not None:
            raise self._refusal
        assert self.entry is not None
        return self.entry

    @property
    def _dialect(self) -> Dialect:
        return Dialect.OPENAI if self._is_relayed else super()._dialect


def call_of(request: Request, peer: str) -> RunnerCall:
    """The request as the daemon is told it.

    >>> call_of(Request(b"GET", b"/health", [(b"authorization", b"Bearer x")]), "").authorization
    b'Bearer x'
    """
    kind, token = request.field(b"content-type"), bearer(request)
    return RunnerCall(
        method=request.method.decode("latin-1"),
        target=request.target.decode("latin-1"),
        authorization=b"Bearer " + token if token else b"",
        content_type="" if kind is None else kind.decode("latin-1"),
        body=b"".join(request.body),
        peer=peer,
    )


def _too_large() -> TooLarge:
    return TooLarge(f"the body is larger than {BODY_MAX_BYTES} bytes")
