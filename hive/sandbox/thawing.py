"""`hive sandbox-thaw`: no agent stays frozen when the host goes down, whatever became of daemon and helper.

A helper that leaves thaws every agent itself; this is for one that was killed and not started again. A frozen agent
hears no SIGTERM, and a stop of it waits for its timeout.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hive.errors import HiveError, WrongState
from hive.host.cgroup import Subtree
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.firecracker import FirecrackerRuntime
from hive.runtimes.process import ProcessRuntime
from hive.runtimes.runtime import Runtime
from hive.runtimes.unit import UnitRuntime
from hive.settings.table import Paths, Settings

log = logging.getLogger("hive.sandbox")


async def thaw_everybody(runtimes: Sequence[Runtime]) -> list[str]:
    """Thaws every agent Hive has frozen; returns their ids. A runtime that fails keeps no other one from it.

    Agents are found by what the kernel, the engine and the jails have of them, not by any table.
    """
    thawed: list[str] = []
    for runtime in runtimes:
        try:
            thawed += await runtime.thaw_strays(set())
        except (HiveError, OSError) as error:
            log.error("not_thawed runtime=%r error=%s", runtime, error)
    return thawed


@contextmanager
def _instead_of_a_helper(path: Path) -> Iterator[None]:
    """No helper of this state directory runs, or begins, meanwhile. Raises WrongState where one does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield  # there has never been one
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise WrongState(
            f"a helper uses {path.parent}: it knows whom it froze", hint="stop it, and it thaws everybody"
        ) from None
    finally:
        os.close(fd)


def main(paths: Paths, settings: Settings) -> int:
    """Thaws every agent and says which. Raises WrongState where a helper runs."""
    log_max_bytes, sandbox = settings.agents.log_max_bytes, settings.sandbox
    with _instead_of_a_helper(paths.sandbox_lock):
        runtimes = (
            UnitRuntime(paths, sandbox, log_max_bytes=log_max_bytes),
            ProcessRuntime(paths, subtree=Subtree.find(paths.state), log_max_bytes=log_max_bytes),
            DockerRuntime(paths, sandbox, log_max_bytes=log_max_bytes),
            FirecrackerRuntime(paths, sandbox, log_max_bytes=log_max_bytes),
        )
        thawed = asyncio.run(thaw_everybody(runtimes))
    log.info("everybody_thawed agents=%d %s", len(thawed), " ".join(thawed))
    return 0
