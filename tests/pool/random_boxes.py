"""Boxes made by chance, and the chances that befall them."""

from __future__ import annotations

import random

from msgspec.structs import replace

from hive.domain import Band
from hive.pool.state import MIB, ExclusiveOrder, MemoryAccount, Rules, SleepLevel, SlotFacts, SlotState
from tests.pool.pool_box import PoolBox

GIB = 1024 * MIB
BANDS = (Band.HIGH, Band.NORMAL, Band.NORMAL, Band.LOW)


def random_box(chance: random.Random, *, gpus: int, models: int) -> PoolBox:
    accounts = [MemoryAccount(f"GPU-{number}", chance.randint(20, 48) * GIB) for number in range(gpus)]
    largest = max(account.total_bytes // GIB for account in accounts)
    rules = Rules(host_ram_bytes=chance.choice([0, 64 * GIB]))
    slots = []
    for number in range(models):
        size = chance.randint(2, largest - 1) * GIB
        levels = (SleepLevel("1", GIB // 2, size, 2.0),) if chance.random() < 0.3 else ()
        slots.append(
            SlotFacts(
                f"m{number}",
                f"m{number}",
                size,
                kind=chance.choice(["llama", "vllm"]),
                load_s=4 + size / GIB / 1.5,
                levels=levels,
                keep_alive_s=chance.choice([0.0, 0.0, 60.0]),
                permitted=(accounts[-1].id,) if chance.random() < 0.2 and size < accounts[-1].total_bytes - GIB else (),
            )
        )
    return PoolBox(slots, accounts, rules, chance)


def befall(box: PoolBox, chance: random.Random, *, orders: bool) -> None:
    """One thing happens: mostly a request or some time; with `orders` sometimes what no bound holds against."""
    ids = list(box.slots)
    one = chance.choice(ids)
    kind = chance.random()
    if kind < 0.55:
        service_s = chance.choice([0.1, 2.0, 5.0, 20.0, 900.0 if chance.random() < 0.05 else 8.0])
        patience_s = chance.choice([None, None, None, 20.0])
        box.ask(f"agent-{chance.randrange(8)}", one, chance.choice(BANDS), service_s, patience_s=patience_s)
    elif kind < 0.95 or not orders:
        box.pass_time(chance.choice([0.5, 3.0, 3.0, 10.0, 10.0, 45.0]))
    else:
        give_order(box, chance, one)


def give_order(box: PoolBox, chance: random.Random, one: str) -> None:
    box.void_bounds()
    slot = box.slots[one]
    match chance.choice(["pin", "unpin", "unpin", "unload", "switch", "fail", "foreign", "foreign over"]):
        case "pin":
            pinned = [other for other in box.slots.values() if other.pinned_at is not None]
            if not pinned and slot.state is not SlotState.FAILED:
                box.set(one, pinned_at=box.now)
        case "unpin":
            for other in box.slots:
                box.set(other, pinned_at=None)
        case "unload":
            if slot.state in (SlotState.READY, SlotState.ASLEEP) and slot.pinned_at is None:
                box.set(one, unload_ordered=True)
        case "switch":
            if slot.state is not SlotState.FAILED:
                box.exclusive = ExclusiveOrder(slot.kind, one)
        case "fail":
            box.failing.add(one)
        case "foreign":
            account = chance.choice(list(box.accounts.values()))
            box.accounts[account.id] = replace(account, foreign_bytes=chance.randint(0, 8) * GIB)
        case "foreign over":
            for account in box.accounts.values():
                box.accounts[account.id] = replace(account, foreign_bytes=0)
            for failed in box.slots.values():
                if failed.state is SlotState.FAILED:
                    box.set(failed.id, state=SlotState.COLD, failures=0, retry_at=0.0)
    box.decide()


def walk(seed: int, steps: int) -> PoolBox:
    """A box under `steps` chances. In every second one nothing happens that no bound holds against."""
    chance = random.Random(seed)
    box = random_box(chance, gpus=chance.choice([1, 1, 1, 2, 3]), models=chance.randint(2, 6))
    for _ in range(steps):
        befall(box, chance, orders=bool(seed % 2))
    return box
