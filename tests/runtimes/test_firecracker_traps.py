"""The traps of sleeping machines, by their numbers (the state of the art's bugs: threads named beside each).

On a fake that stops its whole event loop as the real one does; `HIVE_FIRECRACKER` runs on a real one what needs no
fault. 1 to 5, 7 to 9, 11, 12, 22, 24 and 25 are the daemon's and the proxy's; 14 is Docker's, 15 systemd's, 17 is
tests/runtimes/test_pageout.py, but for what only a machine has.
"""

# ruff: noqa: ASYNC220 - a helper that is to be killed is started the simple way
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hive.errors import HiveError, NotSupported, TimedOut, WrongState
from hive.host.process import ProcessTable
from hive.runtimes import vmm
from hive.runtimes.machine import RunningMachine
from hive.runtimes.machine_dir import MachineDir
from hive.sandbox.server import make_directories
from hive.settings.table import Paths
from tests.runtimes.bench_firecracker import MARK, FirecrackerBench, open_bench, open_direct
from tests.sandbox.harness import A, B
from tests.waiting import until


@pytest.fixture(
    params=[
        pytest.param(
            open_bench,
            id="jailed",
            marks=[pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a jailer needs root")],
        ),
        pytest.param(open_direct, id="direct"),
    ]
)
async def bench(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[FirecrackerBench]:
    async with request.param(paths) as opened:
        yield opened


async def freeze(running: RunningMachine, *, deadline_s: float = 5) -> None:
    await running.freeze(deadline_s=deadline_s, give_up=lambda: False)


def ticks(bench: FirecrackerBench, agent: str = A) -> int:
    """The guest's own lines: its VMM writes on the console too."""
    return bench.console(agent).count("tick ")


async def moves_on(bench: FirecrackerBench, agent: str = A) -> None:
    """A line of the guest that was not there before: guest and devices run."""
    before = ticks(bench, agent)
    await until(lambda: ticks(bench, agent) > before)


async def stands_still(bench: FirecrackerBench, agent: str = A) -> bool:
    await asyncio.sleep(0.1)  # what it said is on its way to the log
    before = ticks(bench, agent)
    await asyncio.sleep(0.1)
    return ticks(bench, agent) == before


def has_huge_pages() -> bool:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return free.exists() and int(free.read_text()) > 0


class Call:
    """The proxy's part: a connection through `CONNECT <port>`, whose answer comes once the devices work."""

    def __init__(self, running: RunningMachine) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.connect(str(running._place.vsock))
        self.sock.send(b"CONNECT %d\n" % int(running.address.rpartition(":")[2]))

    async def hears(self, *, within_s: float = 10) -> bytes:
        """Empty where nothing comes in that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        return b""

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


# --- 6: a failed or timed-out pause leaves it frozen (firecracker api_server_adapter.rs) ----------------------------


async def test_trap_6_after_a_pause_that_failed_the_devices_work_again(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "echo 7000", port=7000)
    await until(lambda: "echo" in bench.console(A))
    fault = bench.programs.fault("pause-fails")
    with Call(running) as call:
        assert (await call.hears()).startswith(b"OK ")
        with pytest.raises(HiveError, match="Failed to message the vCPUs"):
            await freeze(running)
        fault.unlink()
        await running.thaw(deadline_s=5)
        call.sock.send(b"hello")
        assert await call.hears() == b"hello"
    assert not running.is_frozen()
    assert not running.is_half_frozen()


async def test_trap_6_a_pause_that_lands_after_its_deadline_is_undone(bench: FirecrackerBench) -> None:
    """Nobody asks for a thaw by then: the caller was told that it failed, and has gone."""
    running = await bench.start(A, "ticks")
    bench.programs.fault("pause-hangs", "1.2")
    with pytest.raises(TimedOut):
        await freeze(running, deadline_s=0.05)
    with pytest.raises(TimedOut):
        await running.thaw(deadline_s=0.1)
    await until(running.thaw_now)
    assert running.stat(ProcessTable()).state == "running"
    await moves_on(bench)


async def test_trap_6_a_caller_that_goes_away_in_the_middle_leaves_it_awake(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "ticks")
    bench.programs.fault("pause-hangs", "0.2")
    freezing = asyncio.ensure_future(freeze(running))
    await asyncio.sleep(0.05)
    freezing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await freezing
    await running.thaw(deadline_s=5)
    assert not running.is_frozen()
    await moves_on(bench)


async def test_trap_6_a_resume_that_fails_is_tried_until_it_does_not(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "ticks")
    await freeze(running)
    fault = bench.programs.fault("resume-fails")
    with pytest.raises(TimedOut):
        await running.thaw(deadline_s=0.1)
    assert running.is_frozen()
    fault.unlink()
    await until(running.thaw_now)
    await moves_on(bench)


async def test_trap_6_a_wake_in_the_middle_of_a_pause_wins(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "ticks")
    bench.programs.fault("pause-hangs", "0.2")
    woken = False
    freezing = asyncio.ensure_future(running.freeze(deadline_s=5, give_up=lambda: woken))
    await asyncio.sleep(0.05)
    woken = True
    running.thaw_now()
    with pytest.raises(WrongState):
        await freezing
    await running.thaw(deadline_s=5)
    assert not running.is_frozen()
    await moves_on(bench)


async def test_trap_6_a_pause_that_waits_for_an_earlier_resume_comes_after_it(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "ticks")
    await freeze(running)
    bench.programs.fault("resume-hangs", "0.2")
    assert not running.thaw_now()
    await freeze(running)
    assert running.is_frozen()
    assert await stands_still(bench)


# --- 10: the host or Hive crashes, agents are frozen for ever, sockets are stale -----------------------------------


async def test_trap_10_a_machine_whose_pause_failed_while_its_helper_died_is_resumed_by_the_next(
    bench: FirecrackerBench,
) -> None:
    """It says that it runs, and its devices stand still."""
    first = await bench.start(A, "echo 7000", port=7000)
    await until(lambda: "echo" in bench.console(A))
    spec = bench.spec(A, "echo 7000", port=7000)
    fault = bench.programs.fault("pause-fails")
    with contextlib.suppress(HiveError):
        await vmm.Vmm(bench.top(A) / "root/run/api.sock", pid=first.run.main.pid).call(vmm.PAUSE)
    fault.unlink()
    first.close()
    with Call(first) as call:
        assert await call.hears(within_s=0.1) == b""
        second = bench.hold(await bench.new_runtime().adopt(A, spec, first.run, mark=MARK))
        assert not second.is_frozen()
        assert second.is_half_frozen()
        await second.thaw(deadline_s=5)
        assert (await call.hears()).startswith(b"OK ")
    assert not second.is_half_frozen()


async def test_trap_10_one_that_sleeps_is_taken_over_asleep(bench: FirecrackerBench) -> None:
    first = await bench.start(A, "ticks")
    await freeze(first)
    first.close()
    second = bench.hold(await bench.new_runtime().adopt(A, bench.spec(A, "ticks"), first.run, mark=MARK))
    assert second.is_frozen()
    assert not second.is_half_frozen()
    assert await stands_still(bench)
    await second.thaw(deadline_s=5)
    await moves_on(bench)


async def test_trap_10_sleepers_of_a_lost_table_are_woken_and_other_hives_are_left_alone(
    bench: FirecrackerBench,
) -> None:
    stray, known = await bench.start(A, "ticks"), await bench.start(B, "ticks")
    await freeze(stray)
    await freeze(known)
    other = bench.new_runtime()
    other._paths = Paths(state=bench.paths.state.parent, runtime=bench.paths.runtime)
    if bench.jailed:
        assert await other.thaw_strays(set()) == []
    assert await bench.new_runtime().thaw_strays({B}) == [A]
    await moves_on(bench, A)
    assert await stands_still(bench, B)


async def test_trap_10_stale_sockets_are_not_in_the_way_of_the_next_start(bench: FirecrackerBench) -> None:
    first = await bench.start(A, "idle")
    os.kill(first.run.main.pid, signal.SIGKILL)
    await until(lambda: not first._group.pids())
    await first.reap()
    first.close()
    run = bench.top(A) / "root" / "run"
    assert (run / "api.sock").exists()
    assert (run / "v.sock").exists()
    second = await bench.start(A, "idle")
    assert second.stat(ProcessTable()).state == "running"


STARTER = """
import asyncio, sys
from pathlib import Path
import msgspec
from hive.link.specs import SandboxSpec
from hive.runtimes.firecracker import FirecrackerRuntime
from hive.settings.table import Paths, Sandbox
state, runtime, firecracker, jailer, base, kvm, agent, mark, spec = sys.argv[1:]
settings = Sandbox(firecracker=firecracker, jailer=jailer, chroot_base=base)
machines = FirecrackerRuntime(Paths(Path(state), Path(runtime)), settings, log_max_bytes=65536, kvm=Path(kvm))
asyncio.run(machines.start(agent, msgspec.json.decode(spec, type=SandboxSpec), mark=mark))
"""


@pytest.mark.parametrize(
    ("fault", "text"), [("api-late", "0.3"), ("freezes-at-boot", "")], ids=["not started", "does not answer"]
)
async def test_trap_10_a_machine_whose_helper_was_killed_at_its_start_does_not_live_on(
    bench: FirecrackerBench, fault: str, text: str
) -> None:
    """Between the fork and the answer to InstanceStart; nothing was written down of it."""
    bench.programs.fault(fault, text)
    spec, its = bench.spec(A, "idle"), bench.settings
    await bench.runtime.prepare(A, spec)
    bench.bind(A, spec)
    where = [str(bench.paths.state), str(bench.paths.runtime), its.firecracker, its.jailer, its.chroot_base]
    arguments = [*where, str(bench.programs.kvm), A, MARK, msgspec.json.encode(spec).decode()]
    helper = subprocess.Popen([sys.executable, "-c", STARTER, *arguments])
    directory = MachineDir(bench.top(A), jailed=bench.jailed)
    try:
        await until(lambda: directory.residents(ProcessTable()))
        if fault == "freezes-at-boot":
            await until(directory.vsock.exists)
    finally:
        helper.kill()
        helper.wait()
    next_one = bench.new_runtime()
    if fault == "api-late":
        await until(directory.api.exists)
    assert await next_one.find(A, spec, ProcessTable(), mark=MARK) is None
    assert directory.residents(ProcessTable()) == []


# --- 13: what is said to a sleeping machine is lost without a word --------------------------------------------------


async def test_trap_13_a_machine_is_stopped_while_it_boots(bench: FirecrackerBench) -> None:
    """Ctrl-Alt-Del was sent once, before the keyboard's driver was up; the VMM says 204, and nothing happens. So a
    stop in a guest's first second waited its whole grace, and then killed it (seen, 1.15.1)."""
    slowly = bench.programs.fault("boots-slowly", "0.5")
    running = await bench.start(A, "idle")
    slowly.unlink()
    assert await running.stop(grace_s=30)
    assert await running.reap() == 0  # its last words are in the log then
    assert "Restarting system" in bench.console(A)


@pytest.mark.parametrize("asleep", [False, True])
async def test_trap_13_a_sleeping_machine_is_woken_to_hear_that_it_is_to_end(
    bench: FirecrackerBench, asleep: bool
) -> None:
    """Firecracker answers 204 to SendCtrlAltDel, and nothing happens (docs/api_requests/actions.md)."""
    running = await bench.start(A, "idle")
    if asleep:
        await freeze(running)
    assert await running.stop(grace_s=30)
    assert await running.reap() == 0  # its last words are in the log then
    assert "Restarting system" in bench.console(A)


async def test_trap_13_one_that_cannot_be_woken_is_killed(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "idle")
    await freeze(running)
    bench.programs.fault("resume-fails")
    assert await running.stop(grace_s=0.2)
    assert await running.reap() == 128 + signal.SIGKILL
    assert "Restarting system" not in bench.console(A)


# --- 16: what does not freeze in time ---------------------------------------------------------------------------------


async def test_trap_16_a_machine_that_does_not_pause_in_time_stays_awake(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "ticks")
    bench.programs.fault("pause-hangs", "0.4").with_name("pause-fails").touch()
    with pytest.raises(TimedOut):
        await freeze(running, deadline_s=0.05)
    await until(running.thaw_now)
    assert not running.is_frozen()
    await moves_on(bench)


# --- 17: huge pages cannot be swapped out ----------------------------------------------------------------------------


async def test_trap_17_a_machine_with_huge_pages_does_not_sleep_deep(
    bench: FirecrackerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bench.programs.is_real and not has_huge_pages():
        pytest.skip("this host has no free huge pages of 2 MiB")
    huge = vmm._put("/machine-config", vcpu_count=1, mem_size_mib=32, huge_pages="2M")
    monkeypatch.setattr(vmm, "machine", lambda vcpus, memory_mb: huge)
    running = await bench.start(A, "idle")
    await freeze(running)
    with pytest.raises(NotSupported, match=r"huge pages \(2M\)"):
        await running.page_out(give_up=lambda: False)
    assert running.is_frozen()


# --- 18, 19, 20: hibernation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trap",
    [
        "18: a diff snapshot misses what is in swap",
        "19: a snapshot is loaded twice, or the disk has moved on",
        "20: a wake waits while a snapshot is written",
    ],
)
def test_traps_of_hibernation(trap: str) -> None:
    calls = [vmm.snapshot_create("s", "m"), vmm.snapshot_load("s", "m")]
    assert calls
    pytest.skip(f"{trap}: Hive does not hibernate yet, no real VMM has run it; nothing calls {calls}")


# --- 21: that a socket connects says nothing --------------------------------------------------------------------------


async def test_trap_21_a_vmm_that_is_stopped_is_not_believed_to_run(bench: FirecrackerBench) -> None:
    """Its kernel accepts connections for it."""
    first = await bench.start(A, "ticks")
    spec = bench.spec(A, "ticks")
    os.kill(first.run.main.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimedOut):
            await freeze(first, deadline_s=0.1)
        first.close()
        second = bench.hold(await bench.new_runtime().adopt(A, spec, first.run, mark=MARK))
        assert not second.is_frozen()
        assert second.is_half_frozen()
        with pytest.raises(TimedOut):
            await second.thaw(deadline_s=0.1)
    finally:
        os.kill(first.run.main.pid, signal.SIGCONT)
    await until(second.thaw_now)
    await moves_on(bench)


async def test_trap_21_what_a_stranger_did_is_noticed(bench: FirecrackerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.runtimes.machine.REFRESH_S", 0.0)
    running = await bench.start(A, "ticks")
    stranger = vmm.Vmm(bench.top(A) / "root/run/api.sock", pid=running.run.main.pid)
    await stranger.call(vmm.PAUSE)
    await until(lambda: running.stat(ProcessTable()).state == "frozen")
    assert not running.thaw_now()
    await running.thaw(deadline_s=5)
    await moves_on(bench)


# --- 23: a full backlog hangs the VMM and its API (firecracker PR 5995) -----------------------------------------------


async def test_trap_23_guests_that_call_and_call_do_not_hang_their_vmm(bench: FirecrackerBench) -> None:
    """Nobody accepts: the proxy is away, or has its hands full."""
    running = await bench.start(A, "flood 300\nticks")
    await until(lambda: "flood 300" in bench.console(A))
    await freeze(running)
    assert running.is_frozen()
    await running.thaw(deadline_s=5)
    await moves_on(bench)


# --- the versions that lose vsock -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.16.0", "1.16.1"])
async def test_a_version_that_loses_vsock_at_a_pause_is_never_paused_nor_resumed(paths: Paths, version: str) -> None:
    make_directories(paths)
    bench = FirecrackerBench(paths, jailed=False, version=version)
    try:
        capabilities = await bench.runtime.capabilities()
        assert capabilities.why_not == ""
        assert version in capabilities.why_not_freeze
        running = await bench.start(A, "echo 7000", port=7000)
        await until(lambda: "echo" in bench.console(A))
        with pytest.raises(NotSupported, match=f"{version} loses vsock .* use 1.15.1, or 1.17; the agent stays awake"):
            await freeze(running)
        assert running.thaw_now()
        running.close()
        second = bench.hold(
            await bench.new_runtime().adopt(A, bench.spec(A, "echo 7000", port=7000), running.run, mark=MARK)
        )
        assert not second.is_half_frozen()
        await second.thaw(deadline_s=5)
        with Call(second) as call:
            assert (await call.hears()).startswith(b"OK ")
            call.sock.send(b"hello")
            assert await call.hears() == b"hello"
    finally:
        await bench.close()
