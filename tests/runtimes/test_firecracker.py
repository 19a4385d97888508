"""Machines from their definition to their removal, over the runtime and over a helper's link; the traps of sleeping
ones are in test_firecracker_traps.py."""

# ruff: noqa: ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from hive.domain import Limits, RuntimeKind
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, NotSupported, TimedOut, WrongState
from hive.host.process import ProcessTable
from hive.link.client import LinkClient
from hive.link.helper import AskListeners, Listener, dialled
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Done, Hello
from hive.link.specs import SandboxSpec
from hive.runtimes import vmm
from hive.runtimes.machine_dir import MachineDir
from hive.runtimes.runtime import NO_EXEC
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.fakes.firecracker_programs import make_programs
from tests.runtimes.bench_firecracker import MARK, FirecrackerBench, open_bench, open_direct
from tests.sandbox.harness import A, B, Daemon, uid_of
from tests.waiting import until

ROOT = os.geteuid() == 0
NEEDS_ROOT = [pytest.mark.root, pytest.mark.skipif(not ROOT, reason="a jailer needs root")]
Connect = Callable[..., Awaitable[Daemon]]


@pytest.fixture(
    params=[pytest.param(open_bench, id="jailed", marks=NEEDS_ROOT), pytest.param(open_direct, id="direct")]
)
async def bench(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[FirecrackerBench]:
    async with request.param(paths) as opened:
        yield opened


@pytest.fixture
async def jailed(paths: Paths) -> AsyncIterator[FirecrackerBench]:
    if not ROOT:
        pytest.skip("a jailer needs root")
    async with open_bench(paths) as opened:
        yield opened


def everything_under(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


async def prepared(bench: FirecrackerBench, spec: SandboxSpec, agent: str = A) -> SandboxSpec:
    await bench.runtime.prepare(agent, spec)
    bench.bind(agent, spec)
    return spec


def called_at(bench: FirecrackerBench) -> str:
    """The way to the port of a guest: as root by the helper, for the VMM is another user's."""
    return dialled(A, 8080) if ROOT else f"vsock:{bench.top(A)}/root/run/v.sock:8080"


# --- started -----------------------------------------------------------------------------------------------------


async def test_a_machine_runs_and_says_how_it_is_reached(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "http 8080", port=8080)
    assert running.address == called_at(bench)
    truth = running.stat(ProcessTable())
    assert (truth.state, truth.freezer, truth.address) == ("running", "firecracker", running.address)
    assert truth.rss_bytes > 0
    await until(lambda: "http" in bench.console(A))
    reader, writer = await asyncio.open_unix_connection(bench.top(A) / "root/run/v.sock")
    writer.write(b"CONNECT 8080\n")
    assert (await reader.readline()).startswith(b"OK ")
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert b"answer 1" in await reader.readuntil(b"answer 1\n")
    writer.close()


async def test_without_a_port_it_has_no_address(bench: FirecrackerBench) -> None:
    assert (await bench.start(A, "idle")).address == ""


async def test_a_guest_reaches_the_agents_own_socket(bench: FirecrackerBench) -> None:
    spec = await prepared(bench, bench.spec(A, "client"))
    bench.hold(await bench.runtime.start(A, spec, mark=MARK))
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthis is hive")
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=bench._socks[0])
    await until(lambda: "hive said HTTP/1.1 200 OK this is hive" in bench.console(A))
    server.close()
    assert asked[0].startswith(b"GET /api/version HTTP/1.1\r\n")


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_machine_has_a_disk_of_its_own_unless_it_may_only_read(
    bench: FirecrackerBench, read_only: bool
) -> None:
    spec = bench.spec(A, "idle")
    assert spec.firecracker is not None
    machine = msgspec.structs.replace(spec.firecracker, rootfs_read_only=read_only)
    running = await bench.start(A, "idle", firecracker=machine)
    names = {path.name for path in (bench.top(A) / "root").iterdir()}
    assert ("rootfs" if read_only else "disk") in names
    assert ("disk" if read_only else "rootfs") not in names
    if not read_only and not bench.programs.is_real:  # a real disk is no text to be written over
        (bench.top(A) / "root" / "disk").write_text("ticks\n")  # as its guest would
        assert await running.kill()
        await running.reap()
        running.close()
        await bench.start(A, "idle", firecracker=machine)
        await until(lambda: "tick" in bench.console(A))


async def test_an_initrd_is_beside_the_kernel_and_named_to_the_vmm(bench: FirecrackerBench) -> None:
    """Debian's kernels have the drivers of a machine's disk as modules: without an initrd none of them boots."""
    spec = bench.spec(A, "idle")
    assert spec.firecracker is not None
    initrd = bench.programs.kernel.with_name("initrd")
    if not bench.programs.is_real:
        initrd.write_text("drivers\n")
    elif not initrd.exists():
        pytest.skip(f"no initrd at {initrd}")
    running = await bench.start(A, "idle", firecracker=msgspec.structs.replace(spec.firecracker, initrd=str(initrd)))
    assert (bench.top(A) / "root" / "initrd").read_bytes() == initrd.read_bytes()
    said = await running._api.call(vmm.VmmCall("GET", "/vm/config"))
    assert msgspec.json.decode(said)["boot-source"]["initrd_path"] == ("/initrd" if bench.jailed else "initrd")


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="only root gives a VMM another uid")
async def test_a_machine_without_a_jailer_is_given_the_group_of_kvm(paths: Paths) -> None:
    """/dev/kvm was looked at as root, and then the VMM, under its agent's uid, was not permitted to open it."""
    kvm = paths.state.parent / "kvm"
    kvm.touch()
    async with open_direct(paths) as bench:
        bench.runtime = bench.new_runtime(kvm=kvm)
        kvm.chmod(0o600)
        with pytest.raises(NotPermitted, match=rf"{kvm} may not be opened by uid {uid_of(A)}") as refused:
            await bench.start(A, "idle")
        assert "chgrp kvm" in refused.value.hint
        os.chown(kvm, 0, 4711)
        kvm.chmod(0o660)
        running = await bench.start(B, "idle")
        assert "Groups:\t4711 " in Path(f"/proc/{running.run.main.pid}/status").read_text()


async def test_a_vmm_that_is_too_old_is_said_to_be(paths: Paths) -> None:
    """1.13 refused the balloon of every default agent, in words that named no version."""
    async with open_direct(paths) as bench:
        old = make_programs(paths.state.parent / "old", version="1.13.1")
        lacking = bench.new_runtime(firecracker=str(old.firecracker))
        assert (await lacking.capabilities()).why_not == "Firecracker 1.13.1 is too old: Hive needs 1.14.0 or newer"


async def test_looks_at_a_machine_leave_no_line_in_its_log(bench: FirecrackerBench) -> None:
    """The VMM wrote a line for every look, 2 MB a day; cutting the log back then cost the guest's own lines."""
    running = await bench.start(A, "idle")
    for _ in range(20):
        await running._api.ask()
    assert "API server" not in bench.console(A)


async def test_what_the_guest_prints_is_in_the_log_which_is_cut_back(bench: FirecrackerBench) -> None:
    await bench.start(A, "ticks")
    await until(lambda: "tick 3\n" in bench.console(A))
    assert stat.S_IMODE(bench.paths.log(A).stat().st_mode) == 0o600
    with bench.paths.log(A).open("ab") as log:  # the writer of the ticks alone cuts it back
        log.write(b"said before\n" * (65536 // 12))
    await until(lambda: bench.paths.log(A).stat().st_size < 40_000)
    await until(lambda: bench.console(A).count("tick") > 5)
    assert bench.console(A).startswith("said before\n")
    short = bench.new_runtime()
    short._log_max_bytes = 50
    short.trim_log(bench.spec(A, "ticks"))  # its writer cuts it, not the helper
    assert len(bench.console(A)) > 50


async def test_a_guests_own_end_is_the_machines(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "exit7")
    await until(lambda: select.select([running.ended_fd], [], [], 0)[0])
    assert await running.kill()
    assert await running.reap() == 0
    assert "Kernel panic" in bench.console(A)


async def test_a_jailed_machine_is_where_the_jailer_puts_it_and_its_users(jailed: FirecrackerBench) -> None:
    running = await jailed.start(A, "idle")
    uid = uid_of(A)
    root = jailed.jails / "firecracker" / A / "root"
    assert root.stat().st_uid == uid
    assert f"Uid:\t{uid}\t" in Path(f"/proc/{running.run.main.pid}/status").read_text()
    assert Path(f"/proc/{running.run.main.pid}/environ").read_bytes() == b""
    listener = (root / "run" / "v.sock_11434").lstat()
    assert (stat.S_ISSOCK(listener.st_mode), stat.S_IMODE(listener.st_mode), listener.st_uid) == (True, 0o600, uid)
    assert (root.parent.stat().st_uid, stat.S_IMODE(root.parent.stat().st_mode)) == (0, 0o711)


async def test_a_vmm_under_another_name_is_jailed_in_the_same_place(jailed: FirecrackerBench) -> None:
    """The jailer would name the jails after what the link leads to; an update would then lose the machines' disks."""
    program = jailed.programs.firecracker
    for version in ("v1.15.0", "v1.15.1"):
        content = program.read_bytes()
        program.unlink()
        real = program.with_name(f"firecracker-{version}")
        real.write_bytes(content + f"# {version}\n".encode())
        real.chmod(0o755)
        program.symlink_to(real)
        running = await jailed.start(A, "idle")
        assert (jailed.jails / "firecracker" / A / "root" / "firecracker").read_bytes() == real.read_bytes()
        assert await running.kill()
        await running.reap()
        running.close()


async def test_open_files_are_limited_in_the_jail_too(jailed: FirecrackerBench) -> None:
    running = await jailed.start(A, "idle", limits=Limits(files=300))
    limits = Path(f"/proc/{running.run.main.pid}/limits").read_text()
    assert "Max open files            300 " in limits


# --- what does not start, and leaves nothing ------------------------------------------------------------------------


async def test_a_machine_that_is_not_described_is_refused(bench: FirecrackerBench) -> None:
    spec = bench.spec(A, "idle")
    machine = spec.firecracker
    assert machine is not None
    wrong: list[tuple[type[HiveError], str, dict[str, object]]] = [
        (BadRequest, "firecracker: missing", {"firecracker": None}),
        (BadRequest, "what its image says", {"command": ["true"]}),
        (BadRequest, "the log of", {"log": "/etc/passwd"}),
        (NotFound, "no kernel at /nowhere", {"firecracker": msgspec.structs.replace(machine, kernel="/nowhere")}),
        (
            NotFound,
            "no root file system at /nowhere",
            {"firecracker": msgspec.structs.replace(machine, rootfs="/nowhere")},
        ),
        (NotFound, "no kernel at /dev", {"firecracker": msgspec.structs.replace(machine, kernel="/dev")}),
        (BadRequest, "the guest alone has 32 MiB", {"limits": Limits(memory_mb=32)}),
        (
            NotSupported,
            "egress",
            {"egress": [], "firecracker": msgspec.structs.replace(machine, tap="tap0")},
        ),
        (NotPermitted, "never as uid 0", {"uid": 0}),
        (NotPermitted, "a user of its own", {"uid": os.geteuid()}),
    ]
    if bench.jailed:
        wrong.append((BadRequest, "needs a uid", {"uid": None}))
    for error, said, fields in wrong:
        with pytest.raises(error, match=said):
            await bench.runtime.prepare(A, msgspec.structs.replace(spec, **fields))
        assert not bench.top(A).exists()


async def test_a_path_that_is_too_long_to_be_called_is_refused_where_the_proxy_is_to_call_it(
    bench: FirecrackerBench,
) -> None:
    deep = bench.paths.state / ("d" * 100)
    deep.mkdir(mode=0o711)
    (deep / "logs").mkdir()
    runtime = bench.new_runtime(chroot_base=str(deep))
    if not bench.jailed:
        runtime._paths = Paths(state=deep, runtime=bench.paths.runtime)
    spec = bench.spec(A, "idle", log=str(runtime._paths.log(A)))
    with pytest.raises(BadRequest, match="more than 107 bytes") if spec.uid is None else contextlib.nullcontext():
        await runtime.prepare(A, msgspec.structs.replace(spec, port=80))
    bench.runtime = runtime
    bench.hold(await runtime.start(A, await prepared(bench, spec), mark=MARK))


@pytest.mark.parametrize("what", ["firecracker", "jailer", "chroot_base", "kvm"])
async def test_what_this_host_lacks_is_said_and_nothing_is_started(bench: FirecrackerBench, what: str) -> None:
    if not bench.jailed and what in ("jailer", "chroot_base"):
        pytest.skip("only a jail takes it")
    spec = await prepared(bench, bench.spec(A, "idle"))
    before = everything_under(bench.top(A))
    nowhere = bench.paths.state / "nowhere"
    lacking = bench.new_runtime(kvm=nowhere) if what == "kvm" else bench.new_runtime(**{what: str(nowhere)})  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="nowhere"):
        await lacking.start(A, spec, mark=MARK)
    assert "nowhere" in (await lacking.capabilities()).why_not
    assert everything_under(bench.top(A)) == before
    if what == "chroot_base":
        with pytest.raises(NotFound, match=r"chroot_base .* is missing") as refused:
            await lacking.prepare(A, spec)
        assert refused.value.hint == f"install -d -m 0711 -o root {nowhere}"


async def test_a_chroot_base_others_may_write_is_refused(jailed: FirecrackerBench) -> None:
    jailed.jails.chmod(0o777)
    with pytest.raises(NotPermitted, match="must be a directory of root's"):
        await jailed.runtime.prepare(A, jailed.spec(A, "idle"))
    jailed.jails.chmod(0o711)
    os.chown(jailed.jails, 12345, -1)
    with pytest.raises(NotPermitted, match="must be a directory of root's"):
        await jailed.runtime.prepare(A, jailed.spec(A, "idle"))


async def test_a_program_that_may_not_be_executed_is_refused(bench: FirecrackerBench) -> None:
    spec = await prepared(bench, bench.spec(A, "idle"))
    bench.programs.firecracker.chmod(0o644)
    with pytest.raises(NotPermitted, match="is not executable"):
        await bench.runtime.start(A, spec, mark=MARK)


def groups_of(bench: FirecrackerBench, agent: str) -> list[Path]:
    """Its control groups, of every hierarchy."""
    subtree, fences = bench.runtime._cgroups()
    leaf = [] if subtree is None else [subtree.leaf(agent).path]
    return [path for path in [*leaf, *fences.find(agent, Limits(), None).dirs] if path.is_dir()]


async def test_a_machine_that_ended_leaves_no_group_and_starts_again_at_once(bench: FirecrackerBench) -> None:
    """The kernel may hold a group for some milliseconds after its last process."""
    spec = await prepared(bench, bench.spec(A, "idle", limits=Limits(memory_mb=512, pids=50)))
    for _ in range(5):
        running = bench.hold(await bench.runtime.start(A, spec, mark=MARK))
        assert groups_of(bench, A) or running.run.leaf is None
        assert await running.kill()
        running.close()
    await until(lambda: groups_of(bench, A) == [])


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("dies-at-start", HiveError, r"Firecracker ended: Error: RunWithApi\(SeccompFilter"),
        ("boot-fails", HiveError, "refused PUT /actions: Start microvm error: Kvm error: .*Permission denied"),
    ],
)
async def test_a_machine_that_does_not_come_up_leaves_nothing(
    bench: FirecrackerBench, fault: str, error: type[HiveError], said: str
) -> None:
    spec = await prepared(bench, bench.spec(A, "idle"))
    bench.programs.fault(fault)
    with pytest.raises(error, match=said):
        await bench.runtime.start(A, spec, mark=MARK)
    assert MachineDir(bench.top(A), jailed=bench.jailed).residents(ProcessTable()) == []
    await until(lambda: groups_of(bench, A) == [])
    (bench.programs.faults / fault).unlink()
    bench.hold(await bench.runtime.start(A, spec, mark=MARK))


async def test_one_that_does_not_answer_in_time_is_ended(
    bench: FirecrackerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.runtimes.firecracker.UP_S", 0.1)
    spec = await prepared(bench, bench.spec(A, "idle"))
    bench.programs.fault("api-late", "30")
    with pytest.raises(TimedOut, match="did not answer"):
        await bench.runtime.start(A, spec, mark=MARK)
    assert MachineDir(bench.top(A), jailed=bench.jailed).residents(ProcessTable()) == []


async def test_what_the_jailer_says_is_told(jailed: FirecrackerBench) -> None:
    spec = await prepared(jailed, jailed.spec(A, "idle"))
    jailed.programs.jailer.write_text("#!/bin/sh\necho Failed to unshare >&2\nexit 1\n")
    with pytest.raises(HiveError, match="Firecracker ended: Failed to unshare"):
        await jailed.runtime.start(A, spec, mark=MARK)


async def test_a_second_start_is_refused_while_the_first_one_lives(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "idle")
    with pytest.raises(WrongState, match="processes are left"):
        await bench.runtime.start(A, bench.spec(A, "idle"), mark=MARK)
    assert running.stat(ProcessTable()).state == "running"


async def test_a_directory_that_was_deleted_by_hand_is_said_to_be_gone(bench: FirecrackerBench) -> None:
    spec = await prepared(bench, bench.spec(A, "idle"))
    await bench.runtime.discard(A, spec)
    with pytest.raises(NotFound, match="is gone"):
        await bench.runtime.start(A, spec, mark=MARK)


async def test_another_hives_jail_of_the_same_name_is_not_touched(jailed: FirecrackerBench) -> None:
    other = jailed.jails / "firecracker" / A
    (other / "root").mkdir(parents=True)
    (other / "root" / "theirs").touch()
    with pytest.raises(WrongState, match="is taken by nobody Hive knows"):
        await jailed.runtime.prepare(A, jailed.spec(A, "idle"))
    await jailed.runtime.discard(A, jailed.spec(A, "idle"))
    assert (other / "root" / "theirs").exists()


# --- the end -----------------------------------------------------------------------------------------------------


async def test_a_vmm_that_dies_asleep_is_gone_and_not_frozen(bench: FirecrackerBench) -> None:
    running = await bench.start(A, "idle")
    await running.freeze(deadline_s=5, give_up=lambda: False)
    os.kill(running.run.main.pid, signal.SIGKILL)
    await until(lambda: select.select([running.ended_fd], [], [], 0)[0])
    assert not running.is_frozen()
    assert not running.is_half_frozen()
    assert running.thaw_now()
    await running.thaw(deadline_s=1)
    assert await running.kill()
    with pytest.raises(HiveError):
        await running.page_out(give_up=lambda: False)
    assert await running.reap() == 128 + signal.SIGKILL


async def test_only_its_own_jail_and_log_are_deleted(bench: FirecrackerBench) -> None:
    one, other = await bench.start(A, "idle"), await bench.start(B, "idle")
    assert await one.kill()
    await bench.runtime.discard(A, bench.spec(A, "idle"))
    assert not bench.top(A).exists()
    assert not bench.paths.log(A).exists()
    assert bench.top(B).exists()
    assert bench.programs.kernel.exists()
    assert other.stat(ProcessTable()).state == "running"


async def test_an_agent_nobody_wrote_down_is_found_in_its_jail(jailed: FirecrackerBench) -> None:
    """Its environment is empty: the mark is not in it."""
    first = await jailed.start(A, "idle")
    first.close()
    spec = jailed.spec(A, "idle")
    found = jailed.hold(
        await jailed.new_runtime().find(A, spec, ProcessTable(), mark=f"HIVE_MARK={secrets.token_hex(8)}")
    )
    assert (found.run.main, found.run.handle, found.run.leaf) == (first.run.main, first.run.handle, first.run.leaf)
    assert await jailed.new_runtime().find(B, jailed.spec(B, "idle"), ProcessTable(), mark=MARK) is None


# --- over the real link -------------------------------------------------------------------------------------------


class Proxy:
    """The proxy's part of it: takes the agents' listeners over the link and serves them."""

    def __init__(self, paths: Paths) -> None:
        self.served: dict[str, asyncio.Server] = {}
        self.callers: list[str] = []
        self._client = LinkClient(
            paths.sandbox_socket, name="sandbox", on_link=self._linked, on_message=self._told, on_lost=lambda _: None
        )

    def _linked(self, link: Link) -> None:
        link.tell(Hello(role="proxy", epoch="test"))
        self._asking = asyncio.ensure_future(link.ask(AskListeners(), Done, timeout_s=5))

    def _told(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, Listener):
            (descriptor,) = link.take_descriptors()
            self._serving = asyncio.ensure_future(self._serve(message.agent, socket.socket(fileno=descriptor)))

    async def _serve(self, agent: str, sock: socket.socket) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.callers.append(agent)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello " + agent.encode())
            writer.close()

        self.served[agent] = await asyncio.start_unix_server(answer, sock=sock)

    def close(self) -> None:
        self._client.close()
        for server in self.served.values():
            server.close()


async def test_a_machine_lives_its_life_through_the_helper(
    bench: FirecrackerBench, connect: Connect, paths: Paths
) -> None:
    spec = bench.spec(A, "client\nhttp 8080", port=8080)
    helper = HelperServer(paths, {RuntimeKind.FIRECRACKER: bench.runtime})
    await helper.open()
    with contextlib.ExitStack() as stack:
        daemon = await connect()
        assert await daemon.client.define(A, spec) == bench.top(A) / "root/run/v.sock_11434"
        proxy = Proxy(paths)
        stack.callback(proxy.close)
        started = await daemon.client.start(A)
        assert started.address == called_at(bench)
        await until(lambda: f"hello {A}" in bench.console(A))
        assert set(proxy.callers) == {A}
        frozen = await daemon.client.freeze(A, 1)
        assert frozen.how == "firecracker"
        await daemon.client.confirm(A, 1)
        assert (await daemon.client.stat([A]))[A].state == "frozen"
        await daemon.client.thaw(A)
        assert (await daemon.client.stat([A]))[A].state == "running"
        assert (await daemon.client.runtimes())[RuntimeKind.FIRECRACKER].why_not_exec == NO_EXEC
        with pytest.raises(NotSupported, match="virtual machine"):
            await daemon.client.execute(A, "0badcafe", ["true"], None)
        ended = await daemon.client.stop(A, grace_s=10)
        assert (ended.pid, ended.exit_code) == (started.pid, 0)
        await daemon.client.remove(A)
        assert not bench.top(A).exists()
    await helper.leave()


async def test_a_machine_outlives_its_helper_and_is_taken_over_by_the_next(
    bench: FirecrackerBench, connect: Connect, paths: Paths
) -> None:
    spec = bench.spec(A, "client")
    first = HelperServer(paths, {RuntimeKind.FIRECRACKER: bench.runtime})
    await first.open()
    daemon = await connect()
    await daemon.client.define(A, spec)
    pid = (await daemon.client.start(A)).pid
    await daemon.client.freeze(A, 1)
    await first.leave()
    second = HelperServer(paths, {RuntimeKind.FIRECRACKER: bench.new_runtime()})
    await second.open()
    try:
        await until(lambda: daemon.client.connected and daemon.connected > 1)
        truth = (await daemon.client.reconcile({}))[A]
        assert (truth.state, truth.pid) == ("running", pid)
        proxy = Proxy(paths)
        await until(lambda: f"hello {A}" in bench.console(A))
        proxy.close()
        await daemon.client.freeze(A, 2)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: daemon.ended)
        assert daemon.ended[0].agent == A
        assert (await daemon.client.stat([A]))[A].state == "gone"
        await daemon.client.remove(A)
    finally:
        await second.leave()
    assert not bench.top(A).exists()
