"""The gate of the backend: closed while the inference server is switched. Pure; the daemon closes and opens it.

Requests wait for it in the queue, which has no slots then, so that nobody's place is lost; also those that take no slot
else. It only says how long they may, and what is answered to who has no place there, or has waited in vain.
"""

from __future__ import annotations

from hive.errors import BackendSwitching

RETRY_S = 5.0
"""`Retry-After` where there is no room to wait: a llama-server is switched to within a second or two, vLLM in 30 s."""


class BackendGate:
    """`until`: when those who wait have waited long enough, on the monotonic clock. `towards`: what is switched to.

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
        """Also where it is closed already: whoever waits, waits until then."""
        self.is_closed = True
        self.until = until
        self.towards = towards

    def open(self) -> None:
        self.is_closed = False
        self.until = 0.0

    def refusal(self, now: float) -> BackendSwitching:
        """What is answered to those who find no place in the queue, and to those who have waited until the end."""
        why = "that takes too long" if now >= self.until else "too many requests wait for it"
        return BackendSwitching(f"{self._what()}, and {why}", retry_after_s=RETRY_S)

    def cut(self) -> BackendSwitching:
        """How a request ends that was at the backend and did not end in time."""
        return BackendSwitching(f"{self._what()}, and this did not end in time", retry_after_s=RETRY_S)

    def _what(self) -> str:
        return f"the inference server is being switched to {self.towards}"
