"""Plan of a flush at each inference server, and the slots of a llama-server that are still to be erased. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hive.backends.described import flushed_by, unsalted, why_not_flushed
from hive.backends.spec import KeptPrompt
from hive.domain import FoundCapabilities
from hive.models.cache_epochs import FlushedBy, FlushKind, FlushScope

IN_RAM = (
    "Hive did not start this llama-server, and what it keeps in RAM besides its slots no flush reaches, unless it was "
    "started with --cache-ram 0"
)


class CacheServer(msgspec.Struct, frozen=True, kw_only=True):
    """One inference server as a flush sees it. `name`: of its slot, empty for the active backend; `models`: those in
    its memory; `holds`: it may keep something: one that is not started keeps nothing; `is_own`: Hive starts it;
    `told`: what it described of itself."""

    name: str
    kind: str
    address: str
    models: tuple[str, ...]
    holds: bool = True
    is_own: bool = True
    told: FoundCapabilities = FoundCapabilities()


class ModelAt(msgspec.Struct, frozen=True):
    """One model at a server."""

    server: CacheServer
    model: str


class FlushPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`salted`: servers that another salt is enough for; `slots`: models whose slots are erased; `loads`: models that
    are loaded anew; `left_out`: what no flush reaches, each with the reason."""

    salted: tuple[str, ...] = ()
    slots: tuple[ModelAt, ...] = ()
    loads: tuple[ModelAt, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_in_vain(self) -> bool:
        """Whether there is something, and no flush reaches any of it."""
        return bool(self.left_out) and not (self.salted or self.slots or self.loads)


def plan_of(scope: FlushScope, servers: Sequence[CacheServer]) -> FlushPlan:
    """Work of a flush. A tenant's or a tag's is at every server: which of them it used is not known.

    >>> one = CacheServer(name="m-1", kind="llama", address="/r/m.sock", models=("m",))
    >>> two = CacheServer(name="", kind="remote", address="h:1", models=("far",))
    >>> plan = plan_of(FlushScope(FlushKind.ALL), [one, two])
    >>> [at.model for at in plan.slots], plan.left_out
    (['m'], ('far: what a remote server keeps is for whoever runs it to flush',))
    >>> plan_of(FlushScope(FlushKind.MODEL, "far"), [one, two]).is_in_vain
    True
    >>> other = CacheServer(name="", kind="llama", address="h:2", models=("m",), is_own=False)
    >>> plan = plan_of(FlushScope(FlushKind.ALL), [other])
    >>> len(plan.slots), plan.left_out == (f"m: {IN_RAM}",), plan.is_in_vain
    (1, True, False)
    """
    salted, slots, loads, left_out = list[str](), list[ModelAt](), list[ModelAt](), list[str]()
    for server in servers:
        models = [model for model in server.models if scope.kind is not FlushKind.MODEL or model == scope.name]
        if not models:
            continue
        match flushed_by(server.kind, server.told):
            case FlushedBy.NONE:
                left_out.append(f"{', '.join(models)}: {why_not_flushed(server.kind, server.told)}")
            case FlushedBy.SALT:
                salted.append(server.name)
                if shared := unsalted(server.told):
                    left_out.append(f"{', '.join(models)}: it describes no cache_salt at {', '.join(shared)}")
            case FlushedBy.SLOTS if server.holds:
                if not server.is_own:
                    left_out.append(f"{', '.join(models)}: {IN_RAM}")
                slots += [ModelAt(server, model) for model in models]
            case FlushedBy.LOAD if server.holds:
                loads += [ModelAt(server, model) for model in models]
    return FlushPlan(salted=tuple(salted), slots=tuple(slots), loads=tuple(loads), left_out=tuple(left_out))


class Unerased:
    """The slots of a server that hold what was there when the flush began.

    From the first look on its requests are told to use nothing that is kept. So a slot with a later request holds that
    request's own prompt alone, and is not waited for.

    >>> slots = Unerased()
    >>> slots.look([KeptPrompt(0, False, 1, 20), KeptPrompt(1, True, 2, 30, read=30), KeptPrompt(2, False)])
    [0]
    >>> slots.erased(0), slots.look([KeptPrompt(0, False, 1), KeptPrompt(1, True, 2, 31, read=31)]), slots
    (None, [], <Unerased [1]>)
    >>> slots.look([KeptPrompt(1, True, 3, 9, reused=0, read=9)]), slots.is_done
    ([], True)

    Where the server does not tell what is in a slot, it is erased once it is idle.

    >>> slots = Unerased()
    >>> slots.look([KeptPrompt(0, False, 1, None, None, None), KeptPrompt(1, True, 2, None, None, None)])
    [0]
    >>> slots.erased(0), slots.look([KeptPrompt(1, True, 3, None, None, None)]), slots.is_done
    (None, [], False)
    >>> slots.look([KeptPrompt(1, False, 3, None, None, None)])
    [1]
    """

    def __init__(self) -> None:
        self._waiting: dict[int, int] | None = None
        """Slot → the request that was there at the first look."""

    def __repr__(self) -> str:
        return f"<Unerased {sorted(self._waiting or {})}>"

    def look(self, kept: Sequence[KeptPrompt]) -> list[int]:
        """The slots to be erased now: idle, and with something in them."""
        if self._waiting is None:
            self._waiting = {one.slot: one.task for one in kept}
        waiting = self._waiting
        there = {one.slot: one for one in kept}
        for slot, task in list(waiting.items()):
            one = there.get(slot)
            if one is None or (not one.is_busy and one.tokens == 0) or (one.is_busy and _is_own(one, task)):
                del waiting[slot]
        return [slot for slot in waiting if not there[slot].is_busy]

    def erased(self, slot: int) -> None:
        if self._waiting is not None:
            self._waiting.pop(slot, None)

    @property
    def is_done(self) -> bool:
        return self._waiting is not None and not self._waiting

    @property
    def busy(self) -> int:
        """The slots that are waited for."""
        return len(self._waiting or ())


def _is_own(one: KeptPrompt, first: int) -> bool:
    """Whether a slot has another request than at first, which has begun to read and found nothing to use."""
    return one.task != first and bool(one.read) and one.reused == 0
