"""The slots of a llama-server as the proxy gives them to requests: a table of slots and the last agent in each. Pure.

A request names its slot, so that what the server keeps of an agent's prompt is where the table says it is.
"""

from __future__ import annotations

import time
from itertools import count

_serials = count(time.time_ns() // 1000)
"""Those of an earlier proxy are smaller: what the daemon remembers of one is nobody's here."""


class IdSlot:
    """One slot. `agent`: whose prompt is in it, empty where that is not known; `group`: its cache group then; `serial`:
    another one for each request, `before`: of the request before; `is_kept`: its prompt may be used by the next one."""

    __slots__ = ("_last", "_next", "_restores", "agent", "before", "busy", "group", "id", "is_kept", "serial")

    def __init__(self, id: int) -> None:
        self.id = id
        self.agent = self.group = ""
        self.serial = self.before = self.busy = 0
        self.is_kept = False
        self._restores: dict[int, bool] = {}
        """By the serial of the request that asked: whether it has given up waiting."""
        self._next: tuple[str, str, bool] | None = None
        self._last = 0
        """The serial from which on a whole answer says that no restore comes any more; 0: none says so."""

    def __repr__(self) -> str:
        return f"<IdSlot {self.id} {self.agent or '-'}{' busy' if self.busy else ''}>"

    def is_of(self, agent: str, group: str) -> bool:
        return self.agent == agent and self.group == group

    def end(self, *, whole: bool) -> None:
        """Its request has ended. Of one that was cut nobody knows what is there, unless it was the same agent's."""
        self.busy -= 1
        if whole and self._last and self.serial > self._last:
            self._restores, self._last = {}, 0
        if self._next is not None and not self.busy:
            if whole or self.is_of(*self._next[:2]):
                self.agent, self.group, self.is_kept = self._next
            else:
                self.agent, self.is_kept = "", False
            self._next = None

    def begin(self, agent: str, group: str, serial: int, *, is_kept: bool) -> None:
        self.busy += 1
        self.before, self.serial = self.serial, serial
        self._next = agent, group, is_kept

    def forget(self) -> None:
        self.agent, self.is_kept, self._next = "", False, None

    @property
    def is_spoiled(self) -> bool:
        """Whether something may come here that is not of the request then: what is here is kept for nobody."""
        return any(self._restores.values())

    def restore_begins(self) -> None:
        """Counts on what its agent left, which is asked for."""
        self._restores[self.serial] = False

    def restored(self, serial: int) -> None:
        """Asked for, and answered in time."""
        self._restores.pop(serial, None)

    def spoil(self, serial: int) -> None:
        """Nobody waits for it any more, and it may still come; unless that is known to be over."""
        if serial in self._restores:
            self._restores[serial] = True

    def restore_over(self, serial: int) -> None:
        """It has come, or never will. What is here after a late one is not known."""
        if self._restores.pop(serial, False):
            self.forget()

    def asker_is_gone(self) -> None:
        """Counts on nobody to say that restores here are over, as who asked for them is gone. The server has been asked
        by then, and does that before what comes later: the next request that begins here and is answered whole."""
        self._restores = dict.fromkeys(self._restores, True)
        self._last = self.serial if self._restores else 0


class IdSlots:
    """The table of one server.

    >>> table = IdSlots(2)
    >>> one = table.take("a", "tenant t", is_kept=True)
    >>> two = table.take("b", "tenant t", is_kept=True)
    >>> one.id, two.id, one.end(whole=True), two.end(whole=True)
    (0, 1, None, None)
    >>> table.last_of("a").id, *(table.take(one, "tenant t", is_kept=True).id for one in ("b", "c"))
    (0, 1, 0)
    >>> table.last_of("a"), table.take("d", "tenant t", is_kept=True), table.last_of("b")
    (None, None, None)
    """

    __slots__ = ("slots",)

    def __init__(self, count: int) -> None:
        self.slots = [IdSlot(id) for id in range(count)]

    def __repr__(self) -> str:
        return f"<IdSlots {self.slots}>"

    def choose(self, agent: str, group: str) -> IdSlot | None:
        """The agent's own idle slot, else one that nobody's prompt is in, else the one used longest ago. None where all
        are busy."""
        idle = [slot for slot in self.slots if not slot.busy]
        own = [slot for slot in idle if slot.is_of(agent, group)]
        if own:
            return max(own, key=_age)
        unused = [slot for slot in idle if not slot.agent]
        return min(unused or idle, key=_age, default=None)

    def take(self, agent: str, group: str, *, is_kept: bool) -> IdSlot | None:
        """The slot for a request that begins now, busy until `end`; None where all are: then none is known to be
        anybody's any more, as the server chooses."""
        slot = self.choose(agent, group)
        if slot is None:
            self.forget()
            return None
        slot.begin(agent, group, next(_serials), is_kept=is_kept)
        return slot

    def forget(self) -> None:
        """A request goes to whichever slot the server likes."""
        for slot in self.slots:
            slot.forget()

    def last_of(self, agent: str) -> IdSlot | None:
        """The slot that was this agent's last and is idle, with what may be used again; else None."""
        own = [
            slot for slot in self.slots if slot.agent == agent and slot.is_kept and not (slot.busy or slot.is_spoiled)
        ]
        return max(own, key=_age, default=None)


def _age(slot: IdSlot) -> int:
    return slot.serial
