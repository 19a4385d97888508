"""bpf(2): programs that the kernel runs for each packet of a control group. Needs no library and no compiler."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

from hive.errors import HiveError, NotPermitted, NotSupported

INGRESS, EGRESS = 0, 1
"""Directions a program is attached for (linux/bpf.h, BPF_CGROUP_INET_…)."""
_NUMBERS = {"x86_64": 321, "aarch64": 280}
"""Of the system call, on the little-endian machines Hive runs on."""
_PROG_LOAD, _PROG_ATTACH, _PROG_TEST_RUN = 5, 8, 10
_CGROUP_SKB = 8
_LOG_BYTES = 65536

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """The reason that no program can be loaded here, empty where perhaps one can."""
    return "" if platform.machine() in _NUMBERS else f"packet filters: not for {platform.machine()} yet"


def load(instructions: bytes, direction: int) -> int:
    """A descriptor of the program, the caller's. Raises NotPermitted, NotSupported, HiveError."""
    code, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(b"none")
    log = ctypes.create_string_buffer(_LOG_BYTES)

    def attributes(log_level: int) -> bytes:
        log_at = ctypes.addressof(log) if log_level else 0
        return struct.pack(
            "=IIQQIIQII16sII",
            _CGROUP_SKB,
            len(instructions) // 8,
            ctypes.addressof(code),
            ctypes.addressof(licence),
            log_level,
            _LOG_BYTES if log_level else 0,
            log_at,
            0,
            0,
            b"hive",
            0,
            direction,
        )

    try:
        return _call(_PROG_LOAD, attributes(0))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL):
            raise _translate("a packet filter cannot be loaded", error) from error
        try:  # once more, for what the kernel has against it
            return _call(_PROG_LOAD, attributes(1))
        except OSError as again:
            said = [
                line for line in log.value.decode(errors="replace").splitlines() if not line.startswith("processed ")
            ]
            raise HiveError(f"the kernel refuses a packet filter: {' '.join(said[-1:]) or again.strerror}") from error


def attach(group: Path, program: int, direction: int) -> None:
    """The program decides over each packet of the sockets made in the control group `group` (v2), in place of one that
    was attached so before; those of the groups above decide too. It lasts as long as the group.

    Raises NotPermitted, NotSupported, HiveError.
    """
    try:
        directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HiveError(f"no control group {group}: {error.strerror}") from error
    try:
        _call(_PROG_ATTACH, struct.pack("=IIII", directory, program, direction, 0))
    except OSError as error:
        raise _translate(f"a packet filter cannot be put on {group}", error) from error
    finally:
        os.close(directory)


def try_on(program: int, frame: bytes, interface: int) -> int:
    """Runs the program on an Ethernet frame at the network interface of this index: 1 where it lets the frame pass.

    Raises HiveError.
    """
    data = ctypes.create_string_buffer(frame, len(frame))
    context = ctypes.create_string_buffer(struct.pack("=40xI", interface), 44)
    attributes = bytearray(
        struct.pack(
            "=IIIIQQIIIIQQ",
            program,
            0,
            len(frame),
            0,
            ctypes.addressof(data),
            0,
            1,
            0,
            len(context),
            0,
            ctypes.addressof(context),
            0,
        )
    )
    try:
        _call(_PROG_TEST_RUN, attributes)
    except OSError as error:
        raise _translate("a packet filter cannot be tried", error) from error
    return int(struct.unpack_from("=I", attributes, 4)[0])


def _call(command: int, attributes: bytes | bytearray) -> int:
    """`attributes`, a bytearray, is then as the kernel left it. Raises OSError."""
    if (number := _NUMBERS.get(platform.machine())) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    buffer = ctypes.create_string_buffer(bytes(attributes), len(attributes))
    result = int(_libc.syscall(number, command, buffer, len(attributes)))
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    if isinstance(attributes, bytearray):
        attributes[:] = buffer.raw
    return result


def _translate(failed: str, error: OSError) -> HiveError:
    message = f"{failed}: {error.strerror}"
    if isinstance(error, PermissionError):
        return NotPermitted(message)
    return NotSupported(message) if error.errno in (errno.ENOSYS, errno.EINVAL) else HiveError(message)
