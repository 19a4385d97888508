"""Number of requests a backend works on at once, its source, and what contradicts it. Pure.

Requests beyond it wait in Hive's queue, which is fair; in the backend's own, nobody's turn is anybody's choice.
"""

from __future__ import annotations

from hive.backends.kinds import spec_of
from hive.settings.table import Settings
from hive.terminal_text import counted

WARN_AFTER = 2
"""Checks in a row that find the backend's own queue filled: one alone may have looked between two requests."""
CALM_AFTER = 12
"""Checks in a row that find it empty, until the warning is taken back: it is to be seen, not to flicker."""


def choose_places(kind: str, told: int | None, settings: Settings) -> tuple[int | None, str]:
    """Requests to send at once and where that number comes from; None for no limit.

    >>> choose_places("llama", 4, Settings())
    (4, '/props total_slots')
    >>> choose_places("demo", None, Settings())
    (None, 'no limit')
    """
    if settings.proxy.backend_concurrency:
        return settings.proxy.backend_concurrency, "backend_concurrency in hive.conf"
    return spec_of(kind).places(told, settings.inference)


def named_slots(kind: str, told: int | None, settings: Settings) -> int:
    """The slots of such a server that Hive names for requests, as what is there is parked; 0 for none.

    >>> from hive.settings.table import InferenceSection
    >>> parking = Settings(inference=InferenceSection(llama_slot_dir="/d"))
    >>> named_slots("llama", 4, Settings()), named_slots("llama", 4, parking), named_slots("vllm", 4, parking)
    (0, 4, 0)
    """
    inference = settings.inference
    is_on = bool(inference.llama_slot_dir) and not inference.llama_cache_ram_mb
    return told or 0 if is_on and spec_of(kind).asking.save_slot is not None else 0


class OwnQueue:
    """Watches the backend's own queue, which stays empty where Hive's limit is the lower one.

    >>> queue = OwnQueue()
    >>> [queue.see(waiting, places=4) for waiting in (3, 0, 3)]
    ['', '', '']
    >>> queue.see(1, places=4)[:36]
    'the backend queues 3 requests itself'
    """

    def __init__(self) -> None:
        self._filled = self._empty = self._most = 0
        self._is_warned = False

    def __repr__(self) -> str:
        return f"<OwnQueue {'filled' if self._is_warned else 'empty'}, {self._most} at most>"

    def see(self, waiting: int | None, *, places: int | None) -> str:
        """After a check that found `waiting` (None: it does not tell): the warning that stands, empty for none."""
        if not waiting:
            self._filled = 0
            self._empty += 1
            if self._empty >= CALM_AFTER or not self._is_warned:
                self._most = 0
                self._is_warned = False
            return self._warning(places)
        self._empty = 0
        self._filled += 1
        self._most = max(self._most, waiting)
        self._is_warned = self._is_warned or self._filled >= WARN_AFTER
        return self._warning(places)

    def _warning(self, places: int | None) -> str:
        if not self._is_warned:
            return ""
        many = counted(self._most, "request")
        limit = "without a limit" if places is None else f"at most {places} at once"
        why = "" if places is None else "someone else uses it, or its own limit is lower; "
        sends = "and Hive sends" if places is None else "although Hive sends"
        return f"the backend queues {many} itself {sends} {limit}: {why}set [proxy] backend_concurrency"
