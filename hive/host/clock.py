"""The host's clock: whether anything keeps it right, and when the machine came up."""

from __future__ import annotations

import ctypes
import os
import time

TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_synchronised() -> bool:
    """Whether the kernel was told within the last hours that its clock is right (chrony, ntpd, timesyncd do).

    In a container, or a guest whose host keeps the clock, there may be no program that tells the kernel so.
    Raises OSError where it may not be asked.
    """
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes; modes = 0 reads only
    answer: int = _libc.adjtimex(ctypes.byref(buffer))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer != TIME_ERROR


def booted_at() -> float:
    """Unix time of the boot, by the clock as it is now: it moves when that is set."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
