"""An agent's limits through the helper: enforced, told where not, and the end of one that went beyond them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hive.domain import Limits
from hive.host.cgroup import subtree_name
from hive.settings.table import Paths
from tests.sandbox.harness import (
    PYTHON,
    SLEEP,
    A,
    B,
    Daemon,
    HelperProcess,
    OpenHelper,
    alive,
    read_when_written,
    running,
    runtime,
    spec,
)
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="takes root, or a subtree delegated with its controllers"),
]
HOG = """
import ctypes
print("up", flush=True)
ctypes.CDLL(None).mlockall(3)   # swap, where there is some, must not take it
held = [bytearray(1 << 20) for _ in range(256)]
print("has it all", flush=True)
"""


@pytest.fixture
def enforced(paths: Paths, freezer: str) -> None:
    if lacking := runtime(paths, freezer).limits:
        pytest.skip(lacking)


def groups(paths: Paths) -> list[Path]:
    """Those of agent A, in every hierarchy."""
    top, leaf = Path("/sys/fs/cgroup"), Path(subtree_name(paths.state), A)
    return [path for path in (top / leaf, *(hierarchy / leaf for hierarchy in top.iterdir())) if path.exists()]


@pytest.mark.usefixtures("enforced")
async def test_who_takes_too_much_memory_is_killed_told_why_and_nobody_else_is(
    paths: Paths, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """As root, because only root may lock so much memory; the limit is the same for everyone."""
    other = await running(daemon, paths, SLEEP, agent=B)
    hog = spec(paths, A, [PYTHON, "-S", "-c", HOG], limits=Limits(memory_mb=64), uid=None)
    await daemon.client.define(A, hog)
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    assert [(end.agent, end.exit_code) for end in daemon.ended] == [(A, 137)]
    assert paths.log(A).read_text() == (
        "up\nhive: it used more memory than it may (limits.memory_mb = 64); the kernel killed 1 of its processes\n"
    )
    assert "agent_out_of_memory agent=a killed=1 limits.memory_mb = 64" in caplog.text
    assert alive(other)
    assert (await daemon.client.stat())[A].limits == ""
    await daemon.client.start(A)
    await until(lambda: len(daemon.ended) == 2)


@pytest.mark.usefixtures("enforced")
async def test_an_agent_forks_no_further_than_it_may_and_is_frozen_and_stopped_all_the_same(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    bomb = ["sh", "-c", f"{PYTHON} -S -c '{BOMB}'; sleep 1000"]
    await open_helper()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, bomb, limits=Limits(pids=20)))
    await daemon.client.start(A)
    assert await read_when_written(paths.log(A)) == "19"
    await daemon.client.freeze(A, 1)
    truth = (await daemon.client.stat())[A]
    assert (truth.state, truth.processes <= 20) == ("frozen", True)
    await daemon.client.stop(A, grace_s=5)
    await until(lambda: groups(paths) == [])


BOMB = """
import os, time
made = 1
try:
    while made < 100:
        if os.fork() == 0: time.sleep(1000)
        made += 1
except OSError:
    print(made, flush=True)
"""


async def test_the_limit_of_open_files_is_the_agents_own(paths: Paths, daemon: Daemon) -> None:
    await daemon.client.define(A, spec(paths, A, ["sh", "-c", "ulimit -Sn; ulimit -Hn"], limits=Limits(files=77)))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    assert paths.log(A).read_text() == "77\n77\n"


@pytest.mark.usefixtures("enforced")
async def test_limits_outlive_the_helper(
    paths: Paths, helper_process: Callable[..., HelperProcess], connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    limits = Limits(memory_mb=64, pids=20)
    hog = ["sh", "-c", f"while [ ! -e go ]; do sleep 0.01; done; exec {PYTHON} -S -c '{HOG}'"]
    await daemon.client.define(A, spec(paths, A, hog, limits=limits, uid=None))
    await daemon.client.start(A)
    helper.end(9)
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before)
    (paths.home(A) / "go").touch()
    await until(lambda: daemon.ended)
    assert "it used more memory than it may (limits.memory_mb = 64)" in paths.log(A).read_text()
    await until(lambda: groups(paths) == [])


async def test_what_is_not_enforced_is_told_with_the_agent(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.host.limits.mount_of_v1", lambda *_: None)
    monkeypatch.setattr("hive.host.limits._enable", lambda _: [])
    await open_helper()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP, limits=Limits(cpu=0.5)))
    await daemon.client.start(A)
    assert (await daemon.client.stat())[A].limits.startswith("cpu is not enforced")
    await running(daemon, paths, SLEEP, agent=B)
    assert (await daemon.client.stat())[B].limits == ""
