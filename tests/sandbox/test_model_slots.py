"""Servers of the pool's slots as the helper starts, adopts and stops them as sessions; all processes are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hive.errors import BadRequest, ConfigError, NotFound, NotPermitted, NotSupported
from hive.host.process import identify
from hive.link.slots import ProcessState, SlotGrant, SlotStart
from hive.sandbox.server import HelperServer
from hive.settings.pool import slot_id
from hive.settings.table import Paths
from hive.slots.model_slots import described
from hive.up import ending
from tests import llama
from tests.sandbox.harness import alive, runtimes
from tests.sandbox.model_servers import GRANT, A, B, PoolHelper, connected, helper, left, pids
from tests.waiting import until

FAMILY = ("--ignore-term", "--child", "setsid", "--child", "double")


@pytest.fixture(autouse=True)
def nothing_left(paths: Paths) -> Iterator[None]:
    yield
    for pid in left(paths):
        os.kill(pid, signal.SIGKILL)


def grants(paths: Paths) -> list[str]:
    return sorted(path.name for path in paths.slot_grants.glob("*")) if paths.slot_grants.exists() else []


async def ask(paths: Paths, script: str) -> bytes:
    """The answer of the server of A to a message."""
    reader, writer = await asyncio.open_unix_connection(paths.slot_socket(A))
    body = json.dumps({"messages": [{"role": "user", "content": script}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        return await reader.read()
    finally:
        writer.close()


# --- a life ------------------------------------------------------------------------------------------------------


async def test_a_server_starts_serves_and_is_stopped(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        begun = await daemon.client.slot_start(A, GRANT)
        assert (begun.id, begun.state, begun.grant) == (A, ProcessState.STARTING, GRANT)
        assert begun.pid in begun.pids
        found = paths.slot_grant(A)
        assert msgspec.json.decode(found.read_bytes(), type=SlotGrant) == GRANT
        assert stat.S_IMODE(found.stat().st_mode) == 0o644
        serving = await daemon.told(ProcessState.SERVING)
        assert (serving.run, serving.pid) == (begun.run, begun.pid)
        assert set(pids(paths)) < set(serving.pids)
        assert len(serving.pids) == 3  # supervisor, warden, server
        now = (await daemon.client.slots())[A]
        assert now.bytes is not None
        assert now.bytes > 1 << 20
        assert now.peak_bytes is not None
        assert now.peak_bytes >= now.bytes
        assert now.cpu_s > 0
        await daemon.client.slot_stop(A, grace_s=20)
        assert left(paths) == []
        assert not alive(begun.pid)
        ended = await daemon.told(ProcessState.ENDED)
        assert (ended.run, ended.pid, ended.pids, ended.exit_code, ended.was_oom) == (begun.run, 0, [], 0, False)
        assert daemon.states() == ["serving", "stopping", "ended"]
        assert await daemon.client.slots() == {}
        assert grants(paths) == []
        assert list(paths.slot_sockets.iterdir()) == []


async def test_its_log_is_that_of_its_last_start(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        for _ in range(2):
            await daemon.serving()
            await daemon.client.slot_stop(A, grace_s=20)
            daemon.moved.clear()
        assert (await daemon.client.slot_log(A, 50)).count("the supervisor begins") == 1
        assert await daemon.client.slot_log(B, 50) == ""


async def test_the_end_of_a_server_that_crashed_is_told_with_its_reason(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        serving = await daemon.serving()
        (server,) = pids(paths)
        os.kill(server, signal.SIGSEGV)
        ended = await daemon.told(ProcessState.ENDED)
        assert (ended.run, ended.exit_code, ended.was_oom) == (serving.run, 139, False)
        assert "exit code 139" in ended.why
        assert grants(paths) == []
        daemon.moved.clear()
        again = await daemon.serving()
        assert again.run != serving.run


async def test_a_server_that_does_not_come_up_is_told_with_its_last_lines(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, "--crash-at-start", "3"), connected(paths) as daemon:
        await daemon.client.slot_start(A, GRANT)
        ended = await daemon.told(ProcessState.ENDED)
        assert daemon.states() == ["ended"]
        assert ended.exit_code not in (0, None)
        assert ended.last[0] == "the supervisor begins"
        assert "refused: " in ended.last[-1]


async def test_a_supervisor_that_is_killed_leaves_nothing(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, *FAMILY), connected(paths) as daemon:
        serving = await daemon.serving()
        os.kill(serving.pid, signal.SIGKILL)
        ended = await daemon.told(ProcessState.ENDED)
        assert (ended.exit_code, left(paths)) == (137, [])


# --- stopping ----------------------------------------------------------------------------------------------------


async def test_a_server_that_ignores_sigterm_is_killed_with_all_that_came_of_it(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, *FAMILY), connected(paths) as daemon:
        serving = await daemon.serving()
        await until(lambda: len(pids(paths)) >= 3)
        await daemon.client.slot_stop(A, grace_s=0.1)
        assert left(paths) == []
        assert not alive(serving.pid)


async def test_a_supervisor_that_stands_still_is_killed(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        serving = await daemon.serving()
        os.kill(serving.pid, signal.SIGSTOP)
        await daemon.client.slot_stop(A, grace_s=0.1)
        assert (left(paths), alive(serving.pid)) == ([], False)


async def test_a_server_is_stopped_while_it_starts(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        begun = await daemon.client.slot_start(A, GRANT)
        await daemon.client.slot_stop(A, grace_s=20)
        assert (left(paths), alive(begun.pid)) == ([], False)
        assert daemon.states()[-1] == "ended"
        assert "serving" not in daemon.states()


async def test_stop_of_nothing_is_done(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        await daemon.client.slot_stop(A, grace_s=1)
        assert daemon.moved == []


async def test_a_second_stop_need_not_wait_for_the_grace_of_the_first(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, *FAMILY), connected(paths) as daemon:
        serving = await daemon.serving()
        os.kill(serving.pid, signal.SIGSTOP)
        slow = asyncio.create_task(daemon.client.slot_stop(A, grace_s=300))
        await daemon.told(ProcessState.STOPPING)
        await daemon.client.slot_stop(A, grace_s=0)
        await slow
        assert left(paths) == []


# --- starting ----------------------------------------------------------------------------------------------------


async def test_of_two_starts_at_once_one_starts_and_both_are_told_of_it(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        one, other = await asyncio.gather(daemon.client.slot_start(A, GRANT), daemon.client.slot_start(A, GRANT))
        assert (one.run, one.pid) == (other.run, other.pid)
        await daemon.told(ProcessState.SERVING)
        assert len(pids(paths)) == 1


async def test_a_start_of_what_runs_answers_what_runs(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        serving = await daemon.serving()
        again = await daemon.client.slot_start(A, SlotGrant(accounts={"cpu": 1}))
        assert (again.run, again.state, again.grant) == (serving.run, ProcessState.SERVING, GRANT)
        assert json.loads(paths.slot_grant(A).read_bytes())["accounts"] == {"cpu": 700}


async def test_two_slots_are_two_servers(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        one, other = await daemon.serving(A), await daemon.serving(B)
        assert not set(one.pids) & set(other.pids)
        await daemon.client.slot_stop(A, grace_s=20)
        assert list(await daemon.client.slots()) == [B]
        assert len(left(paths)) == 1


@pytest.mark.parametrize("slot", ["", "../x", "a/b", "A", "a.b", "a b", "-a", "a" * 33, "a\n", "a@b", "é"])
async def test_what_is_no_id_is_refused(paths: Paths, slot: str) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon:
        with pytest.raises(BadRequest, match="no id of a slot"):
            await daemon.client.slot_start(slot, GRANT)
        with pytest.raises(BadRequest, match="no id of a slot"):
            await daemon.client.slot_stop(slot, grace_s=1)
        with pytest.raises(BadRequest, match="no id of a slot"):
            await daemon.client.slot_log(slot, 1)
        assert grants(paths) == []


@pytest.mark.parametrize(
    "grant",
    [
        SlotGrant(accounts={"gpu0": 1}),
        SlotGrant(accounts={"GPU-1,GPU-2": 1}),
        SlotGrant(accounts={"GPU-1\nX=1": 1}),
        SlotGrant(accounts={"cpu": -1}),
        SlotGrant(accounts={"cpu": 2**31}),
        SlotGrant(accounts={"cpu": 1}, context=-1),
        SlotGrant(accounts={f"GPU-{number}": 1 for number in range(65)}),
    ],
)
async def test_what_is_no_grant_is_refused(paths: Paths, grant: SlotGrant) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon:
        with pytest.raises(BadRequest):
            await daemon.client.slot_start(A, grant)
        assert grants(paths) == []


async def test_a_slot_that_the_configuration_does_not_describe_is_not_started(paths: Paths) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon:
        with pytest.raises(NotFound, match="describes no model"):
            await daemon.client.slot_start("other-00000003", GRANT)
        assert grants(paths) == []


async def test_a_configuration_that_cannot_be_read_is_told(paths: Paths) -> None:
    def known() -> set[str]:
        raise ConfigError("hive.conf:3: [model a]: file: expected an absolute path")

    async with helper(paths, "signals", known=known), connected(paths) as daemon:
        with pytest.raises(ConfigError, match=r"hive.conf:3"):
            await daemon.client.slot_start(A, GRANT)
        assert grants(paths) == []


async def test_a_program_that_cannot_be_started_leaves_nothing(paths: Paths, freezer: str) -> None:
    async with (
        helper(paths, freezer, command=lambda slot: ["/nowhere/hive"]),
        connected(paths) as daemon,
    ):
        with pytest.raises(NotFound, match="/nowhere/hive"):
            await daemon.client.slot_start(A, GRANT)
        assert (grants(paths), await daemon.client.slots()) == ([], {})
        assert list(paths.slot_records.iterdir()) == []
        assert list(paths.slot_sockets.iterdir()) == []


async def test_only_the_daemon_may_start_and_hive_up_may_stop(paths: Paths) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon, connected(paths, "up") as up:
        with pytest.raises(NotPermitted):
            await up.client.slot_start(A, GRANT)
        await daemon.serving()
        assert list(await up.client.slots()) == [A]
        await up.client.slot_stop(A, grace_s=20)
        assert left(paths) == []
        async with connected(paths, "proxy") as proxy:
            with pytest.raises(NotPermitted):
                await proxy.client.slots()


async def test_a_helper_without_models_says_so(paths: Paths) -> None:
    found = HelperServer(paths, runtimes(paths, "signals"))
    await found.open()
    async with connected(paths) as daemon:
        with pytest.raises(NotSupported, match="runs no models"):
            await daemon.client.slot_start(A, GRANT)
    await found.leave()


# --- helpers and daemons that come and go -------------------------------------------------------------------------


async def test_an_end_that_no_daemon_saw_is_told_once(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer):
        async with connected(paths) as daemon:
            await daemon.serving()
        os.kill(pids(paths)[0], signal.SIGKILL)
        await until(lambda: grants(paths) == [])
        async with connected(paths, "up") as up, connected(paths) as daemon:
            await until(lambda: True)
            assert (await up.client.slots())[A].state is ProcessState.ENDED
            ended = (await daemon.client.slots())[A]
            assert (ended.state, ended.exit_code) == (ProcessState.ENDED, 137)
            assert await daemon.client.slots() == {}


async def test_a_server_outlives_a_killed_helper_and_is_adopted(paths: Paths, freezer: str) -> None:
    first = PoolHelper(paths, freezer)
    try:
        async with connected(paths) as daemon:
            serving = await daemon.serving()
            first.kill()
            assert alive(serving.pid)
    finally:
        first.kill()
    async with helper(paths, freezer), connected(paths) as daemon:
        found = (await daemon.client.slots())[A]
        assert (found.run, found.pid, found.state) == (serving.run, serving.pid, ProcessState.SERVING)
        assert (found.grant, set(found.pids)) == (GRANT, set(serving.pids))
        assert found.age_s > 0
        assert (await daemon.client.slot_start(A, GRANT)).run == serving.run
        os.kill(pids(paths)[0], signal.SIGKILL)  # its end is noticed
        ended = await daemon.told(ProcessState.ENDED)
        assert "exit code 137" in ended.why
        assert (left(paths), grants(paths)) == ([], [])


async def test_one_that_was_still_starting_is_adopted_and_its_word_is_heard(paths: Paths, freezer: str) -> None:
    gate = paths.state.with_name("gate")
    os.mkfifo(gate)
    first = PoolHelper(paths, freezer, "--wait-for", str(gate))
    try:
        async with connected(paths) as daemon:
            begun = await daemon.client.slot_start(A, GRANT)
            await until(lambda: pids(paths))
    finally:
        first.kill()
    async with helper(paths, freezer), connected(paths) as daemon:
        assert (await daemon.client.slots())[A].state is ProcessState.STARTING
        gate.write_text("go")
        assert (await daemon.told(ProcessState.SERVING)).run == begun.run
        await daemon.client.slot_stop(A, grace_s=20)
        assert left(paths) == []


async def test_one_that_came_up_while_no_helper_was_there_is_asked(paths: Paths, freezer: str) -> None:
    gate = paths.state.with_name("gate")
    os.mkfifo(gate)
    first = PoolHelper(paths, freezer, "--wait-for", str(gate))
    try:
        async with connected(paths) as daemon:
            await daemon.client.slot_start(A, GRANT)
            await until(lambda: pids(paths))
    finally:
        first.kill()
    gate.write_text("go")
    await until(lambda: paths.slot_socket(A).exists())
    async with helper(paths, freezer), connected(paths) as daemon:
        await daemon.told(ProcessState.SERVING)


async def test_one_that_ended_while_no_helper_was_there_is_told(paths: Paths, freezer: str) -> None:
    first = PoolHelper(paths, freezer)
    try:
        async with connected(paths) as daemon:
            serving = await daemon.serving()
    finally:
        first.kill()
    main = identify(serving.pid)
    assert main is not None
    os.kill(pids(paths)[0], signal.SIGKILL)
    await until(lambda: not main.is_alive())
    async with helper(paths, freezer), connected(paths) as daemon:
        found = (await daemon.client.slots())[A]
        assert (found.run, found.state) == (serving.run, ProcessState.ENDED)
        assert found.why
        assert found.last
        assert grants(paths) == []
        assert list(paths.slot_records.iterdir()) == []


async def test_one_whose_pid_was_never_written_down_is_found(paths: Paths, freezer: str) -> None:
    """The helper was killed between the fork and the second write of the record."""
    first = PoolHelper(paths, freezer)
    try:
        async with connected(paths) as daemon:
            serving = await daemon.serving()
    finally:
        first.kill()
    record = paths.slot_records / f"{A}.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"main": None, "serves": False}))
    async with helper(paths, freezer), connected(paths) as daemon:
        assert (await daemon.client.slots())[A].pid == serving.pid
        assert (await daemon.told(ProcessState.SERVING)).run == serving.run


async def test_a_helper_that_leaves_lets_its_servers_go_on(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer) as first:
        async with connected(paths) as daemon:
            serving = await daemon.serving()
        await first.leave()
    assert alive(serving.pid)
    async with helper(paths, freezer), connected(paths) as daemon:
        assert (await daemon.client.slots())[A].run == serving.run


async def test_a_grant_that_a_killed_helper_wrote_for_nothing_is_removed(paths: Paths) -> None:
    paths.slot_grants.mkdir(parents=True)
    paths.slot_grant(A).write_text("{}")
    async with helper(paths, "signals"):
        assert grants(paths) == []


async def test_a_record_that_is_damaged_is_moved_aside(paths: Paths) -> None:
    paths.slot_records.mkdir(parents=True)
    (paths.slot_records / f"{A}.json").write_text("{")
    async with helper(paths, "signals"), connected(paths) as daemon:
        assert await daemon.client.slots() == {}
        assert [path.name for path in paths.slot_records.iterdir()] == [f"{A}.damaged"]
        await daemon.serving()


async def test_an_order_is_audited_by_the_id_of_the_slot(paths: Paths, caplog: pytest.LogCaptureFixture) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon:
        await daemon.serving()
        lines = [record.getMessage() for record in caplog.records if record.name == "hive.sandbox.audit"]
        assert any(line.startswith(f"audit verb=slot_start agent=- name={A} by=daemon") for line in lines)


@pytest.mark.root
async def test_one_that_is_killed_for_memory_is_told_so(paths: Paths) -> None:
    """By the counter of its group: a limit is put on it, as a box would."""
    async with helper(paths, "cgroup"), connected(paths) as daemon:
        serving = await daemon.serving()
        record = json.loads((paths.slot_records / f"{A}.json").read_text())
        group = Path(record["memory"]) if record["memory"] else None
        if group is None:
            pytest.skip("no control group for memory may be made here")
        knob = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        swap = group / "memory.memsw.limit_in_bytes"
        knob.write_text(str(96 << 20))
        if swap.exists():
            swap.write_text(str(96 << 20))
        asking = asyncio.create_task(ask(paths, "eat 300"))
        ended = await daemon.told(ProcessState.ENDED)
        assert (ended.run, ended.was_oom, ended.why) == (serving.run, True, "the kernel killed it: out of memory")
        assert not group.exists()
        asking.cancel()


def test_a_message_needs_a_grant() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": A}, type=SlotStart)


def test_the_models_in_models_dir_are_known_where_the_pool_wants_them(paths: Paths, tmp_path: Path) -> None:
    models, conf = paths.state / "models", tmp_path / "hive.conf"
    models.mkdir(parents=True)
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(models / "lone.gguf")], check=True, capture_output=True)
    conf.write_text("[pool]\nfound = true\n")
    assert slot_id("lone") in described(paths, conf)
    conf.write_text("[pool]\nfound = false\n")
    assert slot_id("lone") not in described(paths, conf)


# --- the end of `hive up` -----------------------------------------------------------------------------------------


async def test_hive_up_ends_them_all_when_it_ends(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon, connected(paths, "up") as up:
        await daemon.serving(A)
        await daemon.serving(B)
        await ending.stop_slots(up.client, grace_s=20)
        assert (left(paths), await daemon.client.slots()) == ([], {})


async def test_the_end_of_hive_up_goes_on_without_a_helper(paths: Paths, caplog: pytest.LogCaptureFixture) -> None:
    async with helper(paths, "signals"):
        async with connected(paths, "up") as up:
            pass
        await ending.stop_slots(up.client, grace_s=20)
    assert [record.getMessage().partition(" ")[0] for record in caplog.records if record.name == "hive.up"] == [
        "models_not_stopped"
    ]


# --- the sockets' directories ---


async def test_each_server_listens_in_a_directory_of_its_own(paths: Paths) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon:
        for slot in (A, B):
            served = await daemon.serving(slot)
            assert served.socket == ""
            directory = paths.slot_socket(slot).parent
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert [path.name for path in directory.iterdir()] == ["s.sock"]
        await daemon.client.slot_stop(A, grace_s=20)
        assert sorted(path.name for path in paths.slot_sockets.iterdir()) == [B, f"{B}.up"]


def test_the_path_of_a_socket_is_one_that_llama_server_takes_for_a_socket_and_fits() -> None:
    """It was named `sock`: llama-server took it for a host's name, and no model of it could be loaded."""
    for paths in (Paths(Path("/s"), Path("/run/user/1000/hive")), Paths(Path("/s"), Path("/run/hive"), apart=True)):
        longest = paths.slot_socket("a" * 32)
        assert longest.suffix == ".sock"
        assert len(os.fsencode(longest)) <= 107


async def test_a_server_of_the_version_before_serves_on_in_its_place_until_it_stops(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had one directory. One that is loaded when Hive is upgraded is taken over; the next start is in the new."""
    before = str(paths.slot_socket_before(A))
    with monkeypatch.context() as earlier:
        earlier.setattr(Paths, "slot_socket", Paths.slot_socket_before)
        async with helper(paths, "signals") as first, connected(paths) as daemon:
            serving = await daemon.serving()
            await first.leave()
    async with helper(paths, "signals"), connected(paths) as daemon:
        found = (await daemon.client.slots())[A]
        assert (found.run, found.state, found.socket) == (serving.run, ProcessState.SERVING, before)
        await daemon.client.slot_stop(A, grace_s=20)
        assert list(paths.slot_sockets.iterdir()) == []
        daemon.moved.clear()
        again = await daemon.serving()
        assert again.socket == ""
        assert paths.slot_socket(A).exists()
