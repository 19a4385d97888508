# ruff: noqa: ASYNC220 - a test's loop may wait for its processes
"""Looks for a holder without a control group, while what came of it ends all the time."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from hive.host.process import ProcessTable, identify
from hive.sandbox.lease_sessions import SessionHold
from hive.tasks import spawn
from tests.waiting import until

ENDING = "sleep 0.5 & sleep 0.6 & sleep 0.7 & echo ready; exec sleep 1000"


async def test_ends_that_come_together_are_one_walk_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.sandbox.lease_sessions.LOOK_S", 1000.0)
    monkeypatch.setattr("hive.sandbox.lease_sessions.CALM_S", 1.5)
    with subprocess.Popen(["sh", "-c", ENDING], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        main = identify(process.pid)
        assert main is not None
        hold = SessionHold(main, "HIVE_LEASE_MARK=calm")
        members, walks = hold._group.members, []

        def counted(table: ProcessTable) -> Any:
            walks.append(found := members(table))
            return found

        monkeypatch.setattr(hold._group, "members", counted)
        over = spawn(hold.over(), name="over")
        await until(lambda: len(walks) == 2)
        assert [len(found) for found in walks] == [4, 1]
        process.kill()
        await over
