"""Steps by which a template and its children confine themselves: systemd does them only for programs it starts.

Part of a program of another environment (any Python from 3.9 on): the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_STRICTATIME = 1, 2, 4, 32, 4096, 1 << 24
MOVE_MOUNT, MOVE_MOUNT_F_EMPTY_PATH = 429, 4
AT_FDCWD = -100
KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
TMPFS = "size=10%,nr_inodes=400k"
"""Limits of what systemd mounts for TemporaryFileSystem=."""
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = "/proc/sys/kernel/cap_last_cap"

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library that returns -1 where it fails. Raises OSError."""
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> None:
    """prctl(2). Raises OSError."""
    call("prctl", option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))


def drop_rights() -> None:
    """No capability is left, and none can be got again, not by a program that is executed either. Raises OSError.

    In a user namespace a change from one uid to another takes no capability away: root has none of its own there.
    """
    with open(LAST_CAPABILITY) as file:
        last = int(file.read())
    for number in range(last + 1):
        prctl(PR_CAPBSET_DROP, number)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    call("capset", header, struct.pack("=6I", 0, 0, 0, 0, 0, 0))


def become(uid: int, gid: int) -> None:
    """This user, in no other group, and dumpable: a process that changed its user may not look at itself in /proc."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def forbid_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def be_dumpable() -> None:
    """After every change of uid or rights, which take it away: what is not may not open its own /proc/self/fd."""
    prctl(PR_SET_DUMPABLE, 1)


def load_filter(program: bytes) -> None:
    """A filter of system calls for good, besides those there are: a BPF program (seccomp(2)). Raises OSError."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    filled = Program(len(program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filled))


def own_mounts(place: dict[str, Any], fds: list[int]) -> None:
    """Makes the child's own view of the files, and its own IPC, host name and keyring. Raises OSError.

    `place`: `empty` are directories that get an empty file system of their own, which is read-only in the end; `fresh`
    such that anybody may write to; `trees` are the places of the descriptors, mounts that the helper made.
    """
    call("unshare", ctypes.c_int(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS))
    os.umask(0o022)  # another user passes through what is made here; the caller sets the agent's
    for path in place["empty"]:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,{TMPFS}")
    for path in place["fresh"]:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV | MS_STRICTATIME, f"mode=1777,{TMPFS}")
    for at, path in enumerate(place["trees"]):
        fd = fds[at]
        os.makedirs(path, exist_ok=True)
        words = ctypes.c_int(fd), b"", ctypes.c_int(AT_FDCWD), os.fsencode(path), ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH)
        call("syscall", ctypes.c_long(MOVE_MOUNT), *words)
        os.close(fd)
    for path in place["empty"]:
        _mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, "")
    keyctl = KEYCTL.get(platform.machine())
    if keyctl is not None:
        _libc.syscall(ctypes.c_long(keyctl), ctypes.c_int(KEYCTL_JOIN_SESSION_KEYRING), None)  # a kernel may have none


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    call("mount", *words)
