"""A template's stand-in whose child is in order but for one lie: `lying_template.py UID LIE`, its socket is fd 3.

It tells "made" once it has its user namespace, and forks for each packet it is sent, which brings the child's streams
and its end of a socket pair. The child answers there with a pidfd and waits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "hive/templates"))
import unit_setup  # type: ignore[import-not-found]

FIRST, LIE = int(sys.argv[1]), sys.argv[2]
ALLOW_ALL = b"\x06\x00\x00\x00\x00\x00\xff\x7f"
PTRACE_SEIZE = 0x4206
OWN = {"net": unit_setup.CLONE_NEWNET, "mnt": unit_setup.CLONE_NEWNS}
OWN |= {"ipc": unit_setup.CLONE_NEWIPC, "uts": unit_setup.CLONE_NEWUTS}


def set_up(keep: int) -> None:
    """All that a child owes, without what the lie is about."""
    for name, kind in OWN.items():
        if name != LIE:
            unit_setup.call("unshare", kind)
    uid = FIRST + (8 if LIE == "uid" else 7)
    os.setgroups([FIRST + 9] if LIE == "groups" else [])
    gid = FIRST + (8 if LIE == "gid" else 7)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, FIRST if LIE == "saved uid" else uid)
    if LIE != "privileges":
        unit_setup.forbid_new_privileges()
    if LIE != "seccomp":
        unit_setup.load_filter(ALLOW_ALL)
    if LIE not in ("capabilities", "bounding"):
        unit_setup.drop_rights()
    if LIE == "bounding":
        unit_setup.call("capset", b"\x22\x05\x08\x20" + bytes(4), bytes(24))
    unit_setup.prctl(unit_setup.PR_SET_DUMPABLE, 0 if LIE == "dumpable" else 1)
    if LIE == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    if LIE == "second child" and os.fork() == 0:
        signal.pause()
    os.closerange(3, keep)
    os.closerange(keep + 1, 1000)
    if LIE == "descriptor":
        os.open("/etc/passwd", os.O_RDONLY)


def child(control: socket.socket, descriptors: list[int]) -> None:
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    told = socket.socket(fileno=os.dup2(descriptors[1], 100))
    set_up(100)
    if LIE == "no socket":
        os.dup2(1, 100)
    pid = os.getppid() if LIE == "its own pid" else os.getpid()
    pidfd = os.pidfd_open(pid)
    if LIE == "a file":
        os.dup2(os.open("/etc/passwd", os.O_RDONLY), pidfd)
    if LIE == "no socket":
        signal.pause()
    socket.send_fds(told, [b"me"], [pidfd])
    os.close(pidfd)
    while LIE == "traced" and b"TracerPid:\t0" in Path("/proc/self/status").read_bytes():
        time.sleep(0.005)
    told.send(b"there")
    if LIE == "dead":
        os._exit(1)
    told.recv(100)
    os._exit(0)


def main() -> None:
    control = socket.socket(fileno=3)
    os.setgroups([])
    os.setresgid(FIRST, FIRST, FIRST)
    os.setresuid(FIRST, FIRST, FIRST)
    unit_setup.be_dumpable()
    if LIE != "user":
        unit_setup.call("unshare", unit_setup.CLONE_NEWUSER)
    control.send(b"made")
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, 100, 8)
        if not packet:
            return
        forked = os.fork()
        if forked == 0:
            child(control, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if LIE == "traced":
            time.sleep(0.3)
            ptrace = ctypes.CDLL(None, use_errno=True).ptrace
            if ptrace(PTRACE_SEIZE, forked, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "ptrace")


main()
