"""The table from recorded state and true state to the action that brings them together. Pure, no I/O."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hive.domain import AgentStatus, RestartPolicy
from hive.terminal_text import counted


class Truth(StrEnum):
    """The state of an agent's processes as seen by the helper (`Stat.state`); an agent it does not know is `gone`."""

    RUNNING = "running"
    FROZEN = "frozen"
    GONE = "gone"


class Action(StrEnum):
    """`adopt`: record it as running. `thaw`: wake it, then record. `keep`: record and truth agree.
    `ended`: it ended unseen, the restart policy decides. `finish`: record it as stopped. `stop`: end what lives."""

    KEEP = "keep"
    ADOPT = "adopt"
    THAW = "thaw"
    ENDED = "ended"
    FINISH = "finish"
    STOP = "stop"


_S, _T, _A = AgentStatus, Truth, Action

_TABLE: dict[AgentStatus, dict[Truth, Action]] = {
    _S.CREATED: {_T.RUNNING: _A.STOP, _T.FROZEN: _A.STOP, _T.GONE: _A.KEEP},
    _S.STARTING: {_T.RUNNING: _A.ADOPT, _T.FROZEN: _A.THAW, _T.GONE: _A.ENDED},
    _S.RUNNING: {_T.RUNNING: _A.KEEP, _T.FROZEN: _A.THAW, _T.GONE: _A.ENDED},
    # Undone towards running: only the daemon that asked the proxy may know its gate closed. What looks running may
    # be half frozen, so it is thawed all the same.
    _S.PAUSING: {_T.RUNNING: _A.THAW, _T.FROZEN: _A.THAW, _T.GONE: _A.ENDED},
    _S.PAUSED: {_T.RUNNING: _A.ADOPT, _T.FROZEN: _A.KEEP, _T.GONE: _A.ENDED},
    _S.RESUMING: {_T.RUNNING: _A.THAW, _T.FROZEN: _A.THAW, _T.GONE: _A.ENDED},
    _S.STOPPING: {_T.RUNNING: _A.STOP, _T.FROZEN: _A.STOP, _T.GONE: _A.FINISH},
    _S.STOPPED: {_T.RUNNING: _A.STOP, _T.FROZEN: _A.STOP, _T.GONE: _A.KEEP},
    _S.ERROR: {_T.RUNNING: _A.STOP, _T.FROZEN: _A.STOP, _T.GONE: _A.KEEP},
}


def reconcile(status: AgentStatus, truth: Truth) -> Action:
    """The action for an agent recorded as `status` whose processes are as `truth` says.

    >>> str(reconcile(AgentStatus.PAUSED, Truth.FROZEN)), str(reconcile(AgentStatus.PAUSING, Truth.FROZEN))
    ('keep', 'thaw')
    """
    return _TABLE[status][truth]


_GATES = {
    _S.RUNNING: "open",
    _S.STARTING: "closed",
    _S.PAUSING: "closed",
    _S.PAUSED: "asleep",
    # Until the thaw is verified it counts as asleep: a lost link must not open this gate.
    _S.RESUMING: "asleep",
}


def gate_of(status: AgentStatus) -> str:
    """The gate's place in `AgentRow.gate` for an agent in this status.

    >>> gate_of(AgentStatus.PAUSED), gate_of(AgentStatus.ERROR)
    ('asleep', 'refused')
    """
    return _GATES.get(status, "refused")


class Ending(msgspec.Struct, frozen=True):
    """The consequence of an unasked end: `restart_in_s`, None where it is not started again, or else `how` it ended."""

    status: AgentStatus
    reason: str
    restart_in_s: float | None = None
    how: str = ""


FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0


def after_end(restart: RestartPolicy, exit_code: int | None, ends: int, limit: int, why: str = "") -> Ending:
    """Decides the consequence of an end nobody asked for.

    `exit_code` None: nobody reaped it, which counts as a failure. `why`: what it does not tell, in words. `ends`:
    within the window, this one included; from `limit` on what restarts on failure only is not started again. `always`
    and `unless-stopped` never give up; their delay grows like that of the others, and falls back as earlier ends leave
    the window. Where it is started again the reason says so: it is what events and lists have of a crash loop.

    >>> after_end(RestartPolicy.ON_FAILURE, 1, ends=2, limit=5).reason
    'exited with 1; end 2 in a row, started again in 1 s'
    >>> after_end(RestartPolicy.NO, 137, ends=1, limit=5, why="out of memory").reason
    'exited with 137: out of memory'
    >>> [str(after_end(policy, 0, ends=9, limit=5).status) for policy in (RestartPolicy.NO, RestartPolicy.ALWAYS)]
    ['stopped', 'starting']
    """
    reason = f"exited with {exit_code}" if exit_code is not None else "ended" if why else "ended, how is unknown"
    reason += f": {why}" if why else ""
    if restart not in (RestartPolicy.ALWAYS, RestartPolicy.UNLESS_STOPPED):
        if exit_code == 0:
            return Ending(AgentStatus.STOPPED, reason)
        if restart is RestartPolicy.NO:
            return Ending(AgentStatus.ERROR, reason)
        if ends >= limit:
            return Ending(AgentStatus.ERROR, f"{reason}, {counted(ends, 'failure')} in a row")
    wait_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(ends - 1, 16))
    row = f"end {ends} in a row, " if ends > 1 else ""
    return Ending(AgentStatus.STARTING, f"{reason}; {row}started again in {wait_s:g} s", wait_s, reason)
