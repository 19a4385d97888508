"""The part of the API about leases: memory of the pool for programs that are no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.api.caller import note, person
from hive.api.op_token import approved
from hive.api.params import Flag, Number, body_of, named
from hive.api.responses import as_json
from hive.api.routes import NDJSON, LeadsTo, RouteRow
from hive.domain import Band, Role
from hive.errors import BadRequest, NotFound, NotPermitted
from hive.shapes.leases import LeaseList, LeaseView
from hive.store.leases import StoredLease

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR
OPERATIONS = {"job": "lease-run", "held": "lease-take"}
"""Kind of lease → what the rules of governance call it."""
TELL_S = 5.0
"""Between two lines to one who waits, where nothing changes."""
LABEL_MAX = 200
TOKEN_MAX = 10**15 - 1
ENDED = Number("ended", "So many of those that have ended too.", default=0, most=1000)
END = Flag("end", "1: an operator ends it, whoever holds it.")
TOKEN = Number("token", "The lease's own, where its holder gives it back.", default=0, most=TOKEN_MAX)

Mib = Annotated[int, Meta(gt=0, le=1 << 30, description="MiB on each GPU.")]
Gpus = Annotated[int, Meta(ge=1, le=64, description="All of them, or none.")]
Wait = Annotated[float, Meta(ge=0, le=31_536_000, description="It leaves the line after that; 0: now or not at all.")]
Longest = Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="It is ended after that; null: never.")]
Grace = Annotated[
    Annotated[float, Meta(ge=0, le=3600)] | None,
    Meta(description="Between SIGTERM and SIGKILL; null: [lease] grace_s."),
]
Ttl = Annotated[float, Meta(ge=1, le=86_400, description="A held one is overdue so long after it was renewed.")]
Label = Annotated[str, Meta(max_length=LABEL_MAX, description="What it is called in lists.")]


class LeaseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease that is wanted. `kind`: `job`, a process of this box, which comes to lease.sock when it is granted; or
    `held`, for what is none, which renews it. `all`: [lease] share does not hold for it."""

    mb: Mib
    gpus: Gpus = 1
    band: Band = Band.NORMAL
    wait_s: Wait = 3600.0
    max_s: Longest = None
    preemptible: bool = False
    grace_s: Grace = None
    all: bool = False
    kind: Literal["job", "held"] = "job"
    label: Label = ""
    ttl_s: Ttl = 60.0

    @property
    def signed(self) -> dict[str, Any]:
        """The params that signers say yes to: how much memory for how long, and who else may have it."""
        return {
            "vramMB": self.mb,
            "gpus": self.gpus,
            "band": str(self.band),
            "preemptible": self.preemptible,
            "all": self.all,
            "maxS": self.max_s,
        }


class LeaseRenewal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holder's word that it is there."""

    token: Annotated[int, Meta(ge=1, le=TOKEN_MAX, description="The lease's own.")]
    ttl_s: Annotated[Annotated[float, Meta(ge=1, le=86_400)] | None, Meta(description="From now; null: as before.")] = (
        None
    )


class LeaseApi:
    """The handlers."""

    def __init__(self, services: Services, *, stopping: asyncio.Event) -> None:
        self._services = services
        self._stopping = stopping

    def rows(self) -> list[RouteRow]:
        one = "/api/leases/{id}"
        leads_to = LeadsTo(one, {"id": "/id"})
        return [
            RouteRow(
                "GET",
                "/api/leases",
                VIEWER,
                "leases",
                self.leases,
                "Who holds memory, who waits.",
                LeaseList,
                query=(ENDED,),
            ),
            RouteRow(
                "POST",
                "/api/leases",
                OPERATOR,
                "ask_lease",
                self.ask,
                "Ask for memory.",
                LeaseView,
                body=LeaseOrder,
                statuses=(201,),
                errors=(504,),
                leads_to=leads_to,
                is_governed=True,
            ),
            RouteRow("GET", one, VIEWER, "lease", self.lease, "One lease.", LeaseView),
            RouteRow(
                "GET", f"{one}/wait", OPERATOR, "wait_lease", self.wait, "How a wait goes on.", NDJSON, each=LeaseView
            ),
            RouteRow(
                "POST",
                f"{one}/renew",
                OPERATOR,
                "renew_lease",
                self.renew,
                "Hold on to it.",
                LeaseView,
                body=LeaseRenewal,
            ),
            RouteRow(
                "DELETE",
                one,
                OPERATOR,
                "end_lease",
                self.end,
                "Give it back, or end it.",
                LeaseView,
                query=(TOKEN, END),
                is_governed=True,
            ),
        ]

    async def leases(self, request: Request) -> Response:
        """Those in line in their order, then those that hold memory."""
        return as_json({"leases": await self._services.leases.views(ENDED.of(request), person(request))})

    async def ask(self, request: Request) -> Response:
        """It waits in line while it is `waiting`: as long as somebody reads `/wait` of it, or for half a minute.
        Granted, a job has 30 s to come to `socket` with its `nonce`; a held one has its memory at once."""
        order, who = body_of(request, LeaseOrder), person(request)
        if order.kind == "held" and order.preemptible:
            raise BadRequest("preemptible: Hive cannot end what holds a held lease")
        if order.kind == "job" and not who.name.startswith("uid:"):
            raise NotPermitted("a job is a process of this box: ask on the unix socket, or for a held lease")
        note(request, mb=order.mb, gpus=order.gpus, kind=order.kind, label=order.label)
        row = StoredLease(
            kind=order.kind,
            state="waiting",
            actor=who.name,
            label=order.label,
            mb=order.mb,
            gpus=order.gpus,
            band=str(order.band),
            preemptible=order.preemptible,
            is_whole=order.all,
            grace_s=-1.0 if order.grace_s is None else order.grace_s,
            wait_s=order.wait_s,
            max_s=order.max_s,
            ttl_s=order.ttl_s if order.kind == "held" else None,
            boot="",
            asked_s=0.0,
            created_at=0.0,
        )
        approval = await approved(self._services, request, OPERATIONS[order.kind], order.signed)
        lease = await self._services.leases.ask(row, who, approval=approval)
        return as_json(self._services.leases.view(lease, who), status=201)

    async def lease(self, request: Request) -> Response:
        """Also one that has ended, as long as it is kept."""
        return as_json(await self._services.leases.look(named(request, "id"), person(request)))

    async def wait(self, request: Request) -> Response:
        """A line of JSON, a lease, at once, at each change and every five seconds; the last one is granted, running or
        ended. For its asker: a lease in line that nobody reads of leaves it."""
        id, who = named(request, "id"), person(request)
        view = await self._services.leases.look(id, who)
        if view["user"] != who.name and who.role is not Role.ADMIN:
            raise NotFound(f"there is no lease {id[:40]!r} of yours")
        lines = self._services.leases.lines(id, who, every_s=TELL_S, stopping=self._stopping)
        return StreamingResponse(_encoded(lines), media_type=NDJSON, headers={"cache-control": "no-store"})

    async def renew(self, request: Request) -> Response:
        """A held one. With another token than the lease's own, and once it is over, 409."""
        order, who = body_of(request, LeaseRenewal), person(request)
        lease = await self._services.leases.renew(named(request, "id"), order.token, order.ttl_s, who)
        return as_json(self._services.leases.view(lease, who))

    async def end(self, request: Request) -> Response:
        """With `token` by its holder, with `end` by an operator. A program is told to end: `ending` until it has, and
        until its memory was seen to be free."""
        id, who, token = named(request, "id"), person(request), TOKEN.of(request)
        if END.of(request):
            approval = await approved(self._services, request, "lease-end", {"id": id})
            lease = await self._services.leases.end(id, who, approval=approval)
        elif token:
            lease = await self._services.leases.release(id, token, who)
        else:
            await self._services.leases.look(id, who)
            raise NotPermitted(
                "a lease is given back with its token, or ended by an operator",
                hint="hive lease release ID --token TOKEN, or hive lease end ID",
            )
        return as_json(self._services.leases.view(lease, who))


async def _encoded(views: AsyncGenerator[LeaseView, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for view in views:
            yield msgspec.json.encode(view) + b"\n"
    finally:
        await views.aclose()
