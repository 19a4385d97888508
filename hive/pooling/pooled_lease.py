"""One lease as the daemon keeps it: its row, its charges, its holder, who waits for it. No I/O."""

from __future__ import annotations

import asyncio
import secrets
from enum import StrEnum

import msgspec

from hive.domain import Band
from hive.host.accounts import uid_of
from hive.link.leases import HolderState, LeaseGrant, LeaseHolder
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.accounts import with_measured
from hive.pool.state import CPU, MIB, Demand, Grant, LeaseTerms, SlotFacts, SlotState
from hive.store.leases import StoredLease

KIND = "lease"
LABEL_SHOWN = 40
END_S = 2.0
"""From the SIGKILL until nothing is left; besides the time to end by itself."""


class LeaseKind(StrEnum):
    """`job`: a process of this box that the helper holds; `held`: something else, that has to renew it."""

    JOB = "job"
    HELD = "held"


class LeaseState(StrEnum):
    """State of a lease, as people see it. `granted`: it is charged, and its holder has not come; `overdue`: its time to
    live is over, and its memory is not seen to be free."""

    WAITING = "waiting"
    GRANTED = "granted"
    RUNNING = "running"
    ENDING = "ending"
    OVERDUE = "overdue"
    ENDED = "ended"


class PooledLease:
    """Times are of the monotonic clock. `row`: as it is kept; `slot_state`: as the decider sees it; `grants`: its
    charges, from the decision until its memory is measured back.

    `holder`: as the helper told it last. `nonce`: what its asker shows at lease.sock, empty until the helper expects
    it. `readers`: who waits for news of it now; `left_at`: since when there is none. `is_releasing`: it has ended, and
    its memory is waited for; `goes_back`: into the line after that, as it never began; `is_back`: it did, and is
    granted only while somebody reads of it. `place`, `before`, `ready_in_s`, `bound_s`, `why`: as they were told last.
    """

    def __init__(self, row: StoredLease, now: float) -> None:
        self.row = row
        self.state = LeaseState(row.state)
        self.slot_state = SlotState.COLD
        self.grants: tuple[Grant, ...] = ()
        self.holder: LeaseHolder | None = None
        self.nonce = ""
        self.readers = 0
        self.left_at = now
        self.moved_at = self.closed_at = now
        self.is_releasing = self.goes_back = self.is_back = self.is_over_told = False
        self.place: int | None = None
        self.before: list[str] = []
        self.ready_in_s: float | None = None
        self.bound_s: float | None = None
        self.why = row.why
        self.changed = asyncio.Event()
        self.stepping: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<PooledLease {self.id} {self.state}>"

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def model(self) -> str:
        """Its name in the pool's sentences: `lease l-17 (python train.py)`."""
        return f"lease {self.id} ({self.short_label})" if self.row.label else f"lease {self.id}"

    @property
    def short_label(self) -> str:
        """Its label, cut to what fits into a sentence."""
        label = self.row.label
        return label if len(label) <= LABEL_SHOWN else f"{label[: LABEL_SHOWN - 1]}…"

    @property
    def is_job(self) -> bool:
        return self.row.kind == LeaseKind.JOB

    @property
    def band(self) -> Band:
        return Band(self.row.band)

    @property
    def is_in_line(self) -> bool:
        """Whether it waits and nothing has been decided for it."""
        return self.state is LeaseState.WAITING and self.slot_state is SlotState.COLD

    @property
    def ends_at(self) -> float | None:
        """Its end at the latest; None if that cannot be said: a held one is renewed again and again."""
        if self.row.granted_s is None or self.row.max_s is None:
            return None
        return self.row.granted_s + self.row.max_s

    def facts(self) -> SlotFacts:
        """The lease as the decider sees it: like a slot that loads and unloads nothing."""
        row = self.row
        is_wanted = self.is_in_line and (self.readers > 0 or not self.is_back)
        demands = (Demand(self.band, row.asked_s),) if is_wanted else ()
        return SlotFacts(
            id=self.id,
            model=self.model,
            kind=KIND,
            need_bytes=row.mb * MIB,
            state=self.slot_state,
            load_s=0.0,
            unload_s=row.grace_s + END_S if self.grants else 0.0,
            grants=self.grants,
            ready_at=row.granted_s or 0.0,
            waiting=demands,
            band=self.band,
            closed_at=self.closed_at,
            moved_at=self.moved_at,
            lease=LeaseTerms(
                accounts=row.gpus,
                preemptible=row.preemptible,
                is_whole=row.is_whole,
                until=self.ends_at,
                max_s=row.max_s,
                grace_s=row.grace_s,
                begun_at=row.granted_s,
                at_once=not row.wait_s,
            ),
        )

    # what happens to it -----------------------------------------------------------------------------------------------

    def keep(self, **changes: object) -> None:
        """Changes its row, which is still to be written."""
        self.row = msgspec.structs.replace(self.row, **changes)

    def granted(self, grants: tuple[Grant, ...], now: float) -> None:
        """The decider has given it memory: charged from now."""
        self.slot_state, self.grants, self.moved_at = SlotState.LOADING, grants, now
        self.nonce = ""
        self.keep(accounts={grant.account: grant.charged_bytes // MIB for grant in grants})

    def back_in_line(self, now: float) -> None:
        """Nobody has held it: it waits as before."""
        self.state, self.slot_state, self.grants, self.holder = LeaseState.WAITING, SlotState.COLD, (), None
        self.is_releasing = self.goes_back = False
        self.is_back = True
        self.left_at = now
        self.keep(state=str(LeaseState.WAITING), accounts={}, granted_s=None, granted_at=None, until_s=None)

    def grant_for_helper(self) -> LeaseGrant:
        """The grant that the helper is told, with a nonce that nobody has seen."""
        self.nonce = self.nonce or secrets.token_urlsafe(24)
        row = self.row
        return LeaseGrant(
            id=self.id,
            token=row.token,
            nonce=self.nonce,
            uid=-1 if (uid := uid_of(row.actor)) is None else uid,
            accounts=row.accounts,
            max_s=row.max_s,
            grace_s=row.grace_s,
            label=row.label,
        )

    def saw(self, holder: LeaseHolder) -> None:
        """Takes what the helper says of its processes; nothing later is known than their end."""
        if self.holder is None or self.holder.state is not HolderState.ENDED:
            self.holder = holder

    def process(self) -> SlotProcess | None:
        """Its processes as they are to be measured; None where there are none."""
        if self.holder is None or self.holder.state not in (HolderState.RUNNING, HolderState.ENDING):
            return None
        accounts = {grant.account: max(1, grant.charged_bytes // MIB) for grant in self.grants}
        return SlotProcess(
            id=self.id,
            run=str(self.row.token),
            state=ProcessState.SERVING,
            pid=self.holder.pid,
            pids=self.holder.pids,
            bytes=self.holder.bytes,
            grant=SlotGrant(accounts=accounts),
        )

    def measured(self, by_account: dict[str, int | None]) -> None:
        """Takes a measurement; the charge never falls below it."""
        if self.slot_state in (SlotState.READY, SlotState.DRAINING):
            self.grants = tuple(with_measured(grant, by_account.get(grant.account)) for grant in self.grants)

    @property
    def overrun_mb(self) -> int:
        """MiB that it was seen to have more than it asked for, on the GPU where that is most; 0 for none."""
        most = max((grant.measured_bytes or 0 for grant in self.grants), default=0)
        return max(0, most // MIB - self.row.mb)

    @property
    def used_mb(self) -> int | None:
        """MiB seen on the GPU where it has most; None where nothing is known."""
        known = [grant.measured_bytes for grant in self.grants if grant.measured_bytes is not None]
        return max(known) // MIB if known else None

    def tell(self) -> None:
        """Wakes those who wait for news of it."""
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its program has in its environment."""
        gpus = [account for account in self.row.accounts if account != CPU]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "HIVE_LEASE": self.id,
            "HIVE_LEASE_TOKEN": str(self.row.token),
        }
