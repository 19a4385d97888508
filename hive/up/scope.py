"""`hive up` as a user: one more try at deep sleep, inside a scope the user's own systemd delegates.

Only root may page out other processes' memory, but the owner of a cgroup may reclaim what is in it. A login session's
cgroup belongs to root; below the user's manager they are the user's.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hive.errors import HiveError
from hive.host import paging
from hive.host.cgroup import Subtree
from hive.host.process import replace, spawn

MARK = "HIVE_UP_IN_SCOPE"
"""In the environment of a `hive up` that was executed anew: it does not do so again."""
SCOPE = ("--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--")


class ScopeFacts(NamedTuple):
    """The facts of a first look. `why_not`: as the host says it. `systemd_run`: the program, None where there is none.
    `manager`: whether the user's systemd runs. `marked`: whether this is the second execution."""

    uid: int
    why_not: str
    systemd_run: str | None
    manager: bool
    marked: bool


def is_worth_a_try(facts: ScopeFacts) -> bool:
    """Whether a delegated scope may make deep sleep possible. Without swap nothing does, and root needs none.

    >>> is_worth_a_try(ScopeFacts(1000, paging.NOT_PERMITTED, "/usr/bin/systemd-run", manager=True, marked=False))
    True
    """
    refused = facts.why_not.startswith(paging.NOT_PERMITTED)
    return refused and facts.uid != 0 and facts.systemd_run is not None and facts.manager and not facts.marked


def enter(state: Path) -> str:
    """Tries for the right to page out memory; returns the reason against it, empty where there is none.

    Does not return where a scope may change the answer. Then this process goes on as `systemd-run --user --scope …`
    with the same command line, which keeps its pid and its terminal. `state`: the state directory, with the cgroup of
    its agents.
    """
    facts = look(state)
    if is_worth_a_try(facts) and facts.systemd_run is not None and _works(facts.systemd_run):
        env = {**os.environ, MARK: "1"}
        replace([facts.systemd_run, *SCOPE, sys.executable, *sys.orig_argv[1:]], env=env)
    os.environ.pop(MARK, None)
    return facts.why_not


def look(state: Path) -> ScopeFacts:
    """Gathers the facts of this host."""
    uid = os.getuid()
    return ScopeFacts(
        uid=uid,
        why_not=paging.why_not(None) if uid == 0 else _why_not_below(state),
        systemd_run=shutil.which("systemd-run"),
        manager=manager_socket(uid, os.environ).exists(),
        marked=MARK in os.environ,
    )


def _why_not_below(state: Path) -> str:
    """Asked of a cgroup beside the one the agents' will be in, with a name of its own: a Hive may run there."""
    subtree = Subtree.find(state / "look")
    if subtree is None:
        return paging.why_not(None)
    try:
        return paging.why_not(subtree.path)
    finally:
        subtree.remove()


def manager_socket(uid: int, env: Mapping[str, str]) -> Path:
    """The socket of the user's systemd.

    >>> manager_socket(1000, {"XDG_RUNTIME_DIR": "/run/user/7"}), manager_socket(1000, {})
    (PosixPath('/run/user/7/systemd/private'), PosixPath('/run/user/1000/systemd/private'))
    """
    return Path(env.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}") / "systemd/private"


def _works(systemd_run: str) -> bool:
    """Tried with a program that does nothing: what was executed anew could not say that it does not work."""
    try:
        return spawn([systemd_run, *SCOPE, "true"], env=os.environ).wait() == 0
    except HiveError:
        return False
