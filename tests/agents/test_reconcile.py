"""Record and truth, as a table; ends and the restart policy."""

from __future__ import annotations

import pytest

from hive.agents.reconcile import Action, Truth, after_end, gate_of, reconcile
from hive.domain import AgentStatus, RestartPolicy

TABLE = """
             running  frozen   gone
created      stop     stop     keep
starting     adopt    thaw     ended
running      keep     thaw     ended
pausing      thaw     thaw     ended
paused       adopt    keep     ended
resuming     thaw     thaw     ended
stopping     stop     stop     finish
stopped      stop     stop     keep
error        stop     stop     keep
"""


def rows() -> list[tuple[AgentStatus, Truth, Action]]:
    header, *lines = [line.split() for line in TABLE.strip().splitlines()]
    return [
        (AgentStatus(status), Truth(truth), Action(action))
        for status, *actions in lines
        for truth, action in zip(header, actions, strict=True)
    ]


@pytest.mark.parametrize(("status", "truth", "action"), rows())
def test_record_and_truth_name_the_action(status: AgentStatus, truth: Truth, action: Action) -> None:
    assert reconcile(status, truth) is action


def test_every_status_and_every_truth_is_in_the_table() -> None:
    assert {(status, truth) for status, truth, _ in rows()} == {(s, t) for s in AgentStatus for t in Truth}


@pytest.mark.parametrize("status", AgentStatus)
def test_only_what_is_recorded_asleep_stays_frozen(status: AgentStatus) -> None:
    kept = reconcile(status, Truth.FROZEN) is Action.KEEP
    assert kept == (status is AgentStatus.PAUSED)


def test_a_gate_is_open_for_running_agents_only_and_refuses_who_will_not_come() -> None:
    assert {str(status): gate_of(status) for status in AgentStatus} == {
        "created": "refused",
        "starting": "closed",
        "running": "open",
        "pausing": "closed",
        "paused": "asleep",
        "resuming": "asleep",
        "stopping": "refused",
        "stopped": "refused",
        "error": "refused",
    }


@pytest.mark.parametrize(
    ("restart", "exit_code", "ends", "status", "reason", "restart_in_s"),
    [
        (RestartPolicy.NO, 0, 0, "stopped", "exited with 0", None),
        (RestartPolicy.ON_FAILURE, 0, 0, "stopped", "exited with 0", None),
        (RestartPolicy.NO, 3, 1, "error", "exited with 3", None),
        (RestartPolicy.NO, None, 1, "error", "ended, how is unknown", None),
        (RestartPolicy.ON_FAILURE, 137, 1, "starting", "exited with 137; started again in 0.5 s", 0.5),
        (
            RestartPolicy.ON_FAILURE,
            None,
            2,
            "starting",
            "ended, how is unknown; end 2 in a row, started again in 1 s",
            1.0,
        ),
        (RestartPolicy.ON_FAILURE, 1, 4, "starting", "exited with 1; end 4 in a row, started again in 4 s", 4.0),
        (RestartPolicy.ON_FAILURE, 1, 5, "error", "exited with 1, 5 failures in a row", None),
        (RestartPolicy.ALWAYS, 0, 1, "starting", "exited with 0; started again in 0.5 s", 0.5),
        (RestartPolicy.UNLESS_STOPPED, 0, 2, "starting", "exited with 0; end 2 in a row, started again in 1 s", 1.0),
        (RestartPolicy.ALWAYS, 1, 9, "starting", "exited with 1; end 9 in a row, started again in 10 s", 10.0),
        (
            RestartPolicy.UNLESS_STOPPED,
            None,
            1000,
            "starting",
            "ended, how is unknown; end 1000 in a row, started again in 10 s",
            10.0,
        ),
    ],
)
def test_an_end_nobody_asked_for(
    restart: RestartPolicy, exit_code: int | None, ends: int, status: str, reason: str, restart_in_s: float | None
) -> None:
    ending = after_end(restart, exit_code, ends, limit=5)
    assert (ending.status, ending.reason, ending.restart_in_s) == (AgentStatus(status), reason, restart_in_s)


def test_the_backoff_has_a_limit() -> None:
    assert after_end(RestartPolicy.ON_FAILURE, 1, ends=50, limit=100).restart_in_s == 10.0
