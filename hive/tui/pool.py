"""The pane of GPUs where there is a pool: memory held by models, booked for them, held by others; the models. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hive.terminal_text import counted, shares
from hive.tui.cells import size, span
from hive.tui.charts import spark
from hive.tui.gpus import Drawing, gpu_lines, name_of
from hive.tui.lines import Line, LinePart, Role, cut, joined, line
from hive.tui.snapshot import GpuRow, PoolAccountLine, PoolLeaseRow, PoolLook, PoolSlotLine

HOST = "cpu"
INDENT = " " * 6
NAME_MAX = 24
SIGNS, SIGNS_ASCII = "█▓▚▒░", "#+=-."
ROLES: tuple[Role, ...] = ("good", "going", "bold", "warn", "rule")
"""Of memory that models hold, that is booked for them besides, that leases and others hold, and that is free."""
LEASE_ROLES: dict[str, Role] = {"running": "good", "overdue": "bad", "waiting": "dim"}
STATE_ROLES: dict[str, Role] = {"ready": "good", "failed": "bad", "cold": "dim", "asleep": "dim"}
"""Of a slot's state; all others are `going`."""
AWAY = ("cold",)


def pool_title(pool: PoolLook) -> str:
    """
    >>> pool_title(PoolLook([], [PoolSlotLine(model="a", state="ready"), PoolSlotLine(model="b", state="cold")]))
    'pool: 1 of 2 models loaded'
    """
    loaded = sum(slot.state in ("ready", "draining") for slot in pool.slots)
    leases = f", {counted(len(pool.leases), 'lease')}" if pool.leases else ""
    return f"pool: {loaded} of {counted(len(pool.slots), 'model')} loaded{leases}"


def pool_lines(pool: PoolLook, gpus: Sequence[GpuRow], room: int, drawing: Drawing) -> list[Line]:
    """The memory and the models in at most `room` lines; GPUs that are none of the pool's too.

    >>> slot = PoolSlotLine(model="qwen3-8b", state="ready", in_flight=1, audience=2, memory_bytes=8 << 30)
    >>> gpu = PoolAccountLine("GPU-1", "H200", 20 << 30, 8 << 30, 6 << 30, 9 << 30, 2 << 30, 10 << 30)
    >>> drawing = Drawing(60, backend=None, busy=None, unicode=True)
    >>> for found in pool_lines(PoolLook([gpu], [slot]), [], 3, drawing):
    ...     print("".join(part.text for part in found))
    GPU-1  ████▓▒░░░░░░░ 9.0G/20G free 10G  H200
          qwen3-8b  ready  8.0G  1 in flight, audience 2
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    known = {account.id for account in pool.accounts}
    heads = [account_line(account, by_uuid.get(account.id), drawing) for account in pool.accounts]
    heads += gpu_lines([gpu for gpu in gpus if gpu.uuid not in known], 1000, drawing)
    if len(heads) >= room:
        heads = gpu_lines(gpus, max(1, room - 1), drawing) if gpus else heads[: max(1, room - 1)]
    left = max(0, room - len(heads))
    leases = [_lease(lease) for lease in pool.leases][: left // 2]
    lines = [*heads, *_slots(pool.slots, left - len(leases), drawing.width), *leases]
    return [cut(found, drawing.width, unicode=drawing.unicode) for found in lines[:room]]


def load_lines(pool: PoolLook | None, most: int) -> list[Line]:
    """Loads that requests wait for, the one that most wait for first.

    >>> waits = PoolSlotLine(model="qwen3-32b", state="loading", waiting=3, loading_s=14.0, load_s=47.0)
    >>> print(*("".join(part.text for part in found) for found in load_lines(PoolLook([], [waits]), 2)))
    loading qwen3-32b, 14 s of about 47: 3 wait
    """
    waited = [slot for slot in (pool.slots if pool is not None else ()) if slot.waiting and slot.state != "ready"]
    waited.sort(key=lambda slot: (-slot.waiting, slot.model))
    return [line(LinePart(f"{_progress(slot)}: {slot.waiting} wait", "going")) for slot in waited[:most]]


def _progress(slot: PoolSlotLine) -> str:
    """The sentence of `hive queue`."""
    if slot.loading_s is None:
        return f"{slot.model} is {slot.state}"
    return f"loading {slot.model}, {slot.loading_s:.0f} s of about {slot.load_s:.0f}"


def account_line(account: PoolAccountLine, gpu: GpuRow | None, drawing: Drawing) -> Line:
    """`GPU 0  ████▓▓▒░░ 92G/140G free 40G ▁▂▃▅ H200`; a GPU that has gone says so."""
    label = "host" if account.id == HOST else f"GPU {gpu.number}" if gpu is not None else account.id[:12]
    if gpu is not None and gpu.fault and gpu.total_bytes is None:
        return line(LinePart(f"{label:<6} "), LinePart(f"! {gpu.fault}", "bad"))
    room = drawing.width - 30
    bar, curve = max(4, min(48, room * 4 // 9)), max(0, min(40, room // 4))
    held = account.measured_bytes or 0
    parts_of = [held, max(0, account.charged_bytes - held), account.leased_bytes, account.foreign_bytes]
    cells = shares(parts_of, account.total_bytes, bar)
    signs = SIGNS if drawing.unicode else SIGNS_ASCII
    drawn = zip((*cells, bar - sum(cells)), signs, ROLES, strict=True)
    known = account.measured_bytes if account.id == HOST and account.used_bytes is None else account.used_bytes
    used = "n/a" if known is None else size(known)
    free = size(account.free_bytes) if account.free_bytes >= 0 else f"-{size(-account.free_bytes)}"
    parts = [LinePart(f"{label:<6} "), *(LinePart(sign * count, role) for count, sign, role in drawn if count)]
    parts.append(
        LinePart(f" {used}/{size(account.total_bytes)} free {free} ", "" if account.free_bytes >= 0 else "bad")
    )
    if gpu is not None and drawing.busy is not None and curve:
        percent = "n/a" if gpu.busy_percent is None else f"{gpu.busy_percent}%"
        parts += [
            LinePart(f"{percent:>4} "),
            LinePart(spark(drawing.busy(gpu), curve, top=100, unicode=drawing.unicode), "good"),
        ]
    name = name_of(gpu) if gpu is not None else account.name
    return line(*parts, LinePart(f" {name}", "dim"))


def _slots(slots: Sequence[PoolSlotLine], room: int, width: int) -> list[Line]:
    """A line for each model that is more than cold, if there is room; the cold ones share the last line."""
    if not room:
        return []
    there = sorted((slot for slot in slots if slot.state not in AWAY), key=_rank)
    away = [slot for slot in slots if slot.state in AWAY]
    last = [line(INDENT, LinePart(_cold(away, width), "dim"))] if away else []
    if len(there) + len(last) <= room:
        wide = min(NAME_MAX, max((len(slot.model) for slot in there), default=0))
        return [_slot(slot, wide) for slot in there] + last
    if not there:
        return last
    wide = min(NAME_MAX, max(len(slot.model) for slot in there))
    in_full, rest = there[: room - 1], there[room - 1 :]
    more = [LinePart(f"and {len(away)} cold", "dim")] if away else []
    in_short = joined([*(_in_short(slot) for slot in rest), more], ", ")
    return [*(_slot(slot, wide) for slot in in_full), line(INDENT, *in_short)]


def _rank(slot: PoolSlotLine) -> tuple[int, int, int, str]:
    """Those that fail or move first, then the busiest."""
    return (
        0 if slot.state == "failed" else 2 if slot.state == "ready" else 1,
        -slot.waiting,
        -slot.in_flight,
        slot.model,
    )


def _cold(slots: Sequence[PoolSlotLine], width: int) -> str:
    return f"{len(slots)} cold: {', '.join(slot.model for slot in slots)}"[: max(0, width - len(INDENT))]


def _in_short(slot: PoolSlotLine) -> Line:
    return line(f"{slot.model} ", LinePart(slot.state, STATE_ROLES.get(slot.state, "going")))


def _lease(lease: PoolLeaseRow) -> Line:
    """`lease l-17 python train.py  running  8.0G  it is held`."""
    return line(
        INDENT,
        f"lease {lease.id} {lease.label}".rstrip() + "  ",
        LinePart(lease.state, LEASE_ROLES.get(lease.state, "going")),
        f"  {size(lease.memory_bytes)}" if lease.memory_bytes else "",
        f"  {lease.why}",
    )


def _slot(slot: PoolSlotLine, wide: int) -> Line:
    """`qwen3-32b  ready  21G  1 in flight, audience 2, turn 1m3s`."""
    state = slot.state
    if slot.loading_s is not None:
        state += f" {span(slot.loading_s)} of {span(slot.load_s)}"
    elif slot.wake_s is not None:
        state += f", wakes in {span(slot.wake_s)}"
    name = slot.model if len(slot.model) <= wide else slot.model[: wide - 1] + "…"
    told = [
        "pinned" if slot.pinned else "",
        f"{slot.in_flight} in flight" if slot.in_flight else "",
        f"{slot.waiting} waiting" if slot.waiting else "",
        f"audience {slot.audience}" if slot.audience else "",
        f"turn {span(slot.turn_ends_in_s)}" if slot.turn_ends_in_s is not None else "",
    ]
    said = ", ".join(part for part in told if part) or slot.why
    return line(
        INDENT,
        f"{name:<{wide}}  ",
        LinePart(state, STATE_ROLES.get(slot.state, "going")),
        f"  {size(slot.memory_bytes)}" if slot.memory_bytes else "",
        f"  {said}",
    )
