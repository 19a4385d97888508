"""An agent's unit that ended at once: why, by what the journal has of it; and the end of all of an agent."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hive.errors import NotPermitted
from hive.host import systemd
from hive.host.process import Identity
from hive.link.specs import SandboxSpec
from hive.runtimes import unit, unit_plan
from hive.runtimes.process import kill_all
from hive.runtimes.template_fit import OWN_PROGRAM

SPEC = SandboxSpec(name="a", command=["/srv/plain"], env={}, home="/h", log="/l", uid=70000)
NOTE = f"{OWN_PROGRAM}, not from template lib: it has no such module\n"
REFUSED = "hive-becomes-the-agent: 3: exec: /srv/plain: Permission denied\n"


@pytest.mark.parametrize("before", [["", ""], [NOTE], ["", NOTE, NOTE]])
async def test_a_program_that_is_not_executed_is_told_however_late_the_journal_has_it(
    monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    """The line about its template is not what is waited for."""
    words = iter([*before, before[-1] + REFUSED])

    async def read_invocation(_: str) -> str:
        return next(words)

    monkeypatch.setattr(systemd, "read_invocation", read_invocation)
    ended = systemd.ServiceEnd(unit_plan.NOT_EXECUTABLE, "")
    with pytest.raises(NotPermitted, match="may not execute /srv/plain"):
        await unit._raise_if_not_executed(SPEC, ended, "1")


class SlowGroup:
    """A group whose processes are there for some looks after they were killed."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.kills = 0

    def pids(self) -> list[int]:
        self.looks -= 1
        return [] if self.looks < 0 else [os.getpid()]

    def kill(self) -> None:
        self.kills += 1

    def thaw(self) -> None:
        pass


async def test_an_agent_is_gone_once_nothing_of_it_is_left() -> None:
    group: Any = SlowGroup(3)
    assert await kill_all(group, Identity(2**22 + 1, 0, "another boot"))
    assert (group.kills, group.looks) == (3, -1)
