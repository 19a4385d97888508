"""Specialities of Docker; the promises of every runtime are in test_conformance.py.

Traps are numbered as in the list of sleeping and waking on one host: 1, 2, 4, 7, 8 and 11 are the proxy's and the
daemon's; 15 is systemd's, 16 is shown on real processes, 18 to 20 and 23 are Firecracker's. Docker's own, and what its
engine does when it goes away, are in test_docker_sleep.py.
"""

# ruff: noqa: ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import DockerSpec, Limits
from hive.errors import (
    BadRequest,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    WrongState,
)
from hive.host.process import ProcessTable
from hive.link.server import bind_private
from hive.runtimes.container import RunningContainer
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.log_process import append
from hive.sandbox.server import make_directories
from hive.settings.table import Paths, Sandbox
from tests import docker_engine
from tests.docker_engine import DockerEngine
from tests.runtimes.benches import MARKS, Floor, docker_spec, printed
from tests.runtimes.containers import (
    COUNTS,
    FILLS,
    ROOT,
    WITH_PROGRAMS,
    freeze,
    has_ended,
    inside,
    lines_of,
    ran,
    started,
    truth,
)
from tests.sandbox.harness import A, B, uid_of
from tests.waiting import until

pytestmark = pytest.mark.docker


# --- what it is given --------------------------------------------------------------------------------------------


@ROOT
async def test_inside_it_is_a_user_without_rights_that_can_write_to_its_home_and_tmp_only(floor: Floor) -> None:
    tries = "touch /x /etc/x; touch $HOME/h /tmp/t && echo written"
    said = await ran(floor, f"exec 2>&1; id -u; id -g; cat /proc/self/status; {tries}; pwd; echo $HOME")
    uid = str(uid_of(A))
    assert said.splitlines()[:2] == [uid, uid]
    assert "CapBnd:\t0000000000000000" in said
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert "/x: Read-only file system" in said
    assert "/etc/x: Read-only file system" in said
    assert said.splitlines()[-3:] == ["written", "/home/agent", "/home/agent"]
    assert (Path(floor.bench.spec(A, "idle").home) / "h").stat().st_uid == uid_of(A)


async def test_it_is_told_where_hive_is_and_keeps_what_the_spec_says(floor: Floor) -> None:
    said = await ran(floor, "env", env={"OPENAI_API_KEY": "k", "HOME": "/nowhere", "HIVE_PROXY_SOCKET": "/host/path"})
    found = set(said.splitlines())
    assert {"OPENAI_API_KEY=k", "HOME=/home/agent", "HIVE_PROXY_SOCKET=/run/hive/agent.sock", MARKS[A]} <= found
    assert any(line.startswith("PATH=") for line in found)


async def test_its_labels_say_whose_it_is(floor: Floor, engine: DockerEngine, paths: Paths) -> None:
    await started(floor)
    (found,) = engine.containers(paths.state)
    labels = found["Labels"]
    assert (labels["hive.agent"], labels["hive.name"], labels["hive.mark"]) == (A, "a", MARKS[A])
    assert found["Names"] == [f"/hive-a-{A[:8]}"]
    assert engine.inspect(found["Id"])["HostConfig"]["RestartPolicy"]["Name"] == "no"


async def test_its_limits_are_the_kernels(floor: Floor, engine: DockerEngine) -> None:
    """Asked of the kernel from inside, not of the engine's record: too many processes, too many files."""
    limits = Limits(memory_mb=32, cpu=0.5, pids=32, files=32)
    script = "echo ready; ulimit -n; i=0; while [ $i -lt 40 ]; do sleep 1000 & i=$((i+1)); done"
    running = await started(floor, command=["sh", "-c", script], limits=limits)
    host = engine.inspect(running.run.handle)["HostConfig"]
    assert (host["Memory"], host["NanoCpus"], host["PidsLimit"]) == (32 << 20, 500_000_000, 32)
    assert host["MemorySwap"] == 64 << 20
    await until(lambda: "can't fork" in printed(floor.bench.spec(A, "idle")))
    assert "\n32\n" in printed(floor.bench.spec(A, "idle"))
    assert running.stat(ProcessTable()).limits == ""


async def test_what_takes_more_memory_than_it_may_ends_and_the_log_says_why(
    floor: Floor, caplog: pytest.LogCaptureFixture
) -> None:
    """Written to its tmpfs, which counts as its memory, and as much again in swap where there is some.

    Not before it is looked at: of a container that is gone by then only the engine can tell, which misses some.
    """
    running = await started(floor, "exit7", command=FILLS, limits=Limits(memory_mb=16))
    (Path(floor.bench.spec(A, "exit7").home) / "go").touch()
    await until(lambda: has_ended(running))
    assert await running.reap() == 137
    assert "agent_out_of_memory agent=a" in caplog.text


async def test_an_agent_with_more_cores_than_there_are_has_all_of_them(floor: Floor, engine: DockerEngine) -> None:
    """Docker refuses it: `Range of CPUs is from 0.01 to 2.00`."""
    running = await started(floor, limits=Limits(cpu=4096))
    assert engine.inspect(running.run.handle)["HostConfig"]["NanoCpus"] == 0


async def test_mounts_and_tmpfs_of_the_spec_are_there(floor: Floor, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("hello\n")
    docker = DockerSpec(image=docker_engine.IMAGE, mounts=[f"{tmp_path}:/data:ro"], tmpfs=["/scratch:size=64k"])
    said = await ran(
        floor, "cat /data/data; touch /data/x; touch /scratch/y && echo scratch; touch /tmp/z", docker=docker
    )
    assert "hello\n" in said
    assert "/data/x: Read-only file system" in said
    assert "scratch\n" in said
    assert "/tmp/z: Read-only file system" in said


async def test_without_egress_there_is_no_network_but_its_own_loopback(floor: Floor, engine: DockerEngine) -> None:
    said = await ran(floor, "ls /sys/class/net; cat /proc/net/route")
    assert said.splitlines()[0] == "lo"
    assert len(said.splitlines()) == 2


async def test_otherwise_it_has_a_bridge_of_its_own_for_as_long_as_it_runs(
    floor: Floor, engine: DockerEngine, paths: Paths
) -> None:
    script = "echo ready; echo hello > $HOME/index.html; exec httpd -f -p 8080 -h $HOME"
    running = await started(floor, command=["sh", "-c", script], egress=None, port=8080)
    host, _, port = running.address.rpartition(":")
    await until(lambda: _answers(host, int(port)))
    assert running.stat(ProcessTable()).address == running.address
    (network,) = engine.networks(paths.state)
    assert network["Driver"] == "bridge"
    running.close()
    again = floor.hold(await floor.runtime.adopt(A, floor.bench.spec(A, "idle"), running.run, mark=MARKS[A]))
    assert again.address == running.address
    assert await again.stop(grace_s=5)
    await again.reap()
    assert engine.networks(paths.state) == []


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 5) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return b"hello" in sock.recv(65536, socket.MSG_WAITALL)
    except OSError:
        return False


@ROOT
async def test_two_agents_share_neither_network_nor_files_nor_sockets(floor: Floor, paths: Paths) -> None:
    one, other = await started(floor, agent=A), await started(floor, agent=B)
    assert os.readlink(f"/proc/{one.run.main.pid}/ns/net") != os.readlink(f"/proc/{other.run.main.pid}/ns/net")
    code, said = await inside(one, ["ls", "/run/hive", "/home"])
    assert (code, set(said.split())) == (0, {b"/home:", b"agent", b"/run/hive:", b"agent.sock"})
    for path in (floor.runtime.place(B, docker_spec(paths, B, [])).path, paths.home(B), Path("/run/docker.sock")):
        code, said = await inside(one, ["ls", str(path)])
        assert code != 0, said
    code, _ = await inside(one, ["kill", "-0", str(other.run.main.pid)])
    assert code != 0


@ROOT
async def test_its_socket_is_reached_from_inside_and_by_nobody_else_outside(floor: Floor) -> None:
    running = await started(floor, docker=WITH_PROGRAMS)
    place = floor.runtime.place(A, floor.bench.spec(A, "idle"))
    assert await says_hello(running, floor.sockets[A])
    assert place.path.parent.parent.stat().st_mode & 0o777 == 0o700


async def test_a_socket_renamed_over_the_old_one_is_the_one_inside(floor: Floor) -> None:
    """The next helper binds anew; a socket mounted by itself would stay the old one, with nobody behind it."""
    running = await started(floor, docker=WITH_PROGRAMS)
    spec = floor.bench.spec(A, "idle")
    owner = None if spec.uid is None else (spec.uid, spec.uid)
    with bind_private(floor.runtime.place(A, spec).path, owner=owner) as renewed:
        assert await says_hello(running, renewed)


@ROOT
async def test_an_agent_that_runs_as_another_user_reaches_its_home_and_its_socket(floor: Floor) -> None:
    docker = msgspec.structs.replace(WITH_PROGRAMS, user="65533:65532")
    running = await started(floor, docker=docker)
    code, said = await inside(running, ["sh", "-c", "id -u; id -g; touch $HOME/x && echo written"])
    assert (code, said) == (0, b"65533\n65532\nwritten\n")
    assert await says_hello(running, floor.sockets[A])


LISTEN = """
import socket
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("/run/hive/agent.sock")
    print(sock.recv(100).decode())
"""


async def says_hello(running: RunningContainer, listener: socket.socket) -> bool:
    """Whether a connection made inside arrives at `listener`."""
    exchange = asyncio.ensure_future(inside(running, ["/usr/bin/python3", "-S", "-c", LISTEN]))
    await until(lambda: exchange.done() or select.select([listener], [], [], 0)[0])
    assert not exchange.done(), exchange.result()
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"hello")
    return await exchange == (0, b"hello\n")


# --- what it is not given ----------------------------------------------------------------------------------------


def docker(**more: Any) -> DockerSpec:
    return DockerSpec(image=docker_engine.IMAGE, **more)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"docker": None}, BadRequest, "docker"),
        ({"egress": ["192.0.2.0/24"]}, NotSupported, "some networks"),
        ({"docker": docker(user="nobody")}, BadRequest, "user"),
        ({"docker": docker(user="0")}, NotPermitted, "root"),
        ({"docker": docker(user="1000:0")}, NotPermitted, "root"),
        ({"docker": docker(mounts=["/run/docker.sock:/s"])}, NotPermitted, "docker.sock"),
        ({"docker": docker(mounts=["/:/host"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/proc/self/root/run:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/var/lib/docker/volumes:/s"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/run/containerd/containerd.sock:/s"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/dev:/s"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/dev/kvm:/s"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/sys/fs/cgroup:/s"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/proc/sys:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/root/.ssh:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/etc:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/etc/hive:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/opt:/s:ro"])}, NotPermitted, "mounts"),
        ({"docker": docker(mounts=["/srv/../root:/s:ro"])}, NotPermitted, "mounts"),
        ({"home": "/etc"}, BadRequest, "home"),
        ({"log": "/etc/passwd"}, BadRequest, "log"),
    ],
)
async def test_a_spec_that_would_open_the_host_is_refused(
    paths: Paths, more: dict[str, Any], error: type[HiveError], said: str
) -> None:
    """Before any engine is asked: there is none at this socket."""
    make_directories(paths)
    runtime = DockerRuntime(paths, Sandbox(docker_socket="/run/docker.sock"), log_max_bytes=4096)
    with pytest.raises(error, match=said):
        await runtime.prepare(A, docker_spec(paths, A, ["id"], **more))
    assert not paths.home(A).exists()


async def test_hives_own_files_are_not_mounted_also_not_by_another_name(paths: Paths, tmp_path: Path) -> None:
    make_directories(paths)
    runtime = DockerRuntime(paths, Sandbox(), log_max_bytes=4096)
    (tmp_path / "innocent").symlink_to(paths.state)
    for source in (paths.state, paths.home(B), paths.runtime, paths.state.parent, tmp_path / "innocent"):
        with pytest.raises(NotPermitted, match="mounts"):
            await runtime.prepare(A, docker_spec(paths, A, ["id"], docker=docker(mounts=[f"{source}:/x"])))


async def test_an_image_that_is_not_there_is_not_found_and_nothing_is_left(
    floor: Floor, engine: DockerEngine, paths: Paths
) -> None:
    with pytest.raises(NotFound, match="no image nosuch:1") as raised:
        await floor.start("idle", docker=DockerSpec(image="nosuch:1"), egress=None)
    assert "docker pull nosuch:1" in raised.value.hint
    assert engine.containers(paths.state) == engine.networks(paths.state) == []


async def test_what_the_engine_refuses_is_said_in_its_words_and_nothing_is_left(
    floor: Floor, engine: DockerEngine, paths: Paths
) -> None:
    missing = docker(mounts=["/no/such/directory:/x"])
    with pytest.raises(BadRequest, match="/no/such/directory"):
        await floor.start("idle", docker=missing, egress=None)
    assert engine.containers(paths.state) == engine.networks(paths.state) == []


async def test_a_program_that_is_not_in_the_image_ends_with_127_and_a_line_in_the_log(floor: Floor) -> None:
    running = await started(floor, "exit7", command=["no-such-program"])
    await until(lambda: has_ended(running))
    assert await running.reap() == 127
    assert "no-such-program" in printed(floor.bench.spec(A, "idle"))


async def test_an_image_without_a_command_is_a_bad_request(floor: Floor) -> None:
    with pytest.raises(BadRequest, match=r"(?i)no command"):
        await floor.start("idle", command=[])


async def test_a_name_taken_by_a_container_that_is_not_hives_is_said(floor: Floor, engine: DockerEngine) -> None:
    name = f"hive-a-{A[:8]}"
    status, told = engine.call("POST", f"/containers/create?name={name}", {"Image": engine.image, "Cmd": ["id"]})
    assert status == 201, told
    try:
        with pytest.raises(WrongState, match="already in use") as raised:
            await floor.start("idle")
        assert f"docker rm {name}" in raised.value.hint
    finally:
        engine.call("DELETE", f"/containers/{told['Id']}?force=1")
    await started(floor)


async def test_what_is_left_of_an_earlier_start_makes_way(floor: Floor, engine: DockerEngine, paths: Paths) -> None:
    """Its helper was killed before it could write it down, and nobody found it: it is labelled as this agent's."""
    lost = await started(floor)
    lost.close()
    again = await started(floor)
    assert [found["Id"] for found in engine.containers(paths.state)] == [again.run.handle]
    assert lost.is_over()


async def test_what_the_engine_cannot_enforce_is_said(floor: Floor) -> None:
    running = await started(floor, limits=Limits(memory_mb=64, cpu=0.5))
    assert isinstance(floor.runtime, DockerRuntime)
    assert (await floor.runtime.capabilities()).limits == ""
    floor.runtime._info |= {"MemoryLimit": False, "PidsLimit": False}
    assert running.stat(ProcessTable()).limits == "not enforced: memory"


# --- gone behind Hive's back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_container_removed_by_hand_has_ended(floor: Floor, engine: DockerEngine, asleep: bool) -> None:
    running = await started(floor)
    if asleep:
        await freeze(running)
    assert engine.call("DELETE", f"/containers/{running.run.handle}?force=1")[0] == 204
    await until(lambda: has_ended(running))
    assert running.thaw_now()
    assert await running.kill()
    assert await running.reap() is None
    running.close()
    assert await floor.runtime.adopt(A, floor.bench.spec(A, "idle"), running.run, mark=MARKS[A]) is None
    assert truth(await started(floor)) == "running"


async def test_one_started_again_by_hand_does_not_run_beside_hive(
    floor: Floor, engine: DockerEngine, paths: Paths
) -> None:
    """`docker restart`: for Hive its agent has ended, and Hive starts its agents."""
    running = await started(floor)
    restarting = asyncio.get_running_loop().run_in_executor(
        None, engine.call, "POST", f"/containers/{running.run.handle}/restart?t=0"
    )
    await until(lambda: has_ended(running))
    assert await running.kill()
    await running.reap()
    await restarting
    assert engine.containers(paths.state) == []


# --- logs --------------------------------------------------------------------------------------------------------


async def test_the_log_goes_on_where_it_was_after_a_change_of_helpers(floor: Floor) -> None:
    """Also where the old one was killed between text and position: the log is longer than its note says."""
    spec = floor.bench.spec(A, "idle")
    running = await started(floor, command=COUNTS)
    await until(lambda: "line 20" in printed(spec))
    running.close()
    await asyncio.sleep(0.1)
    last = lines_of(printed(spec))[-1]
    append(Path(spec.log), b"line 7777 without a posit", 1 << 20)
    adopted = floor.hold(await floor.runtime.adopt(A, spec, running.run, mark=MARKS[A]))
    await until(lambda: f"line {last + 50}\n" in printed(spec))
    assert await adopted.kill()
    await adopted.reap()
    found = lines_of(printed(spec))
    assert found == list(range(1, len(found) + 1))


async def test_a_log_that_is_cut_back_goes_on(floor: Floor) -> None:
    spec = floor.bench.spec(A, "idle")
    running = await started(floor, command=[*COUNTS, "x" * 1000])
    await until(lambda: lines_of(printed(spec))[-1:] > [400])  # of a thousand bytes
    assert 0 < Path(spec.log).stat().st_size <= 1 << 18
    running.close()
    adopted = floor.hold(await floor.runtime.adopt(A, spec, running.run, mark=MARKS[A]))
    seen = lines_of(printed(spec))[-1]
    await until(lambda: lines_of(printed(spec))[-1] > seen)
    assert await adopted.kill()


async def test_a_flood_never_takes_more_than_twice_the_bound(floor: Floor, engine: DockerEngine) -> None:
    """The engine's own log of it is included: that alone was twice the bound, and the log had a second of it more."""
    bound = 1 << 18
    spec = floor.bench.spec(A, "idle")
    running = await started(floor, command=["sh", "-c", "echo ready; sleep 1; while :; do seq 1 10000; done"])
    own = Path(engine.inspect(running.run.handle)["LogPath"]).parent

    def logged() -> int:
        return log_bytes(Path(spec.log).parent, "") + log_bytes(own, "-json.log")

    await until(lambda: logged() > bound // 2)  # it begins a second after the line that is waited for
    most = logged()
    for _ in range(600):
        most = max(most, logged())
        await asyncio.sleep(0.002)
    assert bound // 2 < most <= 2 * bound + LAST_ENTRIES
    assert await running.kill()


LAST_ENTRIES = 2 * 20_000
"""The engine looks how long a file is before it writes an entry (16 KiB, in JSON), of which it has two."""


def log_bytes(directory: Path, name: str) -> int:
    total = 0
    for path in directory.glob(f"*{name}*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def test_what_ended_while_no_helper_was_there_has_its_last_words_in_the_log(floor: Floor) -> None:
    spec = floor.bench.spec(A, "idle")
    running = await started(
        floor, command=["sh", "-c", "trap 'echo last words; exit 0' TERM; echo ready; sleep 1000 & wait"]
    )
    running.close()
    running.run.main.send(signal.SIGTERM)
    await until(running.is_over)
    await floor.runtime.sweep(A, spec, running.run, mark=MARKS[A])
    assert printed(spec) == "ready\nlast words\n"


async def test_long_lines_and_bytes_that_are_no_text_are_in_the_log(floor: Floor) -> None:
    """json-file keeps pieces of 16 KiB, and no bytes that are not UTF-8."""
    said = await ran(floor, "i=0; while [ $i -lt 6000 ]; do printf 12345678; i=$((i+1)); done; echo; echo end")
    assert said == "12345678" * 6000 + "\nend\n"
