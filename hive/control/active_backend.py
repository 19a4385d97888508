"""The inference server in use: watched, and told to all parts that must know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hive.audit.audit_log import AuditLog
from hive.backends.backend import BackendControl
from hive.backends.switch import Target
from hive.control.backends import BackendWatch
from hive.control.effects import DaemonEffects
from hive.domain import BackendInfo, ModelInfo
from hive.link.messages import BackendChanged
from hive.link.proxy_link import ProxyGates
from hive.store.live import Live
from hive.tasks import spawn


class Active:
    """At most one at a time; `follow` is how it becomes another one.

    `enabled` False: the settings want none at all.
    """

    def __init__(self, *, effects: DaemonEffects, live: Live, proxy_link: ProxyGates, audit_log: AuditLog) -> None:
        self._effects = effects
        self._live = live
        self._proxy_link = proxy_link
        self._audit_log = audit_log
        self._watch: BackendWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._unit = ""
        self._address = ""
        """The address to look at for a server of an unknown kind; empty where there is no such address."""
        self.enabled = True
        self.chosen = asyncio.Event()
        """Cleared while a service is still to be found that may run already."""
        self.chosen.set()
        self.gate = asyncio.Lock()
        """Held by whoever has the proxy's gate of it closed: a switch, or a flush."""
        self.closed_for = ""
        """The words of a flush that has the gate closed; else empty."""
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self.on_read: Callable[[BackendControl, Sequence[ModelInfo]], Awaitable[None]] = _nothing_read
        """Called with what it offers each time that was read, before anybody is told that it is up. Raises nothing."""

    def __repr__(self) -> str:
        return f"<Active {self.target} {'watched' if self._watching is not None else 'not watched'}>"

    @property
    def target(self) -> Target | None:
        """None where none is chosen, or its kind is not known yet."""
        info = None if self._watch is None else self._watch.info
        return None if info is None else Target(info.kind, info.address, self._unit)

    @property
    def up(self) -> bool:
        return self._watch is not None and self._watch.up

    @property
    def seen(self) -> tuple[BackendInfo | None, list[ModelInfo]]:
        """The server and its models, as they were seen last."""
        return self._effects.backend, self._effects.models

    @property
    def models_seen_at(self) -> float | None:
        """Unix seconds at which the inference server said what it offers; None where it never has."""
        return None if self._watch is None else self._watch.seen_at

    @property
    def control(self) -> BackendControl | None:
        """The inference server in use, to be given orders; None where none is, or its kind is unknown."""
        return None if self._watch is None else self._watch.control

    async def loaded(self) -> frozenset[str] | None:
        """The models in its memory, asked now; None where that is unknown."""
        return None if self._watch is None else await self._watch.loaded()

    async def refresh(self, *, at_most_every_s: float = 0.0) -> bool:
        """Asks what it offers now. Whether it answered; False too where nothing was asked.

        However many ask at the same time, the server is asked once. `at_most_every_s`: not where it was asked that
        recently. In the middle of a switch nothing is asked: what is seen then is no news.
        """
        now, asking = asyncio.get_running_loop().time(), self._refreshing
        if asking is None or asking.done():
            if self._watch is None or self._watching is None or now - self._refreshed_at < at_most_every_s:
                return False
            self._refreshed_at = now
            asking = self._refreshing = spawn(self._watch.check(anew=True), name="refresh")
        await asyncio.wait([asking])  # a caller that leaves does not end it for others
        return self.up

    def choose(self, target: Target, *, is_fixed: bool = False, is_named: bool = True) -> None:
        """This one, before anything is watched. Of a server that Hive does not start, the kind may be another one each
        time that it comes back, unless it `is_fixed`; any of OpenAI's dialect, if somebody named its address."""
        self._take(
            BackendWatch(
                target.kind,
                target.address,
                settings=lambda: self._effects.settings,
                on_checked=self._checked,
                on_read=self._read,
                may_change=not (is_fixed or target.unit),
                is_named=is_named,
                tokens_come=self._proxy_link.tokens_come,
            )
        )
        self._unit = target.unit

    def choose_whatever_answers(self, address: str) -> None:
        """Chooses the address, for a server of any kind; also the way back to where no server is in use."""
        self._address = address
        self._take(
            BackendWatch(
                None,
                address,
                settings=lambda: self._effects.settings,
                on_checked=self._checked,
                on_read=self._read,
                tokens_come=self._proxy_link.tokens_come,
            )
        )
        self._unit = ""

    def choose_none(self) -> None:
        self._watch = None
        self._unit = ""
        self._effects.backend, self._effects.models = None, []

    def _take(self, watch: BackendWatch) -> None:
        self._watch = watch
        self.chosen.set()
        self._effects.backend, self._effects.models = watch.info, watch.models

    def watch(self) -> None:
        """Goes on looking from now on."""
        self._look_no_more()
        if self._watch is not None:
            self._watching = spawn(self._watch.run(), name="backend")

    def hold(self) -> None:
        """Looks no more: a look in the middle of a switch is no news, and nothing waits for it."""
        self._look_no_more()
        if self._watch is not None:
            self._watch.checked.set()

    def _look_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None

    @property
    def address(self) -> str:
        """The address that is looked at, whatever answers there; empty where none is."""
        return "" if self._watch is None else self._watch.address

    async def known(self) -> None:
        """Returns when it has been looked at once."""
        if self._watch is not None:
            await self._watch.checked.wait()

    async def follow(self, target: Target | None) -> None:
        """It is this one from now on. Returns when it has been looked at, and goes on looking."""
        self.hold()
        if target is not None:
            self.choose(target)
        elif self._address:
            self.choose_whatever_answers(self._address)
        else:
            self.choose_none()
        if self._watch is not None:
            await self._watch.check()
        else:
            self._live.set_backend(None)
            self._live.set_models([])
        self.watch()

    async def _read(self, control: BackendControl, models: Sequence[ModelInfo]) -> None:
        await self.on_read(control, models)

    def _checked(self, changed: bool) -> None:
        assert self._watch is not None
        effects, before = self._effects, self._effects.backend
        was_up = before is not None and before.up
        effects.backend, effects.models = self._watch.info, self._watch.models
        self._live.set_models(effects.models)  # every time: the key lives for 300 s
        if not changed:
            return
        self._live.set_backend(effects.backend)
        self._proxy_link.say(BackendChanged(backend=effects.backend, models=effects.models))
        if self._watch.up != was_up and effects.backend is not None:
            backend = effects.backend
            detail = {"backend": backend.label, "version": backend.version, "models": len(effects.models)}
            self._audit_log.note("backend.up" if self._watch.up else "backend.down", detail=detail)
        if (change := capacity_change(before, effects.backend)) is not None:
            self._audit_log.note("backend.capacity", detail=change)


def capacity_change(before: BackendInfo | None, now: BackendInfo | None) -> dict[str, Any] | None:
    """The change of what a cluster works on at once, for the event that tells of it; None where there is none to tell.

    >>> from msgspec.structs import replace
    >>> from hive.domain import Cluster
    >>> two = BackendInfo(kind="vllm", address="h:1", places=16, cluster=Cluster(
    ...     engine="router", wanted=2, running=2, slots_each=8))
    >>> one = replace(two, places=8, places_from="1 of 2 replicas", cluster=replace(two.cluster, running=1))
    >>> capacity_change(two, one)["reason"]
    '8 at once, before 16 at once: 1 of 2 replicas'
    >>> capacity_change(two, two), capacity_change(replace(two, cluster=None), None)
    (None, None)
    """
    if before is None or now is None or before.address != now.address or before.places == now.places:
        return None
    if before.cluster is None:
        return None  # what it can do when it is found is no change of it
    cluster = now.cluster or before.cluster
    at_once, was = ("no limit" if one.places is None else f"{one.places} at once" for one in (now, before))
    return {
        "backend": now.label,
        "slots": now.places,
        "before": before.places,
        "running": cluster.running,
        "wanted": cluster.wanted,
        "down": [node.name for node in cluster.nodes if not node.up],
        "reason": f"{at_once}, before {was}: {now.places_from}",
    }


async def _nothing_read(control: BackendControl, models: Sequence[ModelInfo]) -> None:
    """Nobody wants to know."""
