"""The system calls that the fork server and its children make beside those Python has."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import mmap
import os
import socket
import struct

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_CAPBSET_DROP = 24
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_SET_MM = 35
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
PR_SET_MM_MAP = 14
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
MCL_CURRENT, MCL_ONFAULT = 1, 4
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.sbrk.restype = ctypes.c_void_p


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, second: int = 0, third: object = 0, fourth: int = 0) -> None:
    """prctl(2). Raises OSError."""
    arguments = (
        each if isinstance(each, ctypes.c_void_p) else ctypes.c_ulong(each) for each in (second, third, fourth)
    )
    _call("prctl", ctypes.c_int(option), *arguments, ctypes.c_ulong(0))


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _call("unshare", ctypes.c_int(flags))


def bring_up_loopback() -> None:
    """Brings `lo` up, which is down in a new network. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def lock_memory() -> None:
    """Keeps in RAM what is there now, and what is touched of it later; children do not inherit that. Raises OSError."""
    _call("mlockall", ctypes.c_int(MCL_CURRENT | MCL_ONFAULT))


def become_user(uid: int, gid: int) -> None:
    """Becomes that user for good, without groups and without a capability, bounding set and all. Raises OSError.

    A user that is not root keeps its capabilities when it becomes another: they are given up one by one.
    """
    drop_bounding_set()
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    _call("capset", ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def drop_bounding_set() -> None:
    """No program started from here may get a capability. Raises OSError."""
    for capability in range(64):
        if _libc.prctl(ctypes.c_int(PR_CAPBSET_DROP), ctypes.c_ulong(capability), 0, 0, 0) != 0:
            number = ctypes.get_errno()
            if number == 22:  # EINVAL: past the last that this kernel has
                return
            raise OSError(number, os.strerror(number))


def load_filter(encoded: str) -> None:
    """Loads a seccomp program, `struct sock_filter`s in base64. Raises OSError."""
    program = base64.b64decode(encoded)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(_address(header)))


_kept: list[object] = []


def _address(content: bytes) -> int:
    buffer = ctypes.create_string_buffer(content, len(content))
    _kept.append(buffer)
    return ctypes.addressof(buffer)


def show_as(argv: list[bytes], environment: list[bytes]) -> None:
    """From now on /proc shows these as this process's command line and environment, for `ps` and for Hive.

    Raises OSError: EINVAL where the kernel was built without CONFIG_CHECKPOINT_RESTORE (Debian's has it).
    """
    words = b"".join(word + b"\0" for word in argv)
    content = words + b"".join(entry + b"\0" for entry in environment)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = ctypes.c_size_t(len(content))
    start = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, ctypes.c_long(0))
    if start in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no memory")
    ctypes.memmove(start, content, len(content))  # for as long as the process lives
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    # proc(5): startcode, endcode, startstack are fields 26 to 28 (the state is 3), start_data to start_brk 45 to 47.
    start_code, end_code, start_stack = (int(fields[at - 3]) for at in (26, 27, 28))
    start_data, end_data, start_brk = (int(fields[at - 3]) for at in (45, 46, 47))
    ends = start, start + len(words), start + len(words), start + len(content)
    layout = (start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0), start_stack, *ends, 0)
    description = struct.pack("=12QII", *layout, 0, 0xFFFFFFFF)
    prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_void_p(_address(description)), len(description))
