"""The part of the API about adapters: bringing, loading, unloading and removing them, and the keys they are signed
with. The last two rows are those that clients of a model runner know; the proxy relays them from its listener.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.models import JOB
from hive.api.op_token import approved, approved_body
from hive.api.order_audit import NAME_MAX
from hive.api.params import Text, body_of, named
from hive.api.responses import as_json, job_begun
from hive.api.routes import LeadsTo, RouteRow
from hive.api.runner import OpToken
from hive.domain import Role
from hive.lifecycle.adapter_orders import AdapterWish
from hive.lifecycle.adapter_views import runner_load
from hive.shapes.adapters import (
    AdapterKeys,
    AdapterList,
    AdapterLoadStatus,
    AdapterRemoved,
    AdapterView,
    RevokedKey,
    RunnerAdapterLoad,
    TrustedKey,
)
from hive.shapes.system import Job

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{0,64}$", description="Its first digits are enough.")]
Name = Annotated[str, Meta(max_length=NAME_MAX)]
DIGEST = Text("digest", "Only the build whose digest begins so.")


class AdapterOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is to be brought. `path`: below `[adapters] dir`; `base`: the model it is an adapter on; `name`:
    what it is called, else as its file or directory is."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    base: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    name: Name = ""


class AdapterLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest`: which build of it; without one that which was installed last."""

    digest: Digest = ""


class RunnerAdapterOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest`: which build of it; without one that which was installed last. `verifiedOpToken`: the signers' word."""

    digest: Digest = ""
    verifiedOpToken: OpToken = None


class KeyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key to be trusted. `keyId`: which the caller takes it for; another one is refused."""

    keyId: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    pem: Annotated[str, Meta(min_length=1, max_length=16384)]


class AdapterApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        adapters, one, keys = "/api/adapters", "/api/adapters/{adapter}", "/api/adapters/keys"
        of_runner = "/llm/adapters/{adapter}"
        return [
            RouteRow("GET", adapters, VIEWER, "adapters", self.all, "Every adapter, and what is loaded.", AdapterList),
            RouteRow(
                "POST",
                adapters,
                ADMIN,
                "pull_adapter",
                self.pull,
                "Bring an adapter.",
                Job,
                body=AdapterOrder,
                statuses=(200, 202),
                errors=(404,),
                leads_to=JOB,
                is_governed=True,
            ),
            RouteRow("GET", keys, VIEWER, "adapter_keys", self.keys, "The keys adapters are signed with.", AdapterKeys),
            RouteRow(
                "POST",
                keys,
                ADMIN,
                "trust_key",
                self.trust,
                "Trust a key.",
                TrustedKey,
                body=KeyOrder,
                statuses=(201,),
                is_governed=True,
            ),
            RouteRow(
                "POST", f"{keys}/{{id}}/revoke", ADMIN, "revoke_key", self.revoke, "Trust a key no more.", RevokedKey
            ),
            RouteRow("GET", one, VIEWER, "adapter", self.one, "Everything known of one adapter.", AdapterView),
            RouteRow(
                "DELETE",
                one,
                ADMIN,
                "remove_adapter",
                self.remove,
                "Remove an adapter.",
                AdapterRemoved,
                query=(DIGEST,),
                is_governed=True,
            ),
            RouteRow(
                "POST",
                f"{one}/load",
                OPERATOR,
                "load_adapter",
                self.load,
                "Load an adapter.",
                Job,
                body=AdapterLoad,
                may_be_empty=True,
                statuses=(200, 202),
                errors=(501,),
                leads_to=JOB,
                is_governed=True,
            ),
            RouteRow(
                "GET",
                f"{one}/load-status",
                VIEWER,
                "adapter_load_status",
                self.load_status,
                "How the last order to load it is.",
                AdapterLoadStatus,
            ),
            RouteRow(
                "POST",
                f"{one}/unload",
                OPERATOR,
                "unload_adapter",
                self.unload,
                "Unload an adapter.",
                Job,
                statuses=(200, 202),
                errors=(501,),
                leads_to=JOB,
                is_governed=True,
            ),
            RouteRow(
                "POST",
                f"{of_runner}/load",
                OPERATOR,
                "runner_load_adapter",
                self.runner_load,
                "Load an adapter.",
                RunnerAdapterLoad,
                body=RunnerAdapterOrder,
                may_be_empty=True,
                statuses=(202,),
                errors=(501,),
                leads_to=LeadsTo(f"{of_runner}/load-status", {"adapter": "/adapterId"}),
            ),
            RouteRow(
                "GET",
                f"{of_runner}/load-status",
                VIEWER,
                "runner_adapter_load",
                self.runner_load_status,
                "How the last order to load it is.",
                RunnerAdapterLoad,
            ),
        ]

    async def all(self, _: Request) -> Response:
        return as_json(await self._services.adapters.listed())

    async def one(self, request: Request) -> Response:
        return as_json(await self._services.adapters.view(named(request, "adapter")))

    async def pull(self, request: Request) -> Response:
        """A job, 202 while it runs. What lies at the path is copied, and the copy is checked: whose signature it has,
        which model it is for, its rank. It is installed whole or not at all, and nothing of it is loaded."""
        order = body_of(request, AdapterOrder)
        note(request, path=order.path[:NAME_MAX], base=order.base, name=order.name)
        params = {"path": order.path, "base": order.base, **({"name": order.name} if order.name else {})}
        approval = await approved(self._services, request, "adapter-pull", params)
        wish = AdapterWish(order.path, order.base, order.name)
        return job_begun(await self._services.adapters.pull(wish, actor(request), approval=approval))

    async def load(self, request: Request) -> Response:
        """A job, 202 while it runs; done at once where it is loaded. Another build of that name answers until this one
        does, and leaves once its last request has ended. Where it fails, the other one stays."""
        order, name = body_of(request, AdapterLoad, empty=AdapterLoad()), named(request, "adapter")
        if order.digest:
            note(request, digest=order.digest)
        params = {"name": name, **({"digest": order.digest} if order.digest else {})}
        approval = await approved(self._services, request, "adapter-load", params)
        job = await self._services.adapters.load(name, actor(request), approval=approval, digest=order.digest)
        return job_begun(job)

    async def load_status(self, request: Request) -> Response:
        """Also of an order that was given before a restart of Hive."""
        return as_json(await self._services.adapters.load_status(named(request, "adapter")))

    async def unload(self, request: Request) -> Response:
        """A job, 202 while it runs: its requests in flight end first, and new ones get what `[adapters] fallback`
        says."""
        name = named(request, "adapter")
        approval = await approved(self._services, request, "adapter-unload", {"name": name})
        return job_begun(await self._services.adapters.unload(name, actor(request), approval=approval))

    async def remove(self, request: Request) -> Response:
        """All builds of that name that are installed, or one. 409 while it is loaded."""
        name, digest = named(request, "adapter"), DIGEST.of(request) or ""
        if digest:
            note(request, digest=digest[:NAME_MAX])
        params = {"name": name, **({"digest": digest} if digest else {})}
        approval = await approved(self._services, request, "adapter-remove", params)
        removed = await self._services.adapters.remove(name, actor(request), approval=approval, digest=digest)
        return as_json(removed)

    async def keys(self, _: Request) -> Response:
        return as_json(await self._services.adapters.keys())

    async def trust(self, request: Request) -> Response:
        """From now on adapters that it has signed may be installed and loaded. Where the keys are root's, 403:
        `hive adapter trust` does it then."""
        order = body_of(request, KeyOrder)
        note(request, key=order.keyId)
        approval = await approved(self._services, request, "adapter-trust", {"keyId": order.keyId})
        trusted = await self._services.adapters.trust(order.keyId, order.pem, actor(request), approval=approval)
        return as_json({"id": trusted}, status=201)

    async def revoke(self, request: Request) -> Response:
        """Unloads at once what it has signed, and answers when that has left. No rule of governance holds it up. Where
        the keys are root's, 403 unless root has revoked it: `hive adapter revoke` does both."""
        return as_json(await self._services.adapters.revoke(named(request, "id"), actor(request)))

    async def runner_load(self, request: Request) -> Response:
        """Always 202: it is asked after, and may be completed already."""
        order, name = body_of(request, RunnerAdapterOrder, empty=RunnerAdapterOrder()), named(request, "adapter")
        _, approval = await approved_body(self._services, request, "adapter-load", name=name)
        adapters = self._services.adapters
        await adapters.load(name, actor(request), approval=approval, digest=order.digest)
        return as_json(runner_load(await adapters.load_status(name)), status=202)

    async def runner_load_status(self, request: Request) -> Response:
        """404 where it was never ordered to be loaded."""
        return as_json(await self._services.adapters.runner_status(named(request, "adapter")))
