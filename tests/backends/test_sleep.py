"""Sleep of a server: how it is started, and the conversations, with a process that has vLLM's routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hive.backends.backend import open_backend
from hive.backends.entries import ModelEntry
from hive.backends.entry_launch import launch_entry
from hive.errors import BackendTimeout, NotFound, NotSupported
from hive.pool.state import MIB
from hive.settings.pool import ModelRow
from hive.settings.table import InferenceSection
from tests.fakes.raw_vmm import listens
from tests.pooling.sleep_world import SERVER, model_directory
from tests.waiting import until

Start = Callable[..., Awaitable[Path]]
DEV, SLEEP = {"VLLM_SERVER_DEV_MODE": "1"}, "--enable-sleep-mode"


@pytest.fixture
def start(tmp_path: Path, short_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str], environment: dict[str, str]) -> None:
        children.append(subprocess.Popen(command, env=environment))

    async def started(*flags: str, environment: dict[str, str] = DEV) -> Path:
        socket = short_path / "v.sock"
        words = ["serve", str(model_directory(tmp_path / "m", 20)), "--served-model-name", "m", "--uds", str(socket)]
        command = [sys.executable, str(SERVER), *words, "--kv-cache-memory-bytes", str(50 * MIB), *flags]
        begin(command, {**os.environ, **environment})
        await until(lambda: listens(socket))
        return socket

    yield started
    for child in children:
        child.kill()
        child.wait()


def held(socket: Path) -> tuple[int, int]:
    """MiB of GPU and host."""
    told = json.loads(Path(f"{socket}.held").read_text())
    return told["gpu"] // MIB, told["host"] // MIB


def fault(socket: Path, name: str) -> None:
    Path(f"{socket}.fault").write_text(name)


async def test_it_falls_asleep_says_so_and_wakes_from_either_level(start: Start) -> None:
    socket = await start(SLEEP)
    control = open_backend("vllm", str(socket))
    awake = held(socket)
    assert (await control.asleep(), awake) == ("", (78, 4))
    for level, asleep in (("1", (8, 24)), ("2", (8, 4))):
        await control.fall_asleep(level, within_s=20)
        assert (await control.asleep(), held(socket)) == (level, asleep)
        assert await control.health(), "which is why it says nothing"
        await control.wake(level, within_s=20)
        assert (await control.asleep(), held(socket)) == ("", awake)


async def test_one_whose_level_is_not_known_wakes_whole_as_from_the_deepest(start: Start) -> None:
    socket = await start(SLEEP)
    control = open_backend("vllm", str(socket))
    await control.fall_asleep("1", within_s=20)
    await control.wake("2", within_s=20)
    assert (await control.asleep(), held(socket)) == ("", (78, 4))


async def test_a_server_that_was_started_without_it_cannot_sleep(start: Start) -> None:
    control = open_backend("vllm", str(await start(environment={})))
    assert await control.asleep() is None
    with pytest.raises(NotFound, match="Not Found"):
        await control.fall_asleep("1", within_s=20)


async def test_one_that_hangs_is_given_up(start: Start) -> None:
    socket = await start(SLEEP)
    fault(socket, "hangs_in_sleep")
    with pytest.raises(BackendTimeout, match=r"has not fallen asleep within 0\.3 s"):
        await open_backend("vllm", str(socket)).fall_asleep("1", within_s=0.3)


async def test_a_kind_without_sleep_is_asked_nothing() -> None:
    control = open_backend("llama", "/nowhere.sock")
    assert await control.asleep() is None
    with pytest.raises(NotSupported, match="llama-server has no sleep"):
        await control.wake("1", within_s=1)


@pytest.mark.parametrize(
    ("accounts", "may_sleep", "sleeps"),
    [({"GPU-1": 900}, True, True), ({"GPU-1": 900}, False, False), ({"cpu": 900}, True, False)],
)
def test_it_is_started_with_sleep_on_gpus_only_and_only_if_it_may(
    accounts: dict[str, int], may_sleep: bool, sleeps: bool
) -> None:
    entry = ModelEntry(id="q-1", name="q", kind="vllm", path=Path("/m/q"), row=ModelRow(backend="vllm", file="/m/q"))
    made = launch_entry(
        entry, accounts, 0, InferenceSection(), {}, socket=Path("/r"), state=Path("/s"), may_sleep=may_sleep
    )
    assert (SLEEP in made.command, made.environment.get("VLLM_SERVER_DEV_MODE") == "1") == (sleeps, sleeps)
