"""Firecracker's API: what is asked, what the answers mean, and the client on real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from hive.domain import FirecrackerSpec
from hive.errors import DependencyDown, HiveError, TimedOut
from hive.host.firecracker import why_not_pause
from hive.http_answer import HEAD_MAX_BYTES
from hive.runtimes import vmm
from hive.runtimes.vmm import Vmm, VmmCall
from tests.fakes import fake_vmm_api
from tests.listening import Talk, listening
from tests.waiting import until

SPEC = FirecrackerSpec(kernel="/k", rootfs="/r", vcpus=2, memory_mb=512, tap="tap7", rootfs_read_only=True)

# --- what is asked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "method", "path", "fields"),
    [
        (
            vmm.machine(2, 512),
            "PUT",
            "/machine-config",
            {"vcpu_count": 2, "mem_size_mib": 512, "smt": False, "track_dirty_pages": False, "huge_pages": "None"},
        ),
        (
            vmm.boot_source("/kernel", "console=ttyS0"),
            "PUT",
            "/boot-source",
            {"kernel_image_path": "/kernel", "boot_args": "console=ttyS0"},
        ),
        (
            vmm.boot_source("/kernel", "console=ttyS0", initrd="/initrd"),
            "PUT",
            "/boot-source",
            {"kernel_image_path": "/kernel", "boot_args": "console=ttyS0", "initrd_path": "/initrd"},
        ),
        (
            vmm.root_drive("/disk", read_only=False),
            "PUT",
            "/drives/rootfs",
            {"drive_id": "rootfs", "path_on_host": "/disk", "is_root_device": True, "is_read_only": False},
        ),
        (
            vmm.network("tap0"),
            "PUT",
            "/network-interfaces/eth0",
            {"iface_id": "eth0", "host_dev_name": "tap0"},
        ),
        (vmm.vsock("/run/v.sock"), "PUT", "/vsock", {"guest_cid": 3, "uds_path": "/run/v.sock"}),
        (
            vmm.balloon(),
            "PUT",
            "/balloon",
            {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": True},
        ),
        (vmm.START, "PUT", "/actions", {"action_type": "InstanceStart"}),
        (vmm.CTRL_ALT_DEL, "PUT", "/actions", {"action_type": "SendCtrlAltDel"}),
        (vmm.PAUSE, "PATCH", "/vm", {"state": "Paused"}),
        (vmm.RESUME, "PATCH", "/vm", {"state": "Resumed"}),
        (
            vmm.snapshot_create("/s", "/m"),
            "PUT",
            "/snapshot/create",
            {"snapshot_type": "Full", "snapshot_path": "/s", "mem_file_path": "/m"},
        ),
        (
            vmm.snapshot_load("/s", "/m"),
            "PUT",
            "/snapshot/load",
            {"snapshot_path": "/s", "mem_backend": {"backend_type": "File", "backend_path": "/m"}, "resume_vm": True},
        ),
    ],
)
def test_each_call_says_exactly_this(call: VmmCall, method: str, path: str, fields: dict[str, object]) -> None:
    assert (call.method, call.path, json.loads(call.body)) == (method, path, fields)


@pytest.mark.parametrize("version", [(1, 14, 0), (1, 15, 1), (1, 16, 1), (1, 17, 0)])
def test_no_version_from_1_14_on_finds_a_field_it_does_not_know(version: tuple[int, int, int]) -> None:
    calls = vmm.boot(SPEC, kernel="/kernel", rootfs="/rootfs", uds_path="/run/v.sock")
    for call in [*calls, vmm.PAUSE, vmm.RESUME, vmm.CTRL_ALT_DEL, vmm.ASK_INSTANCE, vmm.ASK_MACHINE]:
        fake_vmm_api.parse(call.method, call.path, call.body, version)


def test_a_machine_is_configured_whole_before_it_starts() -> None:
    calls = vmm.boot(SPEC, kernel="/kernel", rootfs="/rootfs", uds_path="/run/v.sock")
    assert [call.path for call in calls] == [
        "/machine-config",
        "/boot-source",
        "/drives/rootfs",
        "/network-interfaces/eth0",
        "/vsock",
        "/balloon",
        "/actions",
    ]
    assert json.loads(calls[2].body)["is_read_only"] is True


def test_what_a_spec_does_not_want_is_not_asked_for() -> None:
    plain = FirecrackerSpec(kernel="/k", rootfs="/r", balloon=False)
    paths = [call.path for call in vmm.boot(plain, kernel="/k", rootfs="/r", uds_path="v")]
    assert not {"/balloon", "/network-interfaces/eth0"} & set(paths)


def test_a_body_has_its_length_and_a_question_has_neither() -> None:
    head, _, body = vmm.encode(vmm.PAUSE).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"Content-Length" not in vmm.encode(vmm.ASK_INSTANCE)


# --- versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "has_vsock", "refused"),
    [
        ("1.9.1", True, False),
        ("1.10.0", True, False),
        ("1.13.1", True, False),
        ("1.15.1", True, False),
        ("1.16.0", True, True),
        ("1.16.1", True, True),
        ("v1.16.1", True, True),
        ("1.16.1-dirty", True, True),
        ("1.16", True, True),
        ("1.16.0", False, False),
        ("1.16.2", True, False),
        ("1.17.0", True, False),
        ("1.17.0-dev", True, False),
        ("2.0", True, False),
        ("main", True, False),
        ("", True, False),
    ],
)
def test_only_versions_that_lose_vsock_are_not_paused(version: str, has_vsock: bool, refused: bool) -> None:
    why = why_not_pause(version, has_vsock=has_vsock)
    assert bool(why) is refused
    if refused:
        assert "1.15.1" in why  # what to do about it


# --- answers -----------------------------------------------------------------------------------------------------

OK = b'HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n\
Content-Length: 21\r\n\r\n{"state":"Running"}\r\n'
NO_CONTENT = b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"
FULL = (
    b"HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n"
    b'{ "error": "Too many open connections" }'
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"fault_message":"Device not found"}', "Device not found"),
        (b'{"error":"Too many open connections"}', "Too many open connections"),
        (b"[]", "status 400"),
        (b"{}", "status 400"),
        (b"\xff", "status 400"),
    ],
)
def test_a_refusal_is_told_in_the_vmms_words(body: bytes, said: str) -> None:
    assert vmm.fault(400, body) == said


# --- the client --------------------------------------------------------------------------------------------------


@pytest.fixture
def top() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hive-"))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def serving(path: Path, talk: Talk) -> AsyncIterator[Vmm]:
    """A VMM that does this on every connection."""
    async with listening(talk, path):
        yield Vmm(path, pid=os.getpid())


def answering(*raw: bytes) -> Talk:
    """One answer per connection, the last one again and again."""
    left = list(raw)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return talk


async def test_the_truth_is_remembered_with_its_time(top: Path) -> None:
    async with serving(top / "api", answering(OK)) as api:
        assert api.last is None
        assert (await api.ask()).state == "Running"
        assert api.last == vmm.VmmInstance(state="Running")
        assert 0 < api.last_at <= time.monotonic()


async def test_calls_take_turns(top: Path) -> None:
    under_way = most = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        await reader.readuntil(b"\r\n\r\n")
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        writer.write(NO_CONTENT)
        await writer.drain()

    async with serving(top / "api", talk) as api:
        await asyncio.gather(*(api.call(vmm.RESUME) for _ in range(5)))
    assert most == 1


async def test_a_call_that_is_not_answered_ends_after_its_own_time_and_the_next_one_goes_through(top: Path) -> None:
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        if len(heard) > 1:
            writer.write(NO_CONTENT)
            await writer.drain()
        else:
            await reader.read()

    async with serving(top / "api", talk) as api:
        with pytest.raises(TimedOut, match=r"did not answer PATCH /vm within 0\.05 s"):
            await api.call(vmm.PAUSE, limit_s=0.05)
        await api.call(vmm.RESUME)
    assert len(heard) == 2


async def test_where_ten_others_are_connected_it_waits_for_a_place(top: Path) -> None:
    async with serving(top / "api", answering(FULL, FULL, NO_CONTENT)) as api:
        await api.call(vmm.RESUME)
    async with serving(top / "api2", answering(FULL)) as full:
        with pytest.raises(TimedOut):
            await full.call(vmm.RESUME, limit_s=0.05)


async def test_a_refusal_says_what_was_refused_and_why(top: Path) -> None:
    raw = b'HTTP/1.1 400 \r\nContent-Length: 36\r\n\r\n{"fault_message":"Device not found"}'
    async with serving(top / "api", answering(raw)) as api:
        with pytest.raises(HiveError, match=r"the VMM refused PATCH /vm: Device not found") as refused:
            await api.call(vmm.PAUSE)
        assert type(refused.value) is HiveError


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\n{}", b"hello\r\n\r\n"])
async def test_a_vmm_that_hangs_up_or_talks_nonsense_is_down(top: Path, raw: bytes) -> None:
    async with serving(top / "api", answering(raw)) as api:
        with pytest.raises(DependencyDown):
            await api.call(vmm.ASK_INSTANCE)


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 \r\nContent-Length: 99999999\r\n\r\n", b"HTTP/1.1 200 \r\nx: " + b"x" * HEAD_MAX_BYTES]
)
async def test_an_answer_that_is_too_large_is_not_read(top: Path, raw: bytes) -> None:
    async with serving(top / "api", answering(raw)) as api:
        with pytest.raises(DependencyDown, match="with more than"):
            await api.call(vmm.ASK_INSTANCE)


@pytest.mark.parametrize("body", [b"[]", b'{"state":1}', b"{}"])
async def test_a_vmm_that_does_not_say_its_state_is_down(top: Path, body: bytes) -> None:
    raw = b"HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with serving(top / "api", answering(raw)) as api:
        with pytest.raises(DependencyDown):
            await api.ask()
        assert api.last is None


async def test_nobody_listening_is_down(top: Path) -> None:
    with pytest.raises(DependencyDown, match="No such file"):
        await Vmm(top / "nowhere", pid=os.getpid()).ask()
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(str(top / "dead"))
    with pytest.raises(DependencyDown, match="refused"):
        await Vmm(top / "dead", pid=os.getpid()).ask()


async def test_another_process_in_the_vmms_place_hears_nothing(top: Path) -> None:
    """As root, a link in the jail could lead the helper to any socket of the host."""
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())

    async with serving(top / "theirs", talk):
        (top / "api").symlink_to(top / "theirs")
        with pytest.raises(DependencyDown, match=f"served by process {os.getpid()}, not by the VMM 1"):
            await Vmm(top / "api", pid=1).call(vmm.PAUSE)
        await until(lambda: heard)
    assert heard == [b""]


async def test_its_socket_may_have_a_path_of_any_length(top: Path) -> None:
    deep = top / ("d" * 100)
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    try:
        async with serving(Path(f"/proc/self/fd/{here}/api"), answering(OK)):
            assert len(os.fsencode(deep / "api")) > 107
            assert (await Vmm(deep / "api", pid=os.getpid()).ask()).state == "Running"
    finally:
        os.close(here)


async def test_a_full_backlog_is_waited_for_and_no_longer_than_the_call(top: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(socket.socket(socket.AF_UNIX)) as first:
        listener.bind(str(top / "api"))
        listener.listen(0)
        first.connect(str(top / "api"))
        with pytest.raises(TimedOut):
            await Vmm(top / "api", pid=os.getpid()).call(vmm.PAUSE, limit_s=0.05)
