"""The gate of the backend: closed while the inference server is switched. Pure; the daemon closes and opens it.

Requests wait for it in the queue, which has no slots then, so that no request loses its place. Requests that otherwise
take no slot wait there too. The gate only says how long they may wait, and makes the refusal of a request that finds no
place in the queue or has waited in vain.
"""

from __future__ import annotations

from hive.errors import BackendSwitching

RETRY_S = 5.0
"""`Retry-After` where there is no room to wait: a llama-server is switched to within a second or two, vLLM in 30 s."""


class BackendGate:
    """The state of the gate. `until`: the end of the wait, on the monotonic clock. `towards`: the backend that is
    switched to.

    >>> gate = BackendGate()
    >>> gate.close(until=60.0, towards="vllm"); gate
    <BackendGate closed towards vllm>
    >>> gate.refusal(10.0).message
    'the inference server is being switched to vllm, and too many requests wait for it'
    """

    __slots__ = ("is_closed", "towards", "until")

    def __init__(self) -> None:
        self.is_closed = False
        self.until = 0.0
        self.towards = ""

    def __repr__(self) -> str:
        return f"<BackendGate {f'closed towards {self.towards}' if self.is_closed else 'open'}>"

    def close(self, *, until: float, towards: str) -> None:
        """Closes the gate. If it is closed already, waiting requests wait until the new time."""
        self.is_closed = True
        self.until = until
        self.towards = towards

    def open(self) -> None:
        self.is_closed = False
        self.until = 0.0

    def refusal(self, now: float) -> BackendSwitching:
        """The refusal of a request that finds no place in the queue, or that has waited until the end."""
        why = "that takes too long" if now >= self.until else "too many requests wait for it"
        return BackendSwitching(f"{self._what()}, and {why}", retry_after_s=RETRY_S)

    def cut(self) -> BackendSwitching:
        """The error of a request that was at the backend and did not end in time."""
        return BackendSwitching(f"{self._what()}, and this did not end in time", retry_after_s=RETRY_S)

    def _what(self) -> str:
        return f"the inference server is being switched to {self.towards}"
