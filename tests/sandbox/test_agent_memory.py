"""The RAM that is shown of an agent, with real processes, control groups and swap: a shared page counts once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hive.domain import Limits
from hive.host.charge import read_charge, read_pss
from hive.link.helper import Stat
from hive.sandbox import agent_memory
from hive.settings.table import Paths
from tests.sandbox import heavy
from tests.sandbox.harness import PYTHON, A, Daemon, running, spec
from tests.sandbox.heavy import MIB
from tests.swapspace import file_swap, zram_swap
from tests.waiting import until

FAMILY = """
import os, sys, time
held = os.urandom(48 << 20)
children = [pid for _ in range(3) if (pid := os.fork())] if os.getpid() else []
print("up", flush=True)
time.sleep(1000)
"""
"""One process and those it forks, all with the same 48 MiB: 8 processes."""


async def family(daemon: Daemon, paths: Paths, limits: Limits) -> Stat:
    await daemon.client.define(A, spec(paths, A, [PYTHON, "-S", "-c", FAMILY], limits=limits))
    await daemon.client.start(A)
    await until(lambda: paths.log(A).read_text().count("up\n") == 8)
    return (await daemon.client.stat([A], pss=True))[A]


@pytest.mark.root
@pytest.mark.parametrize("memory_mb", [512, None], ids=["cgroup", "pss"])
async def test_pages_that_its_processes_share_count_once(paths: Paths, daemon: Daemon, memory_mb: int | None) -> None:
    """A sum of RSS says eight times 48 MiB."""
    found = await family(daemon, paths, Limits(memory_mb=memory_mb))
    if memory_mb is not None and found.held_from != agent_memory.CGROUP:
        pytest.skip(f"no memory controller here: {found.limits}")
    assert found.held_bytes is not None
    assert found.pss_bytes is not None
    assert found.processes == 8
    assert found.rss_bytes > 8 * 48 * MIB
    assert 48 * MIB < found.held_bytes < 120 * MIB
    assert 48 * MIB < found.pss_bytes < 120 * MIB


@pytest.mark.root
async def test_a_pss_is_told_with_its_age_and_taken_anew_once_it_is_old(
    paths: Paths, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running(daemon, paths, heavy.command(16))
    await until(lambda: paths.log(A).read_text().count("\n") == 1)
    first = (await daemon.client.stat([A]))[A]
    if first.held_from == agent_memory.CGROUP:
        pytest.skip("every agent has a memory controller here")
    assert first.held_from == agent_memory.PSS
    assert first.held_at is not None
    assert abs(time.time() - first.held_at) < 60
    assert (await daemon.client.stat([A]))[A].held_at == first.held_at
    monkeypatch.setattr(agent_memory, "FRESH_S", 0.0)
    again = (await daemon.client.stat([A]))[A]
    assert again.held_at is not None
    assert again.held_at > first.held_at


@pytest.mark.root
async def test_a_sleeper_is_measured_once_in_its_sleep(
    paths: Paths, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running(daemon, paths, heavy.command(16))
    await until(lambda: paths.log(A).read_text().count("\n") == 1)
    monkeypatch.setattr(agent_memory, "FRESH_S", 0.0)
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    first, second = [(await daemon.client.stat([A]))[A] for _ in range(2)]
    if first.held_from == agent_memory.CGROUP:
        pytest.skip("every agent has a memory controller here")
    assert first.held_at is not None
    assert second.held_at == first.held_at
    await daemon.client.thaw(A)
    third = (await daemon.client.stat([A]))[A]
    assert third.held_at is not None
    assert third.held_at > first.held_at


@pytest.mark.root
@pytest.mark.parametrize("swap", [zram_swap, file_swap], ids=["zram", "file"])
@pytest.mark.parametrize("memory_mb", [256, None], ids=["cgroup", "pss"])
async def test_what_is_kept_after_a_page_out_counts_the_swap_cache(
    paths: Paths, daemon: Daemon, swap: Callable[[int], AbstractContextManager[str]], memory_mb: int | None
) -> None:
    """A page-out to a swap file writes everything and frees nothing: RSS and PSS fall, and the RAM is taken still."""
    with swap(192):
        command = heavy.command(64)
        await daemon.client.define(A, spec(paths, A, command, limits=Limits(memory_mb=memory_mb)))
        await daemon.client.start(A)
        await until(lambda: paths.log(A).read_text().count("\n") == 1)
        awake = (await daemon.client.stat([A], pss=True))[A]
        if memory_mb is not None and awake.held_from != agent_memory.CGROUP:
            pytest.skip(f"no memory controller here: {awake.limits}")
        assert awake.held_bytes is not None
        paged = await heavy.paged_out_keeping(daemon, 0 if swap is zram_swap else 0.8 * awake.held_bytes)
        asleep = (await daemon.client.stat([A]))[A]
        assert asleep.pss_bytes is not None
        assert paged.swap_bytes > 64 * MIB
        assert asleep.pss_bytes < 0.3 * awake.held_bytes
        if swap is zram_swap:
            assert paged.kept_bytes < 0.3 * awake.held_bytes
        else:
            assert paged.kept_bytes > 0.8 * awake.held_bytes
        if memory_mb is not None:
            assert asleep.held_bytes is not None
            assert abs(asleep.held_bytes - paged.kept_bytes) < 4 * MIB
            assert asleep.swap_cached_bytes is not None
            assert (asleep.swap_cached_bytes > 48 * MIB) is (swap is file_swap)
        await asyncio.wait_for(daemon.client.thaw(A), 10)


def test_what_is_no_group_and_no_process_is_not_known(tmp_path: Path) -> None:
    assert read_charge(tmp_path) is None
    assert read_pss([]) is None
    assert read_pss([2**22 + 1]) is None
