"""Watches the inference server: whether it is up, what it offers, and tells when that changed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from hive.backends.backend import BackendControl, open_backend
from hive.backends.concurrency import OwnQueue, choose_places, named_slots
from hive.backends.described import takes_priority
from hive.backends.kinds import spec_of
from hive.backends.recognise import NAME_WHAT_IS_BEHIND, look, why_no_hive
from hive.control.cluster_watch import ClusterWatch, unknown
from hive.domain import BackendInfo, BackendKind, CloudUse, ModelInfo, origin_of
from hive.errors import HiveError
from hive.host.access import NO_ACCESS, RemoteAccess, access_of
from hive.settings.table import Settings
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

REMOTE_CHECK_S = 30.0
"""Its list of models is the only thing to ask a remote server for, and many hold it to a rate."""


class BackendWatch:
    """One backend at one address; `found` is None while its kind is unknown.

    `settings()`: those in force at that moment. `kind` None: whatever answers at `address` is recognised first.
    `may_change`: also each time that it was down or not read for long, so that another kind of server may answer there
    by then. `is_named`: somebody named the address, so that any server of OpenAI's dialect may.
    `on_read` is called with what it offers, each time that was read; `on_checked(changed)` after each check; `changed`:
    `info` or `models` are not what they were. A backend that is down is a state, no failure. `tokens_come`: as
    `ClusterWatch` has it.
    """

    def __init__(
        self,
        kind: str | None,
        address: str,
        *,
        settings: Callable[[], Settings],
        on_checked: Callable[[bool], None],
        on_read: Callable[[BackendControl, Sequence[ModelInfo]], Awaitable[None]] | None = None,
        may_change: bool = False,
        is_named: bool = False,
        tokens_come: Callable[[], Awaitable[bool]] = unknown,
    ) -> None:
        self._address = address
        self._settings = settings
        self._on_checked = on_checked
        self._on_read = on_read
        self._may_change = may_change or kind is None
        self._is_named = is_named
        self._backend: BackendControl | None = None
        self._told_places: int | None = None
        self._own_queue = OwnQueue()
        self._queue_warning = ""
        self._cluster = ClusterWatch(address, settings=settings, access=self._access, tokens_come=tokens_come)
        self.info: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.seen_at: float | None = None
        """Unix seconds at which it said what it offers; None where it never has."""
        self._models_at = float("-inf")
        self._mark = ""
        self._hive_warning = ""
        self._checking = asyncio.Lock()
        self.checked = asyncio.Event()
        """Set once the first check is over."""
        if kind is not None:
            self._take(kind)

    def __repr__(self) -> str:
        return f"<BackendWatch {self._address} {'up' if self.up else 'down'}, {len(self.models)} models>"

    @property
    def address(self) -> str:
        return self._address

    @property
    def up(self) -> bool:
        return self.info is not None and self.info.up

    @property
    def control(self) -> BackendControl | None:
        """The server, to be given orders; None while its kind is unknown."""
        return self._backend

    async def run(self) -> None:
        """Checks every `backend_check_s`, and looks at its cluster every `cluster_poll_s`, until cancelled."""
        following = spawn(self._follow_cluster(), name="cluster")
        try:
            while True:
                await self.check()
                self.checked.set()
                every_s = self._settings().daemon.backend_check_s
                is_remote = self.info is not None and spec_of(self.info.kind).is_remote
                await asyncio.sleep(max(every_s, REMOTE_CHECK_S) if is_remote else every_s)
        finally:
            following.cancel()

    async def _follow_cluster(self) -> None:
        while True:
            begun_at = time.monotonic()
            if self._cluster.engine:
                await self.look_at_cluster()
            every_s = self._settings().inference.cluster_poll_s
            await asyncio.sleep(max(0.0, begun_at + every_s - time.monotonic()))

    async def look_at_cluster(self) -> None:
        """Asks the engine behind the address what of it runs; what that changes is told at once."""
        before = _lasting(self.info)
        await self._cluster.look()
        if self.info is not None:
            self._use_places()
            self._on_checked(before != _lasting(self.info))

    async def check(self, *, anew: bool = False) -> None:
        """Is it up, and does its own queue fill?

        What it offers is asked when it came up, every `models_refresh_s`, where its mark is another one (it was
        replaced, or given other models, between two looks), and `anew`: then files that came since, too.
        """
        async with self._checking:
            await self._check(anew)

    async def _check(self, anew: bool) -> None:
        if self._settings().inference.cloud == CloudUse.NEVER and not origin_of(self._address).is_here:
            return  # that question would leave the box, too
        before = (_lasting(self.info), self.models)
        is_hive = self._may_change and await self._is_to_be_recognised(anew) and not await self._recognise()
        if self._backend is None or self.info is None:
            return
        if spec_of(self.info.kind).is_remote:
            self._backend = open_backend(self.info.kind, self._address, self._access())  # perhaps with another key
        if anew:
            await self._backend.look_for_files()
        up = not is_hive and (await self._backend.health() or self._cluster.routes_around)
        now = asyncio.get_running_loop().time()
        is_due = anew or not self.info.up or now - self._models_at >= self._settings().daemon.models_refresh_s
        if up and not (is_due and self._mark):  # the first mark is older than the first list
            is_due = await self._is_another(self._backend) or is_due
        if up and is_due:
            up = await self._refresh(self._backend, now)
            if up and self._on_read is not None:
                await self._on_read(self._backend, self.models)
        if up and (is_due or not self._cluster.is_sure):
            await self._cluster.find(self.info.kind)
        self.info = msgspec.structs.replace(self.info, up=up)
        if up:
            await self._look_at_queue(self._backend)
        self._say_of_hive(is_hive=is_hive)
        changed = before != (_lasting(self.info), self.models)
        if changed:
            log.info("backend_changed address=%s up=%s models=%d", self._address, up, len(self.models))
        self._on_checked(changed)

    async def loaded(self) -> frozenset[str] | None:
        """The models in memory, as `BackendControl.loaded`; None also where it is down."""
        return await self._backend.loaded() if self._backend is not None and self.up else None

    async def _is_to_be_recognised(self, anew: bool) -> bool:
        """Whether what answers may be another kind of server than at the last look: it was away, or is read anew. A far
        one is not asked more than it has to be: only once it is back, as far as its kind can tell that."""
        if self.info is None or self._backend is None:
            return True
        if not self.info.up:
            is_far = spec_of(self.info.kind).is_remote and not origin_of(self._address).is_here
            return not is_far or await self._backend.health()
        age_s = asyncio.get_running_loop().time() - self._models_at
        return origin_of(self._address).is_here and (anew or age_s >= self._settings().daemon.models_refresh_s)

    async def _recognise(self) -> bool:
        """Takes the kind of what answers; one that is not known, as it loads or is silent, stays what it was. False
        where it is a Hive."""
        is_named = self._is_named or bool(self._settings().inference.backend_url)
        found = await look(self._address, self._access() if is_named else None)
        kind = found.info.kind if found.info is not None else BackendKind.REMOTE if found.is_hive else None
        if kind is not None and (self.info is None or (self.info.kind != kind and not found.is_hive)):
            if self.info is not None:
                log.info("backend_is_another address=%s kind=%s was=%s", self._address, kind, self.info.kind)
                self._told_places, self._mark = None, ""
            self._take(kind)
        return not found.is_hive

    def _say_of_hive(self, *, is_hive: bool) -> None:
        """Warns, once, of a Hive at the address; it is no backend, and counts as down."""
        assert self.info is not None
        warning = f"{why_no_hive(self._address)}; {NAME_WHAT_IS_BEHIND}" if is_hive else ""
        if warning and not self._hive_warning:
            log.error("backend_is_hive address=%s why='%s'", self._address, warning)
        if warning != self._hive_warning:
            self._hive_warning = warning
            self._use_places()

    def _access(self) -> RemoteAccess:
        """Without a key where that cannot be read: the server then says that it asks for one."""
        if "://" not in self._address and (self.info is not None and not spec_of(self.info.kind).is_remote):
            return NO_ACCESS
        try:
            return access_of(self._settings().inference, os.environ)
        except HiveError as error:
            log.error("backend_key_not_read error=%s", error.message)
            return NO_ACCESS

    async def _is_another(self, backend: BackendControl) -> bool:
        """Whether what answers is not what answered at the last look; False where it does not tell."""
        mark = await backend.mark()
        before, self._mark = self._mark, mark or self._mark
        return self._mark != before

    async def _refresh(self, backend: BackendControl, now: float) -> bool:
        """Reads version and models; False where it went down over that."""
        try:
            version, models = await backend.version(), await backend.models()
            capabilities = await backend.capabilities()
        except HiveError as error:
            log.warning("backend_not_read address=%s error=%s", self._address, error.message)
            return False
        assert self.info is not None
        self._models_at = now
        self.seen_at = time.time()
        priority = takes_priority(self.info.kind, self._settings(), capabilities)
        self.info = msgspec.structs.replace(self.info, version=version, capabilities=capabilities, priority=priority)
        self.models = models
        return True

    async def _look_at_queue(self, backend: BackendControl) -> None:
        """Asks the server for its own limit, and for a queue of its own that contradicts it."""
        assert self.info is not None
        busy = await backend.busy()
        if busy.places is not None:  # a question that was not answered takes no limit away
            self._told_places = busy.places
        cluster, places = self._cluster.capacity.cluster, self._places()[0]
        waiting = busy.waiting if cluster is None else cluster.waiting
        before, self._queue_warning = self._queue_warning, self._own_queue.see(waiting, places=places)
        if self._queue_warning and not before:
            log.warning("backend_queues address=%s waiting=%s slots=%s", self._address, waiting, places)
        self._use_places()

    def _places(self) -> tuple[int | None, str]:
        """Requests to send at once, and where that number comes from. What an operator sets comes first, then what the
        cluster tells."""
        assert self.info is not None
        settings, capacity = self._settings(), self._cluster.capacity
        if capacity.places is not None and not settings.proxy.backend_concurrency:
            return capacity.places, capacity.places_from
        return choose_places(self.info.kind, self._told_places, settings)

    def _use_places(self) -> None:
        assert self.info is not None
        places, places_from = self._places()
        capacity = self._cluster.capacity
        self.info = msgspec.structs.replace(
            self.info,
            places=places,
            places_from=places_from,
            warning="; ".join(filter(None, (self._hive_warning, capacity.warning, self._queue_warning))),
            id_slots=named_slots(self.info.kind, self._told_places, self._settings()),
            cluster=capacity.cluster,
        )

    def _take(self, kind: str) -> None:
        places, places_from = choose_places(kind, None, self._settings())
        self.info = BackendInfo(
            kind=kind,
            address=self._address,
            label=f"{spec_of(kind).label} at {self._address}",
            places=places,
            places_from=places_from,
            priority=takes_priority(kind, self._settings()),
        )
        self._backend = open_backend(kind, self._address, self._access())


def _lasting(info: BackendInfo | None) -> BackendInfo | None:
    """The same without what is another at each look: that is no news for those who only send requests."""
    if info is None or info.cluster is None:
        return info
    cluster = msgspec.structs.replace(info.cluster, asked_at=0.0, waiting=None, waited_s=None)
    return msgspec.structs.replace(info, cluster=cluster)
