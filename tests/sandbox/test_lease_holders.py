# ruff: noqa: ASYNC220, ASYNC240 - a test's loop may wait for its processes and its disk
"""Holders of leases as the helper lets them in, knows what comes of them, and ends them; all processes are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.errors import BadRequest, WrongState
from hive.holders.group_places import GroupPlaces
from hive.holders.lease_socket import CALLERS_OF_USER
from hive.host.cgroup import Subtree
from hive.link.leases import HolderState, LeaseGrant
from hive.sandbox.lease_sessions import SessionPlaces
from hive.settings.table import Paths
from tests import nobody
from tests.sandbox.harness import PYTHON, SLEEP, alive
from tests.sandbox.lease_callers import LEASE, Incomer, connected, end_all, end_incomers, gone, helper
from tests.waiting import until

BUSY = "import time\nwhile True: time.sleep(1000)"
DOUBLE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""
"""Leaves a grandchild in a session of its own whose parent has ended."""
STUBBORN = """
import signal, os, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def nothing_left(paths: Paths) -> Iterator[None]:
    yield
    end_incomers(paths)


def program(text: str, *words: str) -> list[str]:
    return [PYTHON, "-S", "-c", text, *words]


# --- coming in ---------------------------------------------------------------------------------------------------


async def test_a_process_comes_in_and_becomes_its_program(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP, accounts={"cpu": 700}, label="sleep")
        running = await daemon.told(HolderState.RUNNING)
        assert (running.id, running.token, running.pid) == (LEASE, 1, incomer.pid)
        assert running.held_by == ("cgroup" if freezer == "cgroup" else "session")
        assert (running.enforced, running.why) == ("", "")
        assert running.grant is not None
        assert running.grant.label == "sleep"
        now = (await daemon.client.leases())[LEASE]
        assert now.pids == [incomer.pid]
        assert now.bytes is not None
        incomer.process.terminate()
        assert await incomer.ended() == -signal.SIGTERM
        ended = await daemon.told(HolderState.ENDED)
        assert (ended.pid, ended.pids, ended.why, ended.bytes) == (0, [], "", None)
        assert daemon.states() == ["running", "ended"]


async def test_the_socket_is_for_this_user_alone(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer):
        assert stat.S_IMODE(paths.lease_socket.stat().st_mode) == 0o600
    assert not paths.lease_socket.exists()


async def test_its_memory_is_that_of_all_its_processes(paths: Paths, freezer: str) -> None:
    holds = "import os, time\nos.fork()\nheld = os.urandom(30 << 20)\nprint(1, flush=True)\ntime.sleep(1000)"
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(holds))
        await incomer.line()
        await incomer.line()
        held = (await daemon.client.leases())[LEASE].bytes
        assert held is not None
        assert 60 << 20 < held < 120 << 20


async def test_a_nonce_is_valid_once(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        first = Incomer(paths, grant.nonce, *SLEEP)
        assert (await first.answer())["ok"]
        second = Incomer(paths, grant.nonce, *SLEEP)
        refused = await second.answer()
        assert (refused["ok"], refused["code"]) == (False, "not_permitted")
        assert "used already" in refused["message"]
        assert await second.ended() == 9
        assert (await daemon.client.leases())[LEASE].pids == [first.pid]


async def test_a_nonce_of_no_lease_lets_nobody_in(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        await daemon.grant()
        refused = await Incomer(paths, "0" * 32, *SLEEP).answer()
        assert (refused["ok"], refused["code"]) == (False, "not_found")
        assert (await daemon.client.leases())[LEASE].state is HolderState.EXPECTED


async def test_the_nonce_is_void_after_its_lease_ended(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        await daemon.client.lease_end(LEASE, "taken back", grace_s=5)
        refused = await Incomer(paths, grant.nonce, *SLEEP).answer()
        assert (refused["ok"], refused["code"]) == (False, "wrong_state")
        assert refused["message"] == f"lease {LEASE} is over: taken back"
        assert (await daemon.told(HolderState.ENDED)).why == "taken back"


async def test_nobody_comes(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        await daemon.grant(wait_s=0.2)
        ended = await daemon.told(HolderState.ENDED)
        assert ended.why == "nobody came for it in time"


@pytest.mark.root
async def test_another_user_than_the_grants_is_not_let_in(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant(uid=nobody.NOBODY)
        refused = await Incomer(paths, grant.nonce, *SLEEP).answer()
        assert (refused["ok"], refused["code"]) == (False, "not_permitted")
        assert f"granted to uid {nobody.NOBODY}, not to 0" in refused["message"]


async def test_a_service_of_hive_comes_into_no_lease(paths: Paths, freezer: str) -> None:
    """A daemon that was taken over would leave its unit so: it may name any uid in a grant."""
    async with helper(paths, freezer, services=frozenset({os.geteuid()})), connected(paths) as daemon:
        grant = await daemon.grant()
        refused = await Incomer(paths, grant.nonce, *SLEEP).answer()
        assert (refused["ok"], refused["code"]) == (False, "not_permitted")
        assert refused["message"] == "a service of Hive holds no lease"
        assert (await daemon.client.leases())[LEASE].state is HolderState.EXPECTED


def in_namespace(paths: Paths, nonce: str) -> Incomer:
    return Incomer(paths, nonce, *SLEEP, before=["unshare", "--pid", "--fork", "--kill-child"])


@pytest.mark.root
async def test_a_process_of_another_pid_namespace_is_not_let_in(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        refused = await in_namespace(paths, grant.nonce).answer()
        assert (refused["ok"], refused["code"]) == (False, "other_namespace")
        assert (await daemon.client.leases())[LEASE].pids == []


@pytest.mark.root
async def test_pid_0_is_nobody(paths: Paths) -> None:
    """A helper in a pid namespace of its own sees callers from outside as pid 0."""
    seen = """
import asyncio, sys
from pathlib import Path
from hive.holders.lease_socket import LeaseSocket
async def admit(caller): raise AssertionError(caller)
async def main():
    LeaseSocket(Path(sys.argv[1]), group=None, admit=admit)
    print("listens", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    paths.runtime.mkdir(mode=0o711)
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-P", "-c", seen, str(paths.lease_socket)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as listens:
        assert listens.stdout is not None
        listens.stdout.readline()
        refused = await Incomer(paths, "0" * 32, *SLEEP).answer()
        listens.kill()  # unshare ignores SIGTERM
    assert (refused["ok"], refused["code"]) == (False, "other_namespace")


# --- the process of the socket, and no other ---------------------------------------------------------------------

HANDS_ON = """
import json, os, socket, sys
path, nonce, last_pid = sys.argv[1:]
if os.fork():
    os.wait()
    os._exit(0)
sock = socket.socket(socket.AF_UNIX)
sock.connect(path)
parent = os.getpid()
if os.fork():
    os._exit(0)
import time
while os.path.exists(f"/proc/{parent}"):
    time.sleep(0.001)
if last_pid:
    while True:
        open("/proc/sys/kernel/ns_last_pid", "w").write(str(parent - 1))
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        if child == parent:
            break
        os.kill(child, 9)
        os.wait()
first = json.loads(sock.makefile().readline())
if "challenge" in first:
    sock.sendall(json.dumps({"nonce": nonce, "challenge": first["challenge"]}).encode() + b"\\n")
    first = json.loads(sock.makefile().readline())
print(json.dumps(first | {"pid": parent}), flush=True)
if last_pid:
    os.kill(parent, 9)
    os.wait()
"""
"""Connects, and ends; its child holds the socket on, and says the nonce. With `last_pid` another child has the pid of
the process that connected by then."""


async def handed_on(paths: Paths, nonce: str, last_pid: str) -> dict[str, Any]:
    words = [PYTHON, "-S", "-c", HANDS_ON, str(paths.lease_socket), nonce, last_pid]
    ran = await asyncio.to_thread(subprocess.run, words, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


async def test_a_socket_that_was_handed_on_lets_nobody_in(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        refused = await handed_on(paths, grant.nonce, "")
        assert (refused["ok"], refused["code"]) == (False, "not_permitted")
        assert (await daemon.client.leases())[LEASE].pids == []
        assert (await daemon.client.leases())[LEASE].state is HolderState.EXPECTED


@pytest.mark.root
async def test_a_process_that_was_given_the_callers_pid_is_not_moved(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        refused = await handed_on(paths, grant.nonce, "recycled")
        assert (refused["ok"], refused["code"]) == (False, "not_permitted")
        assert (await daemon.client.leases())[LEASE].pids == []


async def test_what_is_no_handshake_is_refused_and_harms_nobody(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        for said in (b"\n", b"{}\n", b"[1]\n", b'{"nonce": 1}\n', b"x" * 5000, b'{"nonce": "a", "challenge": "b"}\n'):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, str(paths.lease_socket))
                await asyncio.get_running_loop().sock_sendall(sock, said)
                answer = b""
                while answer.count(b"\n") < 2:
                    piece = await asyncio.get_running_loop().sock_recv(sock, 4096)
                    if not piece:
                        break
                    answer += piece
            assert json.loads(answer.splitlines()[1])["ok"] is False
        assert (await Incomer(paths, grant.nonce, *SLEEP).answer())["ok"]


async def test_a_user_that_says_nothing_keeps_itself_out_and_only_for_a_while(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        silent = [socket.socket(socket.AF_UNIX) for _ in range(CALLERS_OF_USER)]
        for sock in silent:
            sock.connect(str(paths.lease_socket))
        incomer = Incomer(paths, grant.nonce, *SLEEP)
        asked = asyncio.create_task(incomer.answer())
        await asyncio.sleep(0.5)
        assert not asked.done()
        for sock in silent:
            sock.close()
        assert (await asked)["ok"]


# --- the end -----------------------------------------------------------------------------------------------------


async def test_kill_9_of_a_holder_ends_its_lease(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
        incomer.process.kill()
        await incomer.ended()
        assert (await daemon.told(HolderState.ENDED)).why == ""


async def test_what_was_forked_twice_and_left_its_session_still_holds(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(DOUBLE, "0"))
        left = int(await incomer.line())
        assert await incomer.ended() == 0
        now = (await daemon.client.leases())[LEASE]
        assert (now.state, now.pids) == (HolderState.RUNNING, [left])
        os.kill(left, signal.SIGKILL)
        assert (await daemon.told(HolderState.ENDED)).pids == []


async def test_an_end_reaches_what_left_its_session_and_its_parent(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(DOUBLE, "1000"))
        left = int(await incomer.line())
        await daemon.client.lease_end(LEASE, "it is over", grace_s=30)
        ended = await daemon.told(HolderState.ENDED)
        assert ended.why == "it is over"
        assert daemon.states() == ["running", "ending", "ended"]
        assert not alive(left)
        assert await incomer.ended() == -signal.SIGTERM


async def test_what_ignores_sigterm_is_killed_after_the_grace(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(STUBBORN))
        await incomer.line()
        await daemon.client.lease_end(LEASE, "over", grace_s=0.3)
        await daemon.told(HolderState.ENDED)
        assert await incomer.ended() == -signal.SIGKILL


async def test_a_second_end_with_less_grace_is_the_one_that_holds(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(STUBBORN))
        await incomer.line()
        await daemon.client.lease_end(LEASE, "first", grace_s=3000)
        await daemon.client.lease_end(LEASE, "second", grace_s=0)
        assert (await daemon.told(HolderState.ENDED)).why == "first"


async def test_one_that_was_stopped_still_holds_and_hears_the_end(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*program(BUSY))
        os.kill(incomer.pid, signal.SIGSTOP)
        assert (await daemon.client.leases())[LEASE].pids == [incomer.pid]
        assert daemon.states() == ["running"]
        await daemon.client.lease_end(LEASE, "over", grace_s=3000)
        await daemon.told(HolderState.ENDED)
        assert await incomer.ended() == -signal.SIGTERM


async def test_one_that_was_frozen_still_holds_and_hears_the_end(paths: Paths) -> None:
    async with helper(paths, "cgroup"), connected(paths) as daemon:
        incomer = await daemon.holding(*program(BUSY))
        if (subtree := Subtree.find(paths.state)) is None:
            pytest.skip("no writable cgroup v2 here")
        leaf = subtree.leaf(f"lease.{LEASE}")
        leaf.freeze()
        await until(leaf.is_frozen)
        assert (await daemon.client.leases())[LEASE].state is HolderState.RUNNING
        await daemon.client.lease_end(LEASE, "over", grace_s=3000)
        await daemon.told(HolderState.ENDED)
        assert await incomer.ended() == -signal.SIGTERM


async def test_its_time_ends_it_without_a_daemon(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer):
        async with connected(paths) as daemon:
            incomer = await daemon.holding(*SLEEP, max_s=0.3)
        assert await incomer.ended() == -signal.SIGTERM
        async with connected(paths) as daemon:
            assert (await gone(daemon)).why == "its time of 0.3 s is over"


async def test_a_program_that_is_not_there_gives_the_lease_back(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        grant = await daemon.grant()
        incomer = Incomer(paths, grant.nonce, "/no/such/program", stderr=subprocess.DEVNULL)
        assert (await incomer.answer())["ok"]
        assert await incomer.ended() == 1
        assert (await daemon.told(HolderState.ENDED)).why == ""


async def test_an_end_touches_that_lease_alone(paths: Paths, freezer: str) -> None:
    """A daemon that was taken over can end leases, and nothing else: no message has a pid."""
    async with helper(paths, freezer), connected(paths) as daemon:
        one = await daemon.holding(*SLEEP)
        other = await daemon.holding(*SLEEP, id="l-2")
        stranger = subprocess.Popen(SLEEP)
        await daemon.client.lease_end(LEASE, "over", grace_s=30)
        await daemon.client.lease_end("l-3", "over", grace_s=0)
        await daemon.told(HolderState.ENDED)
        await one.ended()
        assert alive(other.pid)
        assert alive(stranger.pid)
        stranger.kill()
        stranger.wait()


async def test_a_fault_of_what_watches_for_the_end_is_no_end(
    paths: Paths, freezer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.holders.lease_holders.WATCH_AGAIN_S", 0.02)
    watched: list[str] = []
    for way in (GroupPlaces, SessionPlaces):
        monkeypatch.setattr(way, "hold", _failing_first(way.hold, watched))
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
        await until(lambda: len(watched) >= 3)
        assert daemon.states() == ["running"]
        incomer.process.kill()
        await daemon.told(HolderState.ENDED)


def _failing_first(made: Any, watched: list[str]) -> Any:
    """Holds whose watch has a fault at the first two looks."""

    def hold(*arguments: Any) -> Any:
        found = made(*arguments)
        right = found.over

        async def over() -> None:
            watched.append("looked")
            if len(watched) < 3:
                raise OSError("too many open files")
            await right()

        found.over = over
        return found

    return hold


# --- what is remembered ------------------------------------------------------------------------------------------


async def test_an_ended_lease_is_remembered_until_it_is_forgotten(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
        with pytest.raises(WrongState, match="has not ended"):
            await daemon.client.lease_forget(LEASE)
        incomer.process.kill()
        await daemon.told(HolderState.ENDED)
        assert (await daemon.client.leases())[LEASE].state is HolderState.ENDED
        await daemon.client.lease_forget(LEASE)
        await daemon.client.lease_forget(LEASE)
        assert await daemon.client.leases() == {}
        assert list(paths.lease_records.iterdir()) == []


async def test_a_grant_may_be_replaced_until_somebody_is_in(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        first = await daemon.grant()
        second = await daemon.grant()
        assert (await Incomer(paths, first.nonce, *SLEEP).answer())["code"] == "not_found"
        assert (await Incomer(paths, second.nonce, *SLEEP).answer())["ok"]
        with pytest.raises(WrongState, match="nobody is let in any more"):
            await daemon.grant()


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../x"},
        {"nonce": "short"},
        {"uid": -1},
        {"accounts": {"GPU 1": 1}},
        {"accounts": {"cpu": -1}},
        {"grace_s": 1e9},
        {"max_s": 0.0},
    ],
    ids=str,
)
async def test_a_grant_that_is_none_is_refused(paths: Paths, freezer: str, wrong: dict[str, Any]) -> None:
    right = {"id": LEASE, "token": 1, "nonce": "n" * 32, "uid": 0, "accounts": {"cpu": 1}}
    async with helper(paths, freezer), connected(paths) as daemon:
        with pytest.raises(BadRequest):
            await daemon.client.lease_expect(LeaseGrant(**right | wrong))  # type: ignore[arg-type]
        assert await daemon.client.leases() == {}


async def test_its_groups_are_gone_with_it(paths: Paths) -> None:
    async with helper(paths, "cgroup"), connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
        text = Path(f"/proc/{incomer.pid}/cgroup").read_text()
        if "lease" not in text:
            pytest.skip("no writable cgroup v2 here")
        incomer.process.kill()
        await incomer.ended()
        await daemon.told(HolderState.ENDED)
        named = [line.split(":", 2)[1:] for line in text.splitlines() if "lease" in line]
        groups = [Path("/sys/fs/cgroup", name or "unified", path.lstrip("/")) for name, path in named]
        assert groups
        await until(lambda: not any(group.exists() for group in groups))


async def test_all_can_be_ended(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        for number in range(1, 6):
            await daemon.holding(*SLEEP, id=f"l-{number}")
        await end_all(daemon)
        assert await daemon.client.leases() == {}
    await until(lambda: not paths.lease_socket.exists())
