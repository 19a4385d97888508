"""Network namespaces: made with nothing in them but `lo`, entered, and listened and connected in from outside.

The kernel keeps a namespace for as long as a process is in it, or a descriptor of it or a socket made in it is open.
What must happen inside happens in a thread of its own that ends afterwards: a namespace is a thread's, and no other
work may ever run in the wrong one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from hive.errors import HiveError, NotPermitted, WrongState

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
BACKLOG = 1024
"""As the agents' unix sockets have it."""

_libc = ctypes.CDLL(None, use_errno=True)
Result = TypeVar("Result")


class Private(NamedTuple):
    """A new namespace (`fd`, the caller closes it) and a socket that listens on its 127.0.0.1."""

    fd: int
    sock: socket.socket


def make(port: int) -> Private:
    """A network namespace that reaches nothing, and a socket listening at 127.0.0.1:`port` in it.

    The socket is there before any program: what starts inside never finds the door closed. Takes 2 ms, 40 ms while
    many are taken down. Raises NotPermitted where this process may not (it takes root), HiveError.
    """

    def work() -> Private:
        _call("unshare", CLONE_NEWNET)
        _bring_up_loopback()
        fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Private(fd, _listen(port))
        except OSError:
            os.close(fd)
            raise

    return _in_a_thread("a network of its own cannot be made", work)


def listen_inside(pidfd: int, port: int) -> socket.socket | None:
    """A socket listening at 127.0.0.1:`port` in the network of the process `pidfd`; None where that is our own.

    A socket of ours that listens there already (an earlier helper's, still open at the proxy) is no obstacle: new
    callers may come to either. Takes 0.2 ms. Raises NotPermitted, WrongState (the process is gone, somebody inside
    has the port), HiveError.
    """
    ours = os.stat("/proc/self/ns/net").st_ino

    def work() -> socket.socket | None:
        enter(pidfd)
        return None if os.stat("/proc/thread-self/ns/net").st_ino == ours else _listen(port)

    return _in_a_thread("cannot listen in its network", work)


def socket_inside(pidfd: int) -> socket.socket | None:
    """A TCP socket in the network of the process `pidfd`, non-blocking and not connected; None where that is our own.

    It belongs there for good, whichever thread connects it. Takes 0.1 ms. Raises NotPermitted, WrongState (the process
    is gone), HiveError.
    """
    ours = os.stat("/proc/self/ns/net").st_ino

    def work() -> socket.socket | None:
        enter(pidfd)
        return None if os.stat("/proc/thread-self/ns/net").st_ino == ours else _tcp()

    return _in_a_thread("cannot connect in its network", work)


def differs(pid: int) -> bool:
    """Whether `pid` is in another network than this process. False where it is gone or may not be looked at."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return False


def enter(fd: int) -> None:
    """Puts the calling thread into a namespace, or into that of the process a pidfd stands for. Raises OSError."""
    _call("setns", fd, CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bring_up_loopback() -> None:
    """Brings `lo` up, which is down in a new namespace; it then has its addresses by itself (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _tcp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def _listen(port: int) -> socket.socket:
    sock = _tcp()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _in_a_thread(failed: str, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, run in a thread that is used for nothing else. Its OSError becomes a sentence."""
    results: list[Result] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            results.append(work())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="netns")
    thread.start()
    thread.join()
    if errors:
        raise _translate(failed, errors[0]) from errors[0]
    return results[0]


def _translate(failed: str, error: OSError) -> HiveError:
    message = f"{failed}: {error.strerror}"
    if isinstance(error, PermissionError):
        return NotPermitted(message)
    return WrongState(message) if error.errno in (errno.ESRCH, errno.EADDRINUSE) else HiveError(message)
