"""The panes above and below the table of agents, and the whole of the screen as text. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hive.build import number_of
from hive.domain import AgentStatus
from hive.terminal_text import counted, shares
from hive.tui.cells import COLUMNS, count, fit, line_of, one_line, ordered, row_line, shown, size, span
from hive.tui.charts import with_scale
from hive.tui.gpus import Drawing, gpu_lines
from hive.tui.lines import ROLES, Line, LinePart, Role, joined, line, text_of, wrapped
from hive.tui.pool import load_lines, pool_lines, pool_title
from hive.tui.snapshot import BackendRow, ClusterLine, EventLine, QueueLine, Snapshot, TenantQueueLine

NOBODY_SAYS = "the proxy does not answer this user"
JUMP_S = 5.0
"""A clock that is set may be this far off before it is worth a word."""
_GOING = {AgentStatus.STARTING, AgentStatus.PAUSING, AgentStatus.RESUMING, AgentStatus.STOPPING}
_ENDS = {*AgentStatus} - _GOING | {"stayed_awake", "removed"}
"""Events that end a change on its way; other events of an agent (`agent.changed`, `agent.port_moved`) do not."""


def head_lines(snapshot: Snapshot, *, is_held: bool = False) -> list[Line]:
    """The backend, the agents and what it all costs: at most two lines, what matters most first."""
    first = [line(LinePart(f"Hive {number_of(snapshot.hive_version)}".strip(), "bold")), backend_line(snapshot.backend)]
    if is_held:
        first.insert(0, line(LinePart("held: space goes on", "mark")))
    second = [line(text) for text in _memory(snapshot)]
    if snapshot.wakes is not None:
        p50 = "" if snapshot.wake_ms is None else f", p50 {snapshot.wake_ms:.1f} ms"
        second.append(line(f"{counted(snapshot.wakes, 'wake')} since start{p50}"))
    second.append(_nodes(snapshot.backend))
    if snapshot.isolation:
        second.append(line(LinePart(f"isolation {snapshot.isolation}", "dim")))
    return [found for found in (joined([*first, _agents(snapshot)]), joined(second)) if found]


def _agents(snapshot: Snapshot) -> Line:
    states: dict[str, int] = {}
    for row in snapshot.agents:
        states[row.status] = states.get(row.status, 0) + 1
    counts = sorted(states.items(), key=lambda found: (_rank(found[0]), found[0]))
    parts = [line(LinePart(f"{number} {status}", ROLES.get(status, "going"))) for status, number in counts]
    return joined(parts, " ") or line("no agents")


def _rank(status: str) -> int:
    """
    >>> sorted(["stopped", "running", "error", "pausing"], key=_rank)
    ['error', 'running', 'pausing', 'stopped']
    """
    known = ("error", "running", "paused")
    return known.index(status) if status in known else 4 if status in ("stopped", "created") else 3


def _memory(snapshot: Snapshot) -> list[str]:
    memory = snapshot.memory
    if memory is None:
        return []
    texts = []
    if memory.total_bytes is not None and memory.available_bytes is not None:
        texts.append(f"RAM {size(memory.total_bytes - memory.available_bytes)}/{size(memory.total_bytes)}")
    if memory.swap_total_bytes and memory.swap_free_bytes is not None:
        texts.append(f"swap {size(memory.swap_total_bytes - memory.swap_free_bytes)}/{size(memory.swap_total_bytes)}")
    return [*texts, f"saved {size(sum(row.saved_bytes or 0 for row in snapshot.agents))}"]


def backend_line(backend: BackendRow | None) -> Line:
    if backend is None:
        return line(LinePart("backend unknown", "dim"))
    if backend.switching:
        return line(LinePart(f"switching: {backend.switching}", "going"))
    slots = "" if backend.slots is None else f", {backend.slots} at once"
    state = LinePart("up", "good") if backend.up else LinePart("DOWN", "bad")
    if (cluster := backend.cluster) is None:
        return line("backend ", state, f": {backend.label.partition(' at ')[0]}{slots}")
    return line("backend ", state, f": {cluster.label} ", *_replicas(cluster), slots)


def _replicas(cluster: ClusterLine) -> Line:
    """Replicas that run, of those that should.

    >>> text_of([_replicas(ClusterLine(label="Ray Serve", running=1, wanted=2, stuck=["1"]))])
    '1/2 replicas, 1 stuck'
    """
    is_well = cluster.running >= cluster.wanted and not cluster.stuck
    role: Role = "" if is_well else "warn" if cluster.running and not cluster.stuck else "bad"
    stuck = [LinePart(f", {len(cluster.stuck)} stuck", "bad")] if cluster.stuck else []
    return line(LinePart(f"{cluster.running}/{cluster.wanted} replicas", role), *stuck)


def _nodes(backend: BackendRow | None) -> Line:
    """
    >>> text_of([_nodes(None)])
    ''
    """
    cluster = None if backend is None else backend.cluster
    if cluster is None or not cluster.nodes:
        return ()
    up = cluster.nodes - len(cluster.down)
    return line(LinePart(f"nodes {up}/{cluster.nodes} up", "warn" if cluster.down else ""))


def wrong_with(snapshot: Snapshot) -> list[str]:
    """The problems in words, the worst first, each with what to type; some may be empty."""
    told = [f"{one.text}; fix: {one.fix}" if one.fix else one.text for one in snapshot.conditions]
    warning = "" if snapshot.backend is None else snapshot.backend.warning
    return told if any(warning in text for text in told) else [*told, warning]


def problem_lines(problems: Sequence[str], width: int, *, most: int = 4) -> list[Line]:
    """The problems, the worst first: in full where there is room, else each on an equal share of the lines.

    >>> text_of(problem_lines(["the daemon is down", "", "swap is full"], 14))
    '! the daemon\\n  is down\\n! swap is full'
    >>> text_of(problem_lines(["the daemon is down", "swap is full"], 14, most=2))
    '! the daemon is down\\n! swap is full'
    """
    told = [one_line(problem) for problem in problems if problem]
    lines: list[Line] = []
    for share in (most, max(1, most // max(1, len(told)))):
        lines = [
            line(LinePart("  " if n else "! ", "bad"), *parts)
            for problem in told
            for n, parts in enumerate(wrapped(problem, width - 2, role="bad", most=share))
        ]
        if len(lines) <= most:
            break
    if len(lines) > most:
        lines[most - 1 :] = [line(LinePart(f"! and {len(lines) - most + 1} more: hive status", "bad"))]
    return lines


def memory_title(snapshot: Snapshot) -> str:
    return "GPUs" if snapshot.pool is None else pool_title(snapshot.pool)


def memory_lines(snapshot: Snapshot, room: int, drawing: Drawing) -> list[Line]:
    """The GPUs; with a pool its models and the memory they share."""
    if snapshot.pool is None:
        return gpu_lines(snapshot.gpus, room, drawing)
    return pool_lines(snapshot.pool, snapshot.gpus, room, drawing)


def waiting_lines(snapshot: Snapshot, width: int, room: int, *, unicode: bool) -> list[Line]:
    """Loads that requests wait for, then the queue of each tenant."""
    loads = load_lines(snapshot.pool, max(1, room // 2))
    return [*loads, *queue_lines(snapshot.queue, width, max(1, room - len(loads)), unicode=unicode)]


def queue_title(queue: QueueLine | None, backend: BackendRow | None = None) -> str:
    """The requests that wait in Hive, and those that wait inside a cluster.

    >>> queue_title(None), queue_title(QueueLine(2, 3, None, [])), queue_title(QueueLine(4, 3, 4, []))
    ('queue: unknown', 'queue: 3 waiting, 2 running', 'queue: 3 waiting, 4 of 4 running')
    """
    if queue is None:
        return "queue: unknown"
    of = "" if queue.slots is None else f" of {queue.slots}"
    cluster = None if backend is None else backend.cluster
    inside = f", {cluster.waiting} inside" if cluster is not None and cluster.waiting else ""
    return f"queue: {queue.waiting} waiting, {queue.running}{of} running{inside}"


def queue_lines(queue: QueueLine | None, width: int, room: int, *, unicode: bool) -> list[Line]:
    """Each tenant with requests in the queue, those with most waiting first; tenants without room are counted.

    >>> tenants = [TenantQueueLine("a", 1, 2), TenantQueueLine("b", 2, 0), TenantQueueLine("idle", 0, 0)]
    >>> busy = QueueLine(3, 2, 4, tenants)
    >>> print(text_of(queue_lines(busy, 44, 2, unicode=True)))
    a          ███▒▒▒▒▒▒▒   1 running  2 waiting
    b          ███████      2 running  0 waiting
    >>> print(text_of(queue_lines(busy, 44, 1, unicode=True)))
    2 tenants: 3 running, 2 waiting
    """
    if queue is None:
        return [line(LinePart(NOBODY_SAYS, "dim"))]
    busy = [row for row in queue.tenants if row.running or row.waiting]
    busy.sort(key=lambda row: (-row.waiting, -row.running, row.tenant))
    if not busy:
        return [line(LinePart("nobody waits", "dim"))]
    shown_, left = (busy, []) if len(busy) <= room else (busy[: room - 1], busy[room - 1 :])
    most = max(row.running + row.waiting for row in busy)
    lines = [_tenant(row, most, width, unicode=unicode) for row in shown_]
    if left:
        tenants = f"and {len(left)} more" if shown_ else counted(len(left), "tenant")
        running, waiting = sum(row.running for row in left), sum(row.waiting for row in left)
        lines.append(line(LinePart(f"{tenants}: {running} running, {waiting} waiting", "dim")))
    return lines


def _tenant(row: TenantQueueLine, most: int, width: int, *, unicode: bool) -> Line:
    figures = f" {row.running:>3} running {row.waiting:>2} waiting"
    name = 10
    wide = max(0, min(40, width - name - 1 - len(figures)))
    running, waiting = shares([row.running, row.waiting], most, wide)
    full, part = ("█", "▒") if unicode else ("#", "+")
    tenant = fit(one_line(row.tenant, unicode=unicode), name, unicode=unicode)
    return line(
        f"{tenant:<{name}} ",
        LinePart(full * running, "good"),
        LinePart(part * waiting, "warn"),
        " " * (wide - running - waiting),
        f" {row.running:>3} running ",
        LinePart(f"{row.waiting:>2} waiting", "warn" if row.waiting else ""),
    )


def tokens_title(rates: Sequence[float | None]) -> str:
    """
    >>> tokens_title([]), tokens_title([None, 98.0, 41.3]), tokens_title([3.0, None])
    ('tokens/s', 'tokens/s: 41.3', 'tokens/s: unknown')
    """
    if not rates:
        return "tokens/s"
    return f"tokens/s: {'unknown' if rates[-1] is None else count(rates[-1])}"


def tokens_lines(rates: Sequence[float | None], width: int, height: int, *, unicode: bool) -> list[Line]:
    return [line(LinePart(text, "good")) for text in with_scale(rates, width, height, unicode=unicode)]


def event_lines(events: Sequence[EventLine], most: int) -> list[Line]:
    """The last ones, the newest first, in local time; a change on its way is left out where its end is told as well."""
    lines: list[Line] = []
    ended: set[str] = set()
    for event in reversed(events):
        state = event.kind.rpartition(".")[2]
        who = event.text.partition(" ")[0]
        if state in _GOING and who in ended:
            continue
        if state in _ENDS and event.kind.startswith("agent."):
            ended.add(who)
        at = time.strftime("%H:%M:%S ", time.localtime(event.at))
        role = ROLES.get(state, "going" if state in _GOING else "")
        lines.append(line(LinePart(at, "dim"), LinePart(f"{event.kind:<16} ", role), event.text))
        if len(lines) == most:
            break
    return lines


def jumped_s(before: float, now: float, elapsed_s: float) -> float:
    """The jump of the clock between two looks, `elapsed_s` by one that cannot be set; 0 where it did not jump.

    >>> jumped_s(100.0, 3701.0, 1.0), jumped_s(100.0, 40.0, 1.0), jumped_s(100.0, 101.2, 1.0)
    (3600.0, -61.0, 0.0)
    """
    jump = now - before - elapsed_s
    return round(jump, 1) if abs(jump) > JUMP_S else 0.0


def jump_text(jump_s: float) -> str:
    """
    >>> jump_text(-3600.0)
    'the clock of this machine was set back by 1h: times of rest and rates are off for a while'
    """
    way = "on" if jump_s > 0 else "back"
    return (
        f"the clock of this machine was set {way} by {span(abs(jump_s))}: times of rest and rates are off for a while"
    )


def plain(snapshot: Snapshot, width: int, *, unicode: bool, rows: int | None = None) -> str:
    """The whole screen as text: what `--once` prints, or so many lines of it. One look has no curves."""
    columns = shown(width)
    drawing = Drawing(width, backend=snapshot.backend, busy=None, unicode=unicode)
    lines = [one_line(text_of([parts]), unicode=unicode) for parts in head_lines(snapshot)]
    lines += [one_line(problem, unicode=unicode) for problem in wrong_with(snapshot) if problem]
    lines += [] if snapshot.pool is None else [pool_title(snapshot.pool)]
    lines += [text_of([parts]) for parts in memory_lines(snapshot, 1000, drawing)]
    lines.append(queue_title(snapshot.queue, snapshot.backend))
    if snapshot.queue is not None and (snapshot.queue.running or snapshot.queue.waiting):
        lines += [text_of([parts]) for parts in waiting_lines(snapshot, width, 1000, unicode=unicode)]
    lines += ["", line_of([column.head for column in columns], columns, width, unicode=unicode)]
    agents = ordered(snapshot.agents, COLUMNS[0], descending=False)
    lines += [row_line(row, columns, width, unicode=unicode) for row in agents[:rows]]
    return "\n".join(text.rstrip() for text in lines[:rows])
