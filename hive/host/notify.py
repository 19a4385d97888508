"""Telling systemd how a service is (sd_notify(3)): ready, reloading, stopping, alive.

Nothing is said, silently, where systemd did not ask for it: a service runs the same by hand.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import MutableMapping

SEND_S = 0.1
"""systemd reads at once; where it does not, no service stands still for it longer than this."""


class Notifier:
    """The socket named by NOTIFY_SOCKET, and how often its watchdog wants to hear.

    Takes its variables out of `env`: a child that inherited them could speak for this process.
    """

    def __init__(self, env: MutableMapping[str, str], *, pid: int) -> None:
        address = env.pop("NOTIFY_SOCKET", "")
        self.watchdog_s = watchdog_of(env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", ""), pid=pid)
        """Longest time systemd waits for `alive` before it ends the process; None where it does not wait."""
        self._sock: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._sock.settimeout(SEND_S)
            self._address = "\0" + address[1:] if address[0] == "@" else address  # `@`: an abstract name, unix(7)

    def __repr__(self) -> str:
        return f"<Notifier {'silent' if self._sock is None else 'speaking'}, watchdog {self.watchdog_s}>"

    def ready(self, status: str = "") -> bool:
        """The service does its work now, for the first time or again after `reloading`. False where not heard."""
        return self._send("READY=1", status)

    def reloading(self) -> bool:
        """The configuration is being read again; `ready` follows."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """The service is on its way out."""
        return self._send("STOPPING=1", status)

    def alive(self) -> bool:
        """The service looked at itself and is well."""
        return self._send("WATCHDOG=1", "")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _send(self, state: str, more: str) -> bool:
        if self._sock is None:
            return False
        if more and "=" not in more:
            more = f"STATUS={more}"
        message = f"{state}\n{more}" if more else state
        with contextlib.suppress(OSError):
            self._sock.sendto(message.encode(), self._address)
            return True
        return False


def watchdog_of(usec: str, pid_meant: str, *, pid: int) -> float | None:
    """Seconds of WATCHDOG_USEC, None where it is unset, no number, or meant for another process.

    >>> watchdog_of("30000000", "", pid=7), watchdog_of("30000000", "7", pid=7), watchdog_of("30000000", "8", pid=7)
    (30.0, 30.0, None)
    """
    if not usec.isascii() or not usec.isdigit() or int(usec) == 0:
        return None
    if pid_meant and pid_meant != str(pid):
        return None
    return int(usec) / 1e6
