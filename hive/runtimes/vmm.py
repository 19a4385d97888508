"""Firecracker's API: what there is to ask (pure), and the client that asks it over the VMM's unix socket.

Field names, answers and limits are those of Firecracker 1.14 to 1.17 (swagger/firecracker.yaml, micro-http).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hive.domain import FirecrackerSpec
from hive.errors import DependencyDown, HiveError, TimedOut
from hive.host.http_call import AGAIN_S, calling, connected_unix, streams_of
from hive.http_answer import CallFailed, HungUp, NotHttp, encode_request
from hive.link.server import peer_of

NOT_STARTED, RUNNING, PAUSED = "Not started", "Running", "Paused"
"""States of a machine in the answer of `GET /`."""
SWAPPABLE_PAGES = frozenset({"None", "Transparent"})
"""Values of `huge_pages` (the third is `2M`, hugetlbfs)."""
GUEST_CID = 3
"""The CID of every guest: Firecracker shows no context id on the host, the path of a socket tells guests apart."""
CALL_S = 1.0
"""For what the VMM answers at once (its own logs say 29 to 265 µs a call, firecracker PR 4562)."""
BOOT_S = 10.0
"""For `InstanceStart`, which loads the kernel."""
ANSWER_MAX_BYTES = 1 << 20

Shape = TypeVar("Shape")


# --- what there is to ask ----------------------------------------------------------------------------------------


class VmmCall(NamedTuple):
    """One request. `body` is JSON; the VMM wants one with PUT and PATCH, and none with GET."""

    method: str
    path: str
    body: bytes = b""

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"


def _put(path: str, **fields: object) -> VmmCall:
    return VmmCall("PUT", path, msgspec.json.encode(fields))


def _patch(path: str, **fields: object) -> VmmCall:
    return VmmCall("PATCH", path, msgspec.json.encode(fields))


ASK_INSTANCE = VmmCall("GET", "/")
ASK_MACHINE = VmmCall("GET", "/machine-config")
START = _put("/actions", action_type="InstanceStart")
CTRL_ALT_DEL = _put("/actions", action_type="SendCtrlAltDel")
"""Does nothing while the machine is paused, and says 204 all the same."""
PAUSE = _patch("/vm", state="Paused")
RESUME = _patch("/vm", state="Resumed")


def machine(vcpus: int, memory_mb: int) -> VmmCall:
    """Never huge pages: those cannot be swapped out, so no deep sleep."""
    return _put(
        "/machine-config",
        vcpu_count=vcpus,
        mem_size_mib=memory_mb,
        smt=False,
        track_dirty_pages=False,
        huge_pages="None",
    )


def boot_source(kernel: str, arguments: str, *, initrd: str = "") -> VmmCall:
    """`initrd` empty: the kernel mounts its root by itself."""
    more = {"initrd_path": initrd} if initrd else {}
    return _put("/boot-source", kernel_image_path=kernel, boot_args=arguments, **more)


def root_drive(path: str, *, read_only: bool) -> VmmCall:
    return _put("/drives/rootfs", drive_id="rootfs", path_on_host=path, is_root_device=True, is_read_only=read_only)


def network(tap: str) -> VmmCall:
    return _put("/network-interfaces/eth0", iface_id="eth0", host_dev_name=tap)


def vsock(uds_path: str) -> VmmCall:
    """The VMM binds `uds_path`, which must not exist yet; it connects to `<uds_path>_<port>` for its guest."""
    return _put("/vsock", guest_cid=GUEST_CID, uds_path=uds_path)


def balloon() -> VmmCall:
    """Empty, but its guest reports the pages it freed, and the host has them back (Firecracker 1.14)."""
    return _put("/balloon", amount_mib=0, deflate_on_oom=True, free_page_reporting=True)


def snapshot_create(state: str, memory: str) -> VmmCall:
    """The call for a snapshot of a paused machine; full, because a diff without dirty page tracking misses swap."""
    return _put("/snapshot/create", snapshot_type="Full", snapshot_path=state, mem_file_path=memory)


def snapshot_load(state: str, memory: str) -> VmmCall:
    """Into a VMM that was configured with nothing; it ends where this fails."""
    return _put(
        "/snapshot/load",
        snapshot_path=state,
        mem_backend={"backend_type": "File", "backend_path": memory},
        resume_vm=True,
    )


def boot(spec: FirecrackerSpec, *, kernel: str, rootfs: str, uds_path: str, initrd: str = "") -> list[VmmCall]:
    """All calls to a new VMM until its guest runs; the paths are as the VMM sees them.

    >>> [call.path for call in boot(FirecrackerSpec(kernel="", rootfs=""), kernel="/k", rootfs="/r", uds_path="/v")]
    ['/machine-config', '/boot-source', '/drives/rootfs', '/vsock', '/balloon', '/actions']
    """
    calls = [
        machine(spec.vcpus, spec.memory_mb),
        boot_source(kernel, spec.kernel_args, initrd=initrd),
        root_drive(rootfs, read_only=spec.rootfs_read_only),
    ]
    if spec.tap:
        calls.append(network(spec.tap))
    calls.append(vsock(uds_path))
    if spec.balloon:
        calls.append(balloon())
    return [*calls, START]


# --- HTTP --------------------------------------------------------------------------------------------------------


class MachineConfig(msgspec.Struct, frozen=True):
    """The fields of the answer of `GET /machine-config` that are of use here."""

    huge_pages: str = "None"


class VmmInstance(msgspec.Struct, frozen=True):
    """The answer of `GET /`. `state` is one of the three above."""

    state: str
    vmm_version: str = ""


def encode(call: VmmCall) -> bytes:
    """The request's bytes. A body has its length: the VMM understands no chunks."""
    fields = {"Host": "localhost", "Accept": "application/json"}
    if call.body:
        fields["Content-Type"] = "application/json"
    return encode_request(call.method, call.path, fields, call.body or None)


def fault(status: int, body: bytes) -> str:
    """The fault named by an answer other than 2xx.

    >>> fault(400, b'{"fault_message":"Device not found"}'), fault(503, b"busy")
    ('Device not found', 'status 503')
    """
    with contextlib.suppress(msgspec.MsgspecError):
        said = msgspec.json.decode(body, type=dict[str, object])
        if message := said.get("fault_message") or said.get("error"):
            return str(message)[:500]
    return f"status {status}"


class Vmm:
    """The API of one VMM: one call at a time, each on a connection of its own and with its own deadline.

    `last`: what it said last of itself, and `last_at` when (monotonic); None before that.
    """

    def __init__(self, path: Path, *, pid: int) -> None:
        """`path`: its API socket on the host, of any length; `pid`: the process that must be the one listening there.

        A user with the VMM's rights can put a link to another socket in its place: nothing is sent to that one.
        """
        self._path = path
        self._pid = pid
        self._turn = asyncio.Lock()
        self.last: VmmInstance | None = None
        self.last_at = 0.0

    def __repr__(self) -> str:
        return f"<Vmm {self._pid} {self.last.state if self.last else 'not heard of'}>"

    async def call(self, call: VmmCall, *, limit_s: float = CALL_S) -> bytes:
        """The body of its answer, after those of all earlier calls; its API thread works at one at a time too.

        Raises TimedOut after `limit_s` (it may still happen), DependencyDown where nobody listens or somebody else,
        HiveError with what the VMM says against it.
        """
        async with self._turn:
            return await self._call(call, limit_s)

    async def ask(self, *, limit_s: float = CALL_S) -> VmmInstance:
        """Ground truth: `GET /`. Raises as `call`."""
        async with self._turn:
            self.last = _decode(await self._call(ASK_INSTANCE, limit_s), VmmInstance)
            self.last_at = time.monotonic()
            return self.last

    async def ask_huge_pages(self) -> str:
        """The kind of pages of its guest's memory; `SWAPPABLE_PAGES` can be swapped out. Raises as `call`."""
        return _decode(await self.call(ASK_MACHINE), MachineConfig).huge_pages

    async def _call(self, call: VmmCall, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                while (answer := await self._exchange(call)) is None:  # noqa: ASYNC110 - no event says that it has room
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            raise TimedOut(f"the VMM did not answer {call!r} within {limit_s:g} s") from None
        except OSError as error:
            raise DependencyDown(f"the VMM does not answer {call!r}: {error.strerror or error}") from error
        except HungUp as error:
            raise DependencyDown(f"the VMM hung up on {call!r}") from error
        except NotHttp as error:
            raise DependencyDown(f"the VMM answers with {error.begin!r}") from error
        except CallFailed as error:
            raise DependencyDown(f"the VMM answers {call!r} with more than {ANSWER_MAX_BYTES} bytes") from error
        status, body = answer
        if status // 100 != 2:
            raise HiveError(f"the VMM refused {call!r}: {fault(status, body)}")
        return body

    async def _exchange(self, call: VmmCall) -> tuple[int, bytes] | None:
        """Status and body; None where it has no connection left (503, or hung up before the request was written)."""
        async with calling(streams_of(await self._connected()), encode(call)) as asking:
            try:
                status = await asking.status()
                body = await asking.body(ANSWER_MAX_BYTES)
            except BrokenPipeError:
                return None
        return None if status == 503 else (status, body)

    async def _connected(self) -> socket.socket:
        sock = await connected_unix(self._path)
        if (pid := peer_of(sock)[0]) != self._pid:
            sock.close()
            raise DependencyDown(f"{self._path} is served by process {pid}, not by the VMM {self._pid}")
        return sock


def _decode(body: bytes, kind: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise DependencyDown(f"the VMM says of itself {body[:100]!r}: {error}") from error
