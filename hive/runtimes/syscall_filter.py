"""Filters of system calls for templates and their children, as the kernel takes them (seccomp(2)). Pure.

systemd puts its filters on a program that it starts. What a template forks has those of the template's unit, and needs
one more: the template may unshare and mount for its children, the children may not. A filter cannot be taken off.
"""

from __future__ import annotations

import base64
import errno
import platform
import struct
from typing import NamedTuple

NEW_USER = 0x10000000
NEW_ANY = 0x7E020000
"""Flags of clone(2) that make a namespace: mount, cgroup, UTS, IPC, user, pid, network."""
NEW_TIME = 0x80
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
X32 = 0x40000000
"""Bit of the system calls of a second kind that x86-64 has."""
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16


class Machine(NamedTuple):
    """The numbers of one architecture; from 424 on they are the same on all."""

    architecture: int
    clone: int
    unshare: int
    setns: int
    ptrace: int
    mount: int
    umount2: int
    pivot_root: int
    chroot: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 56, 272, 308, 101, 165, 166, 155, 161),
    "aarch64": Machine(0xC00000B7, 220, 97, 268, 117, 40, 39, 41, 51),
}
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, FSPICK, CLONE3, MOUNT_SETATTR = 428, 429, 430, 431, 432, 433, 435, 442
NEW_MOUNT_CALLS = (OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, FSPICK, MOUNT_SETATTR)


def why_no_filter(machine: str = "") -> str:
    """The reason that no filter can be made for this kind of machine, empty where one can.

    >>> why_no_filter("x86_64"), why_no_filter("riscv64")
    ('', 'the numbers of the system calls of riscv64 are not known')
    """
    machine = machine or platform.machine()
    return "" if machine in MACHINES else f"the numbers of the system calls of {machine} are not known"


def for_template(machine: str = "") -> str:
    """In base64, of a template that is in its user namespace: it makes no other one, and looks into no process."""
    of = MACHINES[machine or platform.machine()]
    return _encoded(of, refused=[of.ptrace, of.setns], flags={of.clone: NEW_USER, of.unshare: NEW_USER})


def for_child(machine: str = "") -> str:
    """In base64, of its children: no namespace, no mount (systemd.exec(5), RestrictNamespaces=yes)."""
    of = MACHINES[machine or platform.machine()]
    refused = [of.ptrace, of.setns, of.mount, of.umount2, of.pivot_root, of.chroot, *NEW_MOUNT_CALLS]
    return _encoded(of, refused=refused, flags={of.clone: NEW_ANY, of.unshare: NEW_ANY | NEW_TIME})


def _encoded(machine: Machine, *, refused: list[int], flags: dict[int, int]) -> str:
    """`refused`: numbers that fail with EPERM; `flags`: of these, if one of the flags is in the first argument.

    clone3 fails with ENOSYS, as its flags lie where no filter can look; a C library takes clone then.
    """
    program = [
        _step(LOAD, AT_ARCHITECTURE),
        _step(JUMP_EQUAL, machine.architecture, 1, 0),
        _step(RETURN, ERRNO | errno.EPERM),
        _step(LOAD, AT_NUMBER),
        _step(JUMP_GREATER_EQUAL, X32, 0, 1),
        _step(RETURN, ERRNO | errno.EPERM),
        _step(JUMP_EQUAL, CLONE3, 0, 1),
        _step(RETURN, ERRNO | errno.ENOSYS),
    ]
    for number in refused:
        program += [_step(JUMP_EQUAL, number, 0, 1), _step(RETURN, ERRNO | errno.EPERM)]
    for number, mask in flags.items():
        program += [
            _step(JUMP_EQUAL, number, 0, 4),
            _step(LOAD, AT_FIRST_ARGUMENT),
            _step(JUMP_IF_SET, mask, 0, 1),
            _step(RETURN, ERRNO | errno.EPERM),
            _step(RETURN, ALLOW),
        ]
    return base64.b64encode(b"".join([*program, _step(RETURN, ALLOW)])).decode()


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
