"""The pool as one decision sees it: what is free, what moves, and which victims a load would need. Pure.

Used by the decider, by the bound and by the explanation, so that all three say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hive.pool.accounts import free_bytes
from hive.pool.lease_room import is_capped, lease_groups, place_each, share_bytes, share_free_at, share_left
from hive.pool.placement import groups, permitted_accounts, place, split
from hive.pool.state import Claim, Demand, EvictedSlot, Grant, PoolFacts, SlotFacts, SlotState
from hive.pool.turns import NEVER, may_be_ended, may_leave_at
from hive.pool.victims import EvictionOption, cheapest_set, eviction_cost

MOVING = (SlotState.LOADING, SlotState.STOPPING)
STARTABLE = (SlotState.COLD, SlotState.ASLEEP)
LEASE_COSTS_S = 60.0
"""Seconds that the end of a lease costs at least: its program has to be started again by somebody."""


class PlacementSite(NamedTuple):
    """Accounts that a load may be placed in together. `margin_bytes`: in each, for the driver, if they are several;
    `short_of`: bytes by account that have to be free in it. One sum stands for all accounts of a split."""

    accounts: tuple[str, ...]
    short_of: tuple[int, ...]
    margin_bytes: int = 0

    @property
    def is_split(self) -> bool:
        """Whether the bytes may be shared out among the accounts as they are free."""
        return self.margin_bytes > 0


class Eviction(NamedTuple):
    """A set of victims that makes room for a load. `at`: when the last of them may leave."""

    site: PlacementSite
    options: tuple[EvictionOption, ...]
    cost: float
    at: float


class Outlook:
    """The facts of one decision, looked up once."""

    def __init__(self, facts: PoolFacts, now: float) -> None:
        self.facts = facts
        self.now = now
        self.rules = facts.rules
        self._accounts = {account.id: account for account in facts.accounts}
        self.slots = {slot.id: slot for slot in facts.slots}
        self.free = {account.id: free_bytes(account, facts.slots, facts.rules) for account in facts.accounts}
        self.moving = {
            grant.account
            for slot in facts.slots
            if slot.lease is None and (slot.state in MOVING or (slot.state is SlotState.READY and not slot.settled))
            for grant in slot.grants
        }
        """Accounts with a move of memory under way: one at a time in each. A lease's program allocates and frees when
        it likes, so that its coming and going is none."""
        self.leaving = {leaving.slot for claim in facts.claims for leaving in claim.leaving}
        self.claimed = {grant.account for claim in facts.claims for grant in claim.grants} | {
            grant.account for id in self.leaving if id in self.slots for grant in self.slots[id].grants
        }
        for claim in facts.claims:
            if claim.slot not in self.slots:
                continue
            for account, bytes in self.reserved(claim).items():
                if account in self.free:
                    self.free[account] -= bytes
        self._leave_times: dict[str, dict[str, float]] = {}
        self.slack: dict[str, int] = {}
        """Bytes that later ones may take of an account that an earlier, late one waits for."""
        self.no_leases: set[str] = set()
        """Accounts that a lease before in the line waits for: no lease behind it takes anything there."""
        self.no_staying_leases: set[str] = set()
        """Accounts that a model before in the line waits for: only a lease that can be ended for it goes there."""
        asleep = sum(
            level.host_bytes
            for slot in facts.slots
            if slot.state is SlotState.ASLEEP
            for level in slot.levels
            if level.name == slot.level
        )
        self.host_bytes = max(0, facts.rules.host_ram_bytes - asleep)

    def reserved(self, claim: Claim) -> dict[str, int]:
        """Bytes by account that the claim will take beyond what its victims give back."""
        claimant = self.slots[claim.slot]
        bytes = {grant.account: grant.charged_bytes for grant in claim.grants}
        for grant in claimant.grants:
            bytes[grant.account] = bytes.get(grant.account, 0) - grant.charged_bytes
        for leaving in claim.leaving:
            slot = self.slots.get(leaving.slot)
            if slot is not None and not has_left(slot, leaving):
                for account, freed in freed_by(slot, leaving.level).items():
                    bytes[account] = bytes.get(account, 0) - freed
        return {account: max(0, rest) for account, rest in bytes.items()}

    def available(self, account: str) -> int:
        """Bytes free for a load that is not the claim's, and not the one the account is kept for."""
        return min(self.free[account], self.slack.get(account, self.free[account]))

    def fitting(self, slot: SlotFacts) -> tuple[Grant, ...] | None:
        """The grants with which the slot could be loaded now, without any victim; None if it has to wait."""
        if slot.state is SlotState.ASLEEP:
            rise = rise_of(slot)
            ready = all(
                account in self.free and account not in self.moving and bytes <= self.available(account)
                for account, bytes in rise
            )
            return slot.awake if ready else None
        free = {
            account: self.available(account)
            for account in permitted_accounts(slot, self.facts.accounts)
            if account not in self.moving
        }
        if slot.lease is not None:
            kept = self._kept_from(slot)
            free = {id: bytes for id, bytes in free.items() if id not in kept and self._has_share(slot, id)}
            return place_each(slot.need_bytes, free, slot.lease.accounts)
        return place(slot.need_bytes, free, self.rules.split_margin_bytes)

    def _kept_from(self, lease: SlotFacts) -> set[str]:
        """The accounts that are kept from a lease for those before it in the line."""
        if lease.lease is not None and lease.lease.preemptible:
            return self.no_leases
        return self.no_leases | self.no_staying_leases

    def _has_share(self, lease: SlotFacts, account: str) -> bool:
        """Whether the share of leases in an account is enough for one more now."""
        if not is_capped(lease):
            return True
        of = self._accounts[account]
        return share_left(of, self.facts.slots, self.facts.claims, self.rules.lease_share) >= lease.need_bytes

    def sites(self, slot: SlotFacts) -> Iterator[PlacementSite]:
        """The places the slot could have if enough left them."""
        if slot.state is SlotState.ASLEEP:
            rise = rise_of(slot)
            if all(account in self.free for account, _ in rise):
                yield PlacementSite(tuple(account for account, _ in rise), tuple(bytes for _, bytes in rise))
            return
        accounts = permitted_accounts(slot, self.facts.accounts)
        if slot.lease is not None:
            for group in lease_groups(accounts, slot.lease.accounts):
                yield PlacementSite(group, (slot.need_bytes,) * len(group))
            return
        for account in accounts:
            yield PlacementSite((account,), (slot.need_bytes,))
        for group in groups(accounts):
            yield PlacementSite(group, (slot.need_bytes,), self.rules.split_margin_bytes)

    def short(self, site: PlacementSite) -> tuple[int, ...]:
        """Bytes missing at a site, negative where some are left over."""
        if site.is_split:
            return (site.short_of[0] - sum(self.free[account] - site.margin_bytes for account in site.accounts),)
        return tuple(bytes - self.free[account] for account, bytes in zip(site.accounts, site.short_of, strict=True))

    def options(
        self, claimant: SlotFacts, site: PlacementSite, may_leave: Callable[[SlotFacts], bool]
    ) -> list[EvictionOption]:
        """The ways in which slots could give memory back at a site."""
        found = []
        for slot in self.facts.slots:
            if slot.id == claimant.id or slot.id in self.leaving or not slot.grants or not may_leave(slot):
                continue
            ways = [("", 0, slot.load_s)]
            if slot.state is SlotState.READY:
                ways += [(level.name, level.host_bytes, level.wake_s) for level in slot.levels]
            for level, host_bytes, reload_s in ways:
                freed = freed_by(slot, level)
                here = tuple(freed.get(account, 0) for account in site.accounts)
                if any(here):
                    cost = self._cost(slot, reload_s)
                    found.append(
                        EvictionOption(slot.id, (sum(here),) if site.is_split else here, cost, level, host_bytes)
                    )
        return found

    def _cost(self, slot: SlotFacts, reload_s: float) -> float:
        """The seconds lost by its leaving; a lease's are those it has run, as nobody knows what it has kept."""
        if slot.lease is None:
            return eviction_cost(slot.audience, reload_s)
        begun = self.now if slot.lease.begun_at is None else slot.lease.begun_at
        return max(LEASE_COSTS_S, self.now - begun)

    def eviction(self, claimant: SlotFacts, *, by: float, blocked: bool = True) -> Eviction | None:
        """The cheapest set of victims that may leave until `by`; a single account goes before a split.

        `blocked`: without the accounts that move, are claimed, or are kept for an earlier one.
        """
        best: Eviction | None = None
        leave_at = self.leave_times(claimant)
        for site in self.sites(claimant):
            if best is not None and len(site.accounts) > len(best.site.accounts):
                break
            if blocked and any(self.is_taken(account) for account in site.accounts):
                continue
            if claimant.lease is not None and not self._may_lease(claimant, site, blocked=blocked):
                continue
            options = self.options(claimant, site, lambda slot: leave_at[slot.id] <= by and is_asked(slot, claimant))
            if blocked:
                options = [option for option in options if not self._touches_taken(option.slot)]
            chosen = cheapest_set(options, self.short(site), self.host_bytes)
            if chosen is not None:
                cost = sum(option.cost for option in chosen)
                if best is None or cost < best.cost:
                    at = max((leave_at[option.slot] for option in chosen), default=self.now)
                    best = Eviction(site, chosen, cost, at)
        return best

    def _may_lease(self, lease: SlotFacts, site: PlacementSite, *, blocked: bool) -> bool:
        """Whether nothing but memory keeps a lease from a site."""
        if blocked and not self._kept_from(lease).isdisjoint(site.accounts):
            return False
        return all(self._has_share(lease, account) for account in site.accounts)

    def _share_at(self, lease: SlotFacts, site: PlacementSite) -> float:
        """The time at which the share of leases is enough for one more at a site."""
        if not is_capped(lease):
            return 0.0
        of = (self._accounts[account] for account in site.accounts)
        return max(share_free_at(one, self.facts.slots, lease.need_bytes, self.rules.lease_share) for one in of)

    def soonest(self, claimant: SlotFacts, *, beside_leases: bool = False) -> Eviction | None:
        """The set of victims that may leave first, whatever it costs, claims and moves aside; None if none ever may.

        `beside_leases`: without leases that are not asked to leave, but end by themselves.
        """
        best: Eviction | None = None
        leave_at = self.leave_times(claimant)
        for site in self.sites(claimant):
            if best is not None and len(site.accounts) > len(best.site.accounts):
                break
            share_at = 0.0 if claimant.lease is None else self._share_at(claimant, site)
            if share_at >= NEVER or (beside_leases and share_at > self.now):
                continue
            options = self.options(
                claimant,
                site,
                lambda slot: leave_at[slot.id] < NEVER and (not beside_leases or is_asked(slot, claimant)),
            )
            whole = {option.slot: option for option in options if not option.level}
            chosen: list[EvictionOption] = []
            short = list(self.short(site))
            for option in sorted(whole.values(), key=lambda option: leave_at[option.slot]):
                if all(bytes <= 0 for bytes in short):
                    break
                chosen.append(option)
                short = [bytes - freed for bytes, freed in zip(short, option.freed, strict=True)]
            if all(bytes <= 0 for bytes in short):
                at = max([share_at, *(leave_at[option.slot] for option in chosen)], default=self.now)
                if best is None or at < best.at:
                    best = Eviction(site, tuple(chosen), 0.0, at)
        return best

    def could_have(
        self,
        slot: SlotFacts,
        *,
        pins_to_come: bool = False,
        beside: Sequence[SlotFacts] | None = None,
        granted: Sequence[Grant] = (),
    ) -> bool:
        """Whether it would fit somewhere if all that may leave had left: beside the pinned and the foreign only.

        `pins_to_come`: also beside what is pinned and not loaded yet, in whichever account that will be. `beside`: the
        leases that stay, those that have no end if it is not given; `granted`: what is given to one more.
        """
        if beside is None:
            beside = self.endless_leases(slot)
        room = {
            account.id: account.total_bytes
            - account.reserve_bytes
            - int(account.foreign_bytes * self.rules.foreign_margin)
            for account in self.facts.accounts
        }
        for other in self.facts.slots:
            if other.pinned_at is not None and other.id != slot.id:
                for grant in other.awake or other.grants:
                    room[grant.account] = room.get(grant.account, 0) - grant.charged_bytes
                if pins_to_come and not other.grants:
                    for account in permitted_accounts(other, self.facts.accounts):
                        room[account] -= other.need_bytes
        if is_capped(slot):
            shares = {id: share_bytes(of, self.rules.lease_share) for id, of in self._accounts.items()}
        else:
            shares = {}
        for lease in beside:
            accounts = permitted_accounts(lease, self.facts.accounts)
            for grant in lease.grants or [Grant(account, lease.need_bytes) for account in accounts]:
                room[grant.account] = room.get(grant.account, 0) - grant.charged_bytes
                if grant.account in shares and is_capped(lease):
                    shares[grant.account] -= grant.charged_bytes
        for grant in granted:
            room[grant.account] = room.get(grant.account, 0) - grant.charged_bytes
        room = {account: min(bytes, shares.get(account, bytes)) for account, bytes in room.items()}
        for site in self.sites(slot):
            if slot.state is SlotState.ASLEEP:
                if all(grant.charged_bytes <= room.get(grant.account, 0) for grant in slot.awake):
                    return True
            elif site.is_split:
                usable = sum(max(0, room[account] - site.margin_bytes) for account in site.accounts)
                if site.short_of[0] <= usable:
                    return True
            elif all(bytes <= room[account] for account, bytes in zip(site.accounts, site.short_of, strict=True)):
                return True
        return False

    def staying_leases(self, claimant: SlotFacts) -> list[SlotFacts]:
        """The leases that hold memory and are not asked to leave for a claimant."""
        return [slot for slot in self.facts.slots if slot.lease and slot.grants and not is_asked(slot, claimant)]

    def endless_leases(self, claimant: SlotFacts) -> list[SlotFacts]:
        """Of those, the ones whose end nobody knows; one that is ending has one."""
        staying = self.staying_leases(claimant)
        return [
            slot for slot in staying if slot.lease and slot.lease.until is None and slot.state is not SlotState.STOPPING
        ]

    def takes_from_model(self, lease: SlotFacts, grants: Sequence[Grant], before: Sequence[SlotFacts]) -> bool:
        """Whether a lease that is not asked to leave would take from a model before it what that waits for."""
        if lease.lease is None or lease.lease.preemptible:
            return False
        return any(
            self.could_have(model, beside=(staying := self.staying_leases(model)))
            and not self.could_have(model, beside=staying, granted=grants)
            for model in before
        )

    def leave_times(self, claimant: SlotFacts) -> dict[str, float]:
        """The time from which each slot may leave for the claimant."""
        times = self._leave_times.get(claimant.id)
        if times is None:
            times = {slot.id: may_leave_at(slot, claimant, self.rules, self.now) for slot in self.facts.slots}
            self._leave_times[claimant.id] = times
        return times

    def is_taken(self, account: str) -> bool:
        """Whether nothing may be evicted from an account for now."""
        return account in self.moving or account in self.claimed or account in self.slack

    def _touches_taken(self, id: str) -> bool:
        return any(self.is_taken(grant.account) for grant in self.slots[id].grants)

    def keep_for(self, claimant: SlotFacts) -> None:
        """Keep the site where a late one gets room first: those behind it may take what it leaves over there, no more.

        Without that, small models would fill each gap, each with a turn of its own, and the large one would starve.
        What has to wait until a lease ends keeps nothing from models: that may be hours.
        """
        soonest = self.soonest(claimant, beside_leases=True)
        if soonest is None or (claimant.lease is not None and not soonest.options):
            return  # one that fits waits for those before it in the line, and keeps nothing from models meanwhile
        short = self.short(soonest.site)
        for number, account in enumerate(soonest.site.accounts):
            left = 0
            if not soonest.site.is_split:
                left = max(0, sum(option.freed[number] for option in soonest.options) - short[number])
            self.slack[account] = min(left, self.slack.get(account, left))

    def keep_from_leases(self, claimant: SlotFacts) -> None:
        """Keep from leases behind it the site where one gets room first, or all it may have while no end is seen.

        Without that, small leases would take each gap, and the large one, or the one that needs several GPUs, would
        starve. One that can be ended for a model passes it: until then it fills a gap that would stay empty.
        """
        soonest = self.soonest(claimant)
        accounts = permitted_accounts(claimant, self.facts.accounts)
        kept = self.no_leases if claimant.lease is not None else self.no_staying_leases
        kept.update(accounts if soonest is None else soonest.site.accounts)

    def claim(self, claimant: SlotFacts, eviction: Eviction) -> Claim:
        """The claim that an eviction is begun with: what the claimant gets, who leaves for it, and how."""
        free = {account: self.free[account] for account in eviction.site.accounts}
        leaving = []
        for option in eviction.options:
            slot = self.slots[option.slot]
            for account, bytes in freed_by(slot, option.level).items():
                if account in free:
                    free[account] += bytes
            turn_over = may_leave_at(_busy(slot), claimant, self.rules, self.now) <= self.now
            leaving.append(EvictedSlot(slot.id, option.level, idle_only=not turn_over))
        return Claim(claimant.id, self._grants(claimant, eviction.site, free), tuple(leaving))

    def _grants(self, claimant: SlotFacts, site: PlacementSite, free: Mapping[str, int]) -> tuple[Grant, ...]:
        if claimant.state is SlotState.ASLEEP:
            return claimant.awake
        if site.is_split:
            grants = split(claimant.need_bytes, free, site.margin_bytes)
            if grants is None:
                raise AssertionError(f"{claimant.id} does not fit into {site.accounts}")
            return grants
        return tuple(Grant(account, claimant.need_bytes) for account in site.accounts)


def _busy(slot: SlotFacts) -> SlotFacts:
    """The slot as if it had something in flight."""
    if slot.state is SlotState.ASLEEP or slot.lease is not None:
        return slot
    return msgspec.structs.replace(slot, in_flight=max(1, slot.in_flight))


def is_asked(slot: SlotFacts, claimant: SlotFacts) -> bool:
    """Whether a slot may be asked to leave for a claimant: a model may, and a lease that may be ended for it."""
    return slot.lease is None or may_be_ended(slot, claimant)


def rise_of(slot: SlotFacts) -> list[tuple[str, int]]:
    """Bytes by account that a sleeping slot takes more when it wakes; it cannot wake anywhere else."""
    kept = {grant.account: grant.charged_bytes for grant in slot.grants}
    return [(grant.account, grant.charged_bytes - kept.get(grant.account, 0)) for grant in slot.awake]


def kept_grants(slot: SlotFacts, level: str) -> tuple[Grant, ...]:
    """The grants of a slot that sleeps at `level`: what it keeps, in proportion over its accounts; none if it ends.

    >>> from hive.pool.state import SleepLevel
    >>> slot = SlotFacts("a", "m", 90, grants=(Grant("x", 60), Grant("y", 30)), levels=(SleepLevel("1", 10, 80, 2.0),))
    >>> [(grant.account, grant.charged_bytes) for grant in kept_grants(slot, "1")]
    [('x', 7), ('y', 4)]
    """
    kept = next((found.kept_bytes for found in slot.levels if found.name == level), 0)
    total = sum(grant.charged_bytes for grant in slot.grants)
    if not kept or not total:
        return ()
    return tuple(Grant(grant.account, -(-kept * grant.charged_bytes // total)) for grant in slot.grants)


def freed_by(slot: SlotFacts, level: str) -> dict[str, int]:
    """Bytes by account that come back when a slot falls asleep, or ends."""
    kept = {grant.account: grant.charged_bytes for grant in kept_grants(slot, level)}
    return {grant.account: max(0, grant.charged_bytes - kept.get(grant.account, 0)) for grant in slot.grants}


def has_left(slot: SlotFacts, leaving: EvictedSlot) -> bool:
    """Whether a victim has given its memory back."""
    if leaving.level:
        return (slot.state is SlotState.ASLEEP and slot.level == leaving.level) or not slot.grants
    return not slot.grants


def blocked_by(outlook: Outlook, slot: SlotFacts) -> str:
    """The reason for which a slot can never be loaded as things are, with the names of those in its way."""
    pinned = sorted(other.model for other in outlook.facts.slots if other.pinned_at is not None and other.grants)
    leases = outlook.endless_leases(slot)
    if leases:
        beside = f"{', '.join(sorted(lease.model for lease in leases))}, which {'has' if len(leases) == 1 else 'have'}"
        return f"{slot.model} does not fit beside {', '.join([*pinned, beside])} no end"
    if pinned:
        return f"{slot.model} does not fit beside what is pinned: {', '.join(pinned)}"
    others = sum(max(account.foreign_bytes, account.strangers_bytes) for account in outlook.facts.accounts)
    if others and any(slot.need_bytes <= one.total_bytes - one.reserve_bytes for one in outlook.facts.accounts):
        return f"{slot.model} needs {slot.need_bytes} bytes, more than is free beside the {others} bytes of others"
    return f"{slot.model} needs {slot.need_bytes} bytes, more than can ever be free"


def with_first_demands(slot: SlotFacts) -> SlotFacts:
    """The slot with the first demand of each band only: no other one decides, and there may be thousands.

    >>> from hive.domain import Band
    >>> from hive.pool.state import Demand
    >>> slot = SlotFacts("a", "m", 1, waiting=tuple(Demand(Band.NORMAL, since) for since in (5.0, 4.0, 6.0)))
    >>> [demand.since for demand in with_first_demands(slot).waiting]
    [4.0]
    """
    first: dict[str, Demand] = {}
    for demand in slot.waiting:
        held = first.get(demand.band)
        if held is None or demand.since < held.since:
            first[demand.band] = demand
    return msgspec.structs.replace(slot, waiting=tuple(first.values()))


def wants(slot: SlotFacts) -> bool:
    """Whether somebody waits for the slot, or an operator has pinned it."""
    return bool(slot.waiting) or slot.pinned_at is not None
