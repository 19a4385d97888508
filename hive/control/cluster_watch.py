"""Looks at the cluster behind the active backend's address: which engine tells of it, and what it tells."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from hive.backends import ask, ray_serve, vllm_ranks, vllm_router
from hive.backends.backend import BackendControl
from hive.backends.capacity import LABELS, LOOK_S, Capacity, CapacityMeter, ClusterLook
from hive.backends.conversation import ControlAnswer
from hive.backends.kinds import spec_of
from hive.domain import BackendKind, CloudUse, origin_of
from hive.errors import ConfigError, HiveError, NotPermitted
from hive.host.access import RemoteAccess, cluster_access_of
from hive.settings.table import Settings

log = logging.getLogger("hive.daemon")

LOOKED_FOR = frozenset({BackendKind.VLLM, BackendKind.REMOTE, BackendKind.DEMO})
"""Kinds of server behind which there may be a cluster: all that are found behind a router or an ingress."""
NOTHING = Capacity()


class ClusterWatch:
    """The cluster at one address. `engine` is empty where there is none, and then nothing is asked.

    `access()`: to the backend itself. `tokens_come()`: whether answers go on, whatever the engine says; raises
    HiveError where nobody knows.
    """

    def __init__(
        self,
        address: str,
        *,
        settings: Callable[[], Settings],
        access: Callable[[], RemoteAccess],
        tokens_come: Callable[[], Awaitable[bool]],
    ) -> None:
        self._address = address
        self._settings = settings
        self._access = access
        self._tokens_come = tokens_come
        self._meter: CapacityMeter | None = None
        self._ranks = vllm_ranks.RankWatch()
        self._asks_token: bool | None = None
        """True if Ray's dashboard asks for one; None where it has not said."""
        self._answers = False
        self.capacity = NOTHING
        self.is_sure = False
        """True once every question about the engine was answered, by whatever."""

    def __repr__(self) -> str:
        return f"<ClusterWatch {self._address} {self._meter}>"

    @property
    def engine(self) -> str:
        return "" if self._meter is None else self._meter.engine

    @property
    def routes_around(self) -> bool:
        """Whether the engine says that something runs although its own `/health` may not: vLLM Router answers 503 there
        as soon as one worker is lost."""
        return self.engine == vllm_router.ENGINE and self._answers and bool(self.capacity.places)

    async def find(self, kind: str) -> None:
        """Finds out which engine tells, and looks. Called once the backend came up, and again from time to time. The
        engine stays where some question was not answered."""
        self.is_sure = True
        engine = await self._engine(kind) or ("" if self.is_sure else self.engine)
        if engine != self.engine:
            log.info("cluster_found address=%s engine=%s", self._address, engine or "none")
            self._meter = CapacityMeter(engine) if engine else None
            self._ranks, self.capacity = vllm_ranks.RankWatch(), NOTHING
        self._asks_token = None
        if engine:
            await self.look()

    async def look(self) -> None:
        """Asks the engine what runs. Never raises; an engine that does not answer is a state."""
        meter = self._meter
        if meter is None:
            return
        silent = ""
        try:
            found = await self._look(meter.engine)
        except HiveError as error:
            found, silent = None, error.message
        comes = found is not None and not found.places and await self._go_on()
        if meter is not self._meter:
            return  # another engine was found meanwhile
        before, self._answers = self.capacity, found is not None
        self.capacity = meter.see(found, now=time.monotonic(), at=time.time(), tokens_come=comes, silent=silent)
        if self.capacity.warning and not before.warning:
            log.warning("cluster_silent address=%s engine=%s error=%s", self._address, meter.engine, silent)
        if self.capacity.places != before.places:
            log.info(
                "cluster_places address=%s engine=%s places=%s told=%r",
                self._address,
                meter.engine,
                self.capacity.places,
                self.capacity.places_from,
            )

    async def _go_on(self) -> bool:
        try:
            return await self._tokens_come()
        except HiveError:
            return False

    async def _look(self, engine: str) -> ClusterLook:
        inference = self._settings().inference
        if engine == vllm_ranks.ENGINE:
            ranks = await self._backend().converse(vllm_ranks.asked)
            return self._ranks.see(ranks, inference, now=time.monotonic())
        if engine == vllm_router.ENGINE:
            control = self._teller() if inference.backend_cluster_url else self._backend()
            return await control.converse(lambda server: vllm_router.look(server, inference))
        prefix, teller = origin_of(self._address).prefix, self._teller()
        if self._asks_token is None:
            self._asks_token = await self._does_ask_token(teller.address)
        notes = ("no_token",) if self._asks_token is False else ()
        return await teller.converse(lambda server: ray_serve.look(server, prefix, inference, notes))

    def _backend(self) -> BackendControl:
        return _asked(self._address, self._access().shown_to(self._address))

    def _teller(self) -> BackendControl:
        """The server that settings name for it, or its dashboard. Raises HiveError where there is none, or the token
        cannot be read."""
        inference = self._settings().inference
        address = ray_serve.dashboard_of(self._address, inference.backend_cluster_url)
        if not address:
            raise ConfigError("backend_cluster_url of [inference] does not say where Ray's dashboard is")
        if self._is_forbidden(address):
            raise NotPermitted(f"{address} is not asked: cloud = never, and it is another host")
        return _asked(address, cluster_access_of(inference, os.environ))

    # which engine it is -----------------------------------------------------------------------------------------------

    async def _engine(self, kind: str) -> str:
        inference = self._settings().inference
        chosen, named, origin = inference.backend_cluster, inference.backend_cluster_url, origin_of(self._address)
        if kind not in LOOKED_FOR or (chosen != "auto" and origin.dialled.startswith("/")):
            return ""  # Hive has been switched to a server of its own
        if chosen != "auto":
            return chosen if chosen in LABELS else ""
        if origin.tls and not origin.is_here and not named:
            return ""  # somebody's service: its list of models is the only thing to ask it for
        readiness, workers, routes, metrics = await asyncio.gather(
            self._answer(self._address, vllm_router.READINESS),
            self._answer(self._address, vllm_router.WORKERS),
            self._answer(_root_of(self._address), ray_serve.ROUTES),
            self._answer(self._address, vllm_ranks.METRICS) if kind == BackendKind.VLLM else _nothing(),
        )
        if vllm_router.is_router(readiness, workers):
            return vllm_router.ENGINE
        if ray_serve.routes_in(routes):
            return ray_serve.ENGINE
        if named and (engine := await self._engine_at(ray_serve.url_address(named))):
            return engine
        ranks = {} if metrics is None else vllm_ranks.ranks_in(metrics.body)
        return vllm_ranks.ENGINE if len(ranks) > 1 else ""

    async def _engine_at(self, address: str) -> str:
        """The engine that answers at the address that settings name."""
        readiness, workers, applications, mode = await asyncio.gather(
            *(
                self._answer(address, question)
                for question in (
                    vllm_router.READINESS,
                    vllm_router.WORKERS,
                    ray_serve.APPLICATIONS,
                    ray_serve.AUTHENTICATION,
                )
            )
        )
        if vllm_router.is_router(readiness, workers):
            return vllm_router.ENGINE
        is_ray = ray_serve.is_dashboard(applications) or ray_serve.asks_for_token(mode)
        return ray_serve.ENGINE if is_ray else ""

    async def _does_ask_token(self, address: str) -> bool | None:
        try:
            return ray_serve.asks_for_token(await ask.get(address, ray_serve.AUTHENTICATION, within_s=LOOK_S))
        except HiveError:
            return None

    async def _answer(self, address: str, question: str) -> ControlAnswer | None:
        """The answer to a question without any key, None where there is none."""
        if self._is_forbidden(address):
            return None
        try:
            return await ask.get(address, question, within_s=LOOK_S)
        except HiveError:
            self.is_sure = False
            return None

    def _is_forbidden(self, address: str) -> bool:
        """Whether a question there would leave the box, and none may."""
        return self._settings().inference.cloud == CloudUse.NEVER and not origin_of(address).is_here


async def _nothing() -> None:
    """No answer to a question that is not asked."""


def _asked(address: str, access: RemoteAccess) -> BackendControl:
    return BackendControl(spec_of(BackendKind.REMOTE), address, access)


def _root_of(address: str) -> str:
    """The same server, without the path.

    >>> _root_of("10.0.0.1:80"), _root_of("http://10.0.0.1:80/llm"), _root_of("https://h/llm"), _root_of("/run/v.sock")
    ('10.0.0.1:80', '10.0.0.1:80', 'https://h', '/run/v.sock')
    """
    origin = origin_of(address)
    return f"https://{origin.host}" if origin.tls else origin.dialled


async def unknown() -> bool:
    """Whether tokens come, where nobody is there to ask."""
    return False
