"""System calls of the fork server and its children that Python has not; unit_setup.py has those that confine."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_MM, PR_SET_MM_MAP = 35, 14
MCL_CURRENT, MCL_ONFAULT = 1, 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.sbrk.restype = ctypes.c_void_p


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
    arguments = ctypes.c_ulong(PR_SET_MM_MAP), description, ctypes.c_ulong(len(description)), ctypes.c_ulong(0)
    _call("prctl", ctypes.c_int(PR_SET_MM), *arguments)
