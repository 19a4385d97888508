"""Is this agent idle? The decider that acts also writes the sentence `hive agent show` prints.

All times are monotonic seconds and come in as arguments, so a test needs no clock and no sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from hive.agents.reconcile import Truth
from hive.agents.units_text import mib, spoken
from hive.domain import AgentStatus
from hive.link.helper import Stat
from hive.terminal_text import counted

WAKES_ON = "ingress, message, schedule, request or resume"


class IdleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that bears on whether one agent may be put to sleep.

    `since`: Unix seconds of the present status, for the sentence only. `awake_since`: its start or last wake.
    `last_active_at`: last byte the proxy saw either way, None where it saw none. `cpu_percent`: of one core over
    the last check, None where it was not measured. `retry_at`: not before this, because that failed.
    `programs`: run inside by operators.
    `kept_awake_until`, and `kept_awake_by`: the actor that asked for it, empty where it is no longer known.
    `asleep_how`: of a sleeping agent, the words of the decider about its depth (depth.py), or of the line it waits in.
    """

    status: AgentStatus
    since: float = 0.0
    reason: str = ""
    auto_sleep: bool = True
    idle_s: float = 300.0
    minimum_awake_s: float = 10.0
    cpu_quiet_percent: float = 2.0
    awake_since: float = 0.0
    proxy_connected: bool = True
    in_flight: int = 0
    parked: int = 0
    ingress: int = 0
    why_busy: str = ""
    programs: int = 0
    last_active_at: float | None = None
    cpu_percent: float | None = None
    retry_at: float = 0.0
    kept_awake_until: float = 0.0
    kept_awake_by: str = ""
    asleep_how: str = "light sleep"


class IdleVerdict(msgspec.Struct, frozen=True):
    """`sleep`: put it to sleep now. `brief`: `why` without what a status beside it says already."""

    sleep: bool
    why: str
    brief: str


def verdict(facts: IdleFacts, now: float) -> IdleVerdict:
    """Decides to put the agent to sleep now or not, and gives the reason in a sentence.

    The vetoes in their order: not running, switched off, kept awake, at work, not yet quiet for long enough,
    computing, woken a moment ago. The first veto gives the reason.

    >>> verdict(IdleFacts(status=AgentStatus.RUNNING, idle_s=20, awake_since=100.0), now=108.0).why
    'awake: 12 s until idle'
    """
    for veto in _VETOES:
        if (objection := veto(facts, now)) is not None:
            return objection
    quiet = f"quiet for {now - _quiet_since(facts):.0f} s"
    return IdleVerdict(True, f"idle: {quiet}", quiet)


def worth_measuring(facts: IdleFacts, now: float, *, within_s: float) -> bool:
    """Whether its CPU time matters by the next check, `within_s` from now: the proxy calls it quiet and time is near.

    >>> worth_measuring(IdleFacts(status=AgentStatus.RUNNING, idle_s=20, awake_since=0.0), now=11.0, within_s=10.0)
    True
    """
    if any(veto(facts, now) is not None for veto in (_not_running, _switched_off, _kept_awake, _at_work)):
        return False
    return now - _quiet_since(facts) >= facts.idle_s - within_s


def cpu_percent(used_us: int, span_s: float) -> float:
    """CPU time as percent of one core; 0 where the counter went backwards (another process under the same agent).

    >>> cpu_percent(50_000, 1.0)
    5.0
    """
    return max(0.0, used_us / 10_000 / span_s)


def cost(stat: Stat, percent: float | None) -> str:
    """The cost of an agent now, in words; `percent`: of one core, None where it was not measured.

    >>> cost(Stat(state="running", held_bytes=120 << 20), 3.14)
    '120 MiB of RAM, 3.1 % of a core'
    >>> cost(Stat(state="frozen", held_bytes=9 << 20, swap_bytes=91 << 20), None), cost(Stat(state="gone"), None)
    ('9 MiB of RAM, 91 MiB of swap', '')
    """
    if stat.state == Truth.GONE:
        return ""
    parts = [] if stat.held_bytes is None else [f"{mib(stat.held_bytes)} of RAM"]
    if stat.swap_bytes:
        parts.append(f"{mib(stat.swap_bytes)} of swap")
    if percent is not None and stat.state == Truth.RUNNING:
        parts.append(f"{percent:.1f} % of a core")
    return ", ".join(parts)


def _quiet_since(facts: IdleFacts) -> float:
    """No activity record counts from the start; a wake counts as activity."""
    return max(facts.awake_since, facts.last_active_at if facts.last_active_at is not None else facts.awake_since)


def _not_running(facts: IdleFacts, now: float) -> IdleVerdict | None:  # noqa: ARG001 - one signature for all vetoes
    match facts.status:
        case AgentStatus.RUNNING:
            return None
        case AgentStatus.PAUSED:
            moment = datetime.fromtimestamp(facts.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            return IdleVerdict(
                False, f"asleep since {moment}, {facts.asleep_how}; wakes on {WAKES_ON}", facts.asleep_how
            )
        case AgentStatus.PAUSING:
            return IdleVerdict(False, "being put to sleep", "being put to sleep")
        case AgentStatus.RESUMING:
            return IdleVerdict(False, "being woken", "being woken")
        case AgentStatus.CREATED:
            return IdleVerdict(False, "never started", "never started")
        case _:
            return IdleVerdict(
                False, f"{facts.status}: {facts.reason}" if facts.reason else str(facts.status), facts.reason
            )


def _awake(why: str) -> IdleVerdict:
    return IdleVerdict(False, f"awake: {why}", why)


def _switched_off(facts: IdleFacts, now: float) -> IdleVerdict | None:  # noqa: ARG001 - one signature for all vetoes
    if facts.idle_s <= 0:
        return _awake("this agent is never put to sleep (idle_s = 0)")
    if not facts.auto_sleep:
        return _awake("automatic sleep is off (auto_sleep_enabled = false)")
    return None


def _kept_awake(facts: IdleFacts, now: float) -> IdleVerdict | None:
    left = facts.kept_awake_until - now
    if left <= 0:
        return None
    by = f" by {facts.kept_awake_by}" if facts.kept_awake_by else ""
    return _awake(f"kept awake for another {spoken(left)}{by}")


def _at_work(facts: IdleFacts, now: float) -> IdleVerdict | None:
    if not facts.proxy_connected:
        return _awake("the proxy is not connected, and nobody is put to sleep without it")
    if facts.in_flight:
        return _awake(f"{counted(facts.in_flight, 'request')} in flight")
    if facts.parked:
        return _awake(f"{counted(facts.parked, 'request')} parked")
    if facts.ingress:
        return _awake(f"{counted(facts.ingress, 'ingress request')} open")
    if facts.programs:
        return _awake(f"{counted(facts.programs, 'program')} of an operator's inside")
    if facts.why_busy:
        return _awake(facts.why_busy)
    if now < facts.retry_at:
        left = facts.retry_at - now
        return _awake(f"it could not be put to sleep, next try in {left:.0f} s")
    return None


def _not_yet_quiet(facts: IdleFacts, now: float) -> IdleVerdict | None:
    left = facts.idle_s - (now - _quiet_since(facts))
    return _awake(f"{left:.0f} s until idle") if left > 0 else None


def _computing(facts: IdleFacts, now: float) -> IdleVerdict | None:  # noqa: ARG001 - one signature for all vetoes
    if facts.cpu_percent is None:
        return _awake("quiet, its CPU time is being measured")
    if facts.cpu_percent >= facts.cpu_quiet_percent:
        used, limit = facts.cpu_percent, facts.cpu_quiet_percent
        return _awake(f"computing, {used:.1f} % of a core (quiet is under {limit:g} %)")
    return None


def _just_woken(facts: IdleFacts, now: float) -> IdleVerdict | None:
    left = facts.minimum_awake_s - (now - facts.awake_since)
    return _awake(f"woken a moment ago, {left:.0f} s of its minimum left") if left > 0 else None


_VETOES: tuple[Callable[[IdleFacts, float], IdleVerdict | None], ...] = (
    _not_running,
    _switched_off,
    _kept_awake,
    _at_work,
    _not_yet_quiet,
    _computing,
    _just_woken,
)
