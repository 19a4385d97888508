"""The leave to do one governed operation, as the services take it."""

from __future__ import annotations

import sqlite3
import time

from hive.errors import GovernanceBroken, OpTokenReplayed
from hive.governance.verdict import KEPT_S, TokenVerdict, check_clock
from hive.store import op_nonces


class Approval:
    """The leave to do one operation, once. `by`: who gave it, in words; empty where the caller's role was enough."""

    def __init__(
        self,
        operation: str,
        by: str = "",
        *,
        verdict: TokenVerdict | None = None,
        is_break_glass: bool = False,
        may_evict: bool = False,
    ) -> None:
        """`may_evict`: of a load; the model that it names may leave for it."""
        self.may_evict = may_evict
        self.is_break_glass = is_break_glass
        self.operation = operation
        self.by = by
        self._verdict = verdict

    def __repr__(self) -> str:
        return f"<Approval {self.operation} by {self.by or 'role'}>"

    def check(self, *operations: str) -> None:
        """Raises GovernanceBroken where it is for none of these: a fault in Hive itself."""
        if self.operation not in operations:
            raise GovernanceBroken(f"an approval of {self.operation} was taken for {operations[0]}")

    def check_eviction(self) -> None:
        """Raises GovernanceBroken where nobody was asked whether another model may leave: a fault in Hive itself."""
        if not self.may_evict:
            raise GovernanceBroken(f"an approval of {self.operation} was taken for the unload of another model")

    def burn(self, conn: sqlite3.Connection) -> None:
        """Writes down that the token was used, in the transaction that writes what is done with it.

        Raises OpTokenReplayed where it was before, ClockWentBack.
        """
        if self._verdict is None:
            return
        now = time.time()
        nonce, box = self._verdict.nonce, op_nonces.box(conn)
        if box is not None:
            check_clock(now, box.clock)
        op_nonces.see(conn, now)
        keep_until = self._verdict.expires_at + KEPT_S
        if not op_nonces.use(conn, nonce, self.operation, self.by, now=now, keep_until=keep_until):
            raise OpTokenReplayed
