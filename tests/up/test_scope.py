"""The scope of the user's systemd inside which `hive up` executes itself anew, and its words where that cannot help."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.host.paging import NO_SWAP, NOT_PERMITTED
from hive.up import scope
from hive.up.scope import ScopeFacts, is_worth_a_try
from tests.nobody import run_as_nobody
from tests.swapspace import without_swap, zram_swap

USER = ScopeFacts(1000, f"{NOT_PERMITTED} (it takes more)", "/usr/bin/systemd-run", manager=True, marked=False)


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        (USER, True),
        (USER._replace(why_not=""), False),
        (USER._replace(why_not=NO_SWAP), False),
        (USER._replace(uid=0), False),
        (USER._replace(systemd_run=None), False),
        (USER._replace(manager=False), False),
        (USER._replace(marked=True), False),
    ],
)
def test_a_scope_is_tried_once_by_a_user_whom_it_may_help(facts: ScopeFacts, answer: bool) -> None:
    assert is_worth_a_try(facts) is answer


def _no_replacing(*_: object, **__: object) -> None:
    raise AssertionError("executed anew")


def test_what_was_executed_anew_does_not_pass_the_mark_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scope.MARK, "1")
    monkeypatch.setattr(scope, "look", lambda _: USER._replace(marked=True))
    monkeypatch.setattr(scope, "replace", _no_replacing)
    assert scope.enter(tmp_path) == USER.why_not
    assert scope.MARK not in os.environ


def test_a_systemd_run_that_fails_is_not_tried_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "look", lambda _: USER._replace(systemd_run="/bin/false"))
    monkeypatch.setattr(scope, "replace", _no_replacing)
    assert scope.enter(tmp_path) == USER.why_not


def test_the_same_command_line_runs_in_the_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/bin/echo` takes any arguments and succeeds, as a systemd-run that works does."""
    executed: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(scope, "look", lambda _: USER._replace(systemd_run="/bin/echo"))
    monkeypatch.setattr(scope, "replace", lambda command, *, env: executed.append((command, env)))
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "hive", "up", "--demo"])
    scope.enter(tmp_path)
    [(command, env)] = executed
    assert command[:4] == ["/bin/echo", "--user", "--scope", "--quiet"]
    assert command[-4:] == ["-m", "hive", "up", "--demo"]
    assert env[scope.MARK] == "1"


@pytest.mark.root
def test_root_needs_no_scope(tmp_path: Path) -> None:
    with zram_swap(16):
        assert scope.enter(tmp_path) == ""


@pytest.mark.root
def test_a_host_without_swap_is_said_to_be_one(tmp_path: Path) -> None:
    with without_swap():
        assert scope.enter(tmp_path) == NO_SWAP


@pytest.mark.root
def test_a_user_without_a_systemd_of_his_own_is_told_it_is_not_permitted() -> None:
    program = "from hive.up import scope\nfrom pathlib import Path\nprint(scope.enter(Path('/tmp/x')))"
    with zram_swap(16):
        assert run_as_nobody(program).startswith("deep sleep: not permitted here (it takes CAP_SYS_PTRACE")
