"""The page of leases as text: the holders of each GPU's memory, the leases and their line, one in full. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hive.tui.cells import UNKNOWN, fit, one_line, size, span
from hive.tui.gpus import Drawing
from hive.tui.lines import Line, LinePart, Role, cut, joined, line, text_of, wrapped
from hive.tui.pool import HOST, INDENT, account_line
from hive.tui.snapshot import Answer, GpuRow, PoolLook

MIB = 1 << 20
STATE_ROLES: dict[str, Role] = {"running": "good", "overdue": "bad", "waiting": "dim"}
"""Of a lease's state; all others are `going`."""
COLUMNS = (("LEASE", 7), ("STATE", 8), ("LINE", 9), ("MEMORY", 8), ("SEEN", 5), ("GPU", 7), ("BAND", 6), ("USER", 12))
"""Of the list, with their widths; the program takes what is left."""
DROPPED = ("BAND", "SEEN", "USER", "GPU")
"""Columns that a narrow terminal has no room for, those that go first before the others."""
PROGRAM_MIN = 14


class LeaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as `GET /api/leases` tells it, without what is not shown here. Times named `_at` and `until` are Unix
    seconds."""

    id: str
    state: str
    mb: int
    gpus: list[str]
    wanted_gpus: int
    band: str
    label: str
    user: str
    why: str
    preemptible: bool
    place: int | None
    before: list[str]
    ready_in_s: float | None
    bound_s: float | None
    since: float
    granted_at: float | None
    until: float | None
    used_mb: int | None
    held_by: str


def leases_of(answer: Answer) -> list[LeaseLine]:
    """The leases, as they are told: those in line first. Raises ValidationError for an answer of another version."""
    return msgspec.convert(answer["leases"], list[LeaseLine])


def lease_title(leases: Sequence[LeaseLine] | None, *, is_held: bool = False, is_away: bool = False) -> str:
    """
    >>> lease_title([]), lease_title(None), lease_title([], is_away=True)
    ('leases: none', 'leases: not known yet', 'leases: none (as they were)')
    """
    if leases is None:
        return "leases: not known yet"
    waiting = sum(lease.place is not None for lease in leases)
    held = len(leases) - waiting
    said = [f"{held} held" if held else "", f"{waiting} waiting" if waiting else ""]
    how = " (as they were)" if is_away else " (held: esc and space go on)" if is_held else ""
    return f"leases: {', '.join(part for part in said if part) or 'none'}{how}"


def numbers_of(gpus: Sequence[GpuRow]) -> dict[str, str]:
    """UUID → the number by which a GPU is called."""
    return {gpu.uuid: str(gpu.number) for gpu in gpus}


def holder_lines(pool: PoolLook | None, gpus: Sequence[GpuRow], room: int, drawing: Drawing) -> list[Line]:
    """Each account's bar and, where there is room, its holders: the models, the leases, others, and what is free."""
    if pool is None:
        return [line(LinePart("no memory is booked: no model is described, and nobody holds a lease", "dim"))]
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    with_holders = 2 * len(pool.accounts) <= room
    lines: list[Line] = []
    for account in pool.accounts[: room if not with_holders else None]:
        lines.append(account_line(account, by_uuid.get(account.id), drawing))
        if with_holders:
            lines.append(line(INDENT + " ", *_holders(pool, account.id)))
    if not with_holders and len(pool.accounts) > room:
        left = len(pool.accounts) - room + 1
        lines[room - 1 :] = [line(LinePart(f"and {left} more: hive pool", "dim"))]
    return [cut(found, drawing.width, unicode=drawing.unicode) for found in lines]


def _holders(pool: PoolLook, account: str) -> Line:
    """`leases 8.0G (l-17 8.0G) · others 9.0G · models 30G (qwen3-8b 7.0G, qwen3-1b 1.0G)`."""
    foreign = next(row.foreign_bytes for row in pool.accounts if row.id == account)
    parts = [
        _share(pool, account, ("lease",), "leases", "bold"),
        line(LinePart("others", "warn"), f" {size(foreign)}") if foreign else (),
        _share(pool, account, ("model", "backend"), "models", "good"),
    ]
    return joined(parts) or line(LinePart("nobody holds any of it", "dim"))


def _share(pool: PoolLook, account: str, holders: Sequence[str], what: str, role: Role) -> Line:
    of = [share for share in pool.shares if share.account == account and share.holder in holders and share.memory_bytes]
    if not of:
        return ()
    of.sort(key=lambda share: (-share.memory_bytes, share.name))
    named = [f"{share.name} {size(share.memory_bytes)}" for share in of[:3]]
    named += [f"{len(of) - 3} more"] if len(of) > 3 else []
    return line(LinePart(what, role), f" {size(sum(share.memory_bytes for share in of))} ({', '.join(named)})")


def heads(width: int) -> str:
    """
    >>> heads(60)
    'LEASE   STATE    LINE      MEMORY   GPU     PROGRAM         '
    """
    return _row([head for head, _ in COLUMNS], "PROGRAM", width, unicode=True)


def lease_cells(lease: LeaseLine, numbers: Mapping[str, str], width: int, *, unicode: bool) -> Line:
    """One lease on one line of this width: its place and time in line where it waits, else until when it holds."""
    names = ["host" if gpu == HOST else numbers.get(gpu, gpu[:7]) for gpu in lease.gpus]
    cells = [
        lease.id,
        lease.state,
        _in_line(lease),
        _memory(lease),
        UNKNOWN if lease.used_mb is None else size(lease.used_mb * MIB),
        ",".join(names) or UNKNOWN,
        lease.band,
        lease.user,
    ]
    text = _row(cells, lease.label or lease.why, width, unicode=unicode)
    start = COLUMNS[0][1] + 1
    end = start + COLUMNS[1][1]
    return line(text[:start], LinePart(text[start:end], STATE_ROLES.get(lease.state, "going")), text[end:])


def _row(cells: Sequence[str], program: str, width: int, *, unicode: bool) -> str:
    columns = [*zip(COLUMNS, cells, strict=True)]
    for dropped in DROPPED:
        if width - sum(wide + 1 for (_, wide), _ in columns) >= PROGRAM_MIN:
            break
        columns = [column for column in columns if column[0][0] != dropped]
    room = max(3, width - sum(wide + 1 for (_, wide), _ in columns))
    told = [(wide, cell) for (_, wide), cell in columns]
    texts = [
        f"{fit(one_line(cell, unicode=unicode), wide, unicode=unicode):<{wide}}"
        for wide, cell in [*told, (room, program)]
    ]
    return " ".join(texts)[:width]


def _in_line(lease: LeaseLine) -> str:
    """`1 in 34s`: its place, and its time where one can be told."""
    if lease.place is None:
        return UNKNOWN
    return f"{lease.place}" + ("" if lease.ready_in_s is None else f" in {span(lease.ready_in_s)}")


def _memory(lease: LeaseLine) -> str:
    return size(lease.mb * MIB) + (f" x{lease.wanted_gpus}" if lease.wanted_gpus > 1 else "")


def lease_facts(lease: LeaseLine, width: int, *, now: float, most: int) -> list[Line]:
    """The selected lease: whose it is, until when, what is before it, and why it is so."""
    parts = [
        line(LinePart(lease.id, "bold"), " of ", lease.user),
        line(f"{_memory(lease)}, {lease.band}{', preemptible' if lease.preemptible else ''}"),
    ]
    if lease.place is not None:
        bound = "no end can be seen" if lease.bound_s is None else f"{span(lease.bound_s)} at most"
        parts.append(line(f"place {lease.place} for {span(max(0.0, now - lease.since))}, {bound}"))
        if lease.before:
            parts.append(line(f"behind {_named(lease.before)}"))
    elif lease.granted_at is not None:
        parts.append(line(f"since {span(max(0.0, now - lease.granted_at))}"))
    if lease.until is not None:
        parts.append(line(f"ends in {span(max(0.0, lease.until - now))}"))
    if lease.held_by:
        parts.append(line(f"held by {lease.held_by}"))
    why = f"{lease.label or 'it'}: {lease.why}"
    first = wrapped(one_line(text_of([joined(parts)])), width, role="", most=max(1, most - 1))
    return [*first, *wrapped(one_line(why), width, role="", most=max(1, most - len(first)))]


def _named(before: Sequence[str]) -> str:
    """
    >>> _named(["l-1"]), _named([f"l-{number}" for number in range(50)])
    ('l-1', 'l-0, l-1, l-2 and 47 more')
    """
    return ", ".join(before[:3]) + (f" and {len(before) - 3} more" if len(before) > 3 else "")


def end_question(lease: LeaseLine) -> str:
    """The question before a lease is ended."""
    who = f"{lease.id} of {lease.user}" + (f" ({lease.label})" if lease.label else "")
    if lease.place is not None:
        return f"End {who} in line? It leaves the line."
    if not lease.held_by:
        return f"End {who}? Hive has no program of it to end: its holder is told when it renews."
    return f"End {who}? Its program gets SIGTERM, and SIGKILL after its grace."
