"""What the daemon complains about has something to type against it."""

from __future__ import annotations

from control.box import AWAKE, Box

from hive.cli.next_command import Where, about


async def test_each_part_that_is_missing_is_a_problem_with_a_command_of_its_own(box: Box) -> None:
    await box.start_daemon(AWAKE)
    health = box.desk.health()
    commands = [about(problem, health, Where()) for problem in health["problems"]]
    assert commands == ["hive logs proxy", "hive logs sandbox", "hive logs redis"]
