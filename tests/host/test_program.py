"""Programs that are run to their end."""

from __future__ import annotations

import psutil
import pytest

from hive.errors import NotFound, TimedOut
from hive.host import program


def test_a_program_is_run_with_exactly_its_environment_and_both_outputs_come_back() -> None:
    ran = program.run(["/bin/sh", "-c", "env; echo wrong >&2; exit 3"], env={"A": "1"})
    assert ran.code == 3
    assert ran.last_line == "wrong"
    assert {line.partition("=")[0] for line in ran.text.splitlines()[:-1]} <= {"A", "PWD", "_", "SHLVL"}
    assert program.run(["/bin/true"]).last_line == "it said nothing"


def test_a_program_that_was_killed_has_the_code_a_shell_gives_it() -> None:
    assert program.run(["/bin/sh", "-c", "kill -9 $$"]).code == 137


def test_one_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimedOut, match=r"did not come to an end within 0\.05 s"):
        program.run(["/bin/sleep", "60.25"], limit_s=0.05)
    assert "60.25" not in [word for child in psutil.Process().children() for word in words_of(child)]


def words_of(process: psutil.Process) -> list[str]:
    """None of one that has ended: other tests have such children."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def test_one_that_is_not_there_is_said() -> None:
    with pytest.raises(NotFound):
        program.run(["no-such-program"])
    assert not program.is_there("no-such-program")
    assert program.is_there("sh")
