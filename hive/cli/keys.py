"""Single keys of a terminal, without Enter behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import tty
from collections.abc import Callable
from typing import Any

END_OF_INPUT = "\x04"
"""Ctrl-D, and what is told where the terminal is gone."""


class TerminalKeys:
    """Tells each key, on the running loop, as long as it is entered; the terminal is afterwards as it was."""

    def __init__(self, descriptor: int, on_key: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._on_key = on_key
        self._before: list[Any] = []

    def __enter__(self) -> TerminalKeys:
        self._before = termios.tcgetattr(self._descriptor)
        loop = asyncio.get_running_loop()
        self._single()
        loop.add_reader(self._descriptor, self._read)
        loop.add_signal_handler(signal.SIGCONT, self._single)  # after Ctrl-Z the shell has set the terminal its own way
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        loop.remove_signal_handler(signal.SIGCONT)
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def _single(self) -> None:
        with contextlib.suppress(termios.error, OSError):
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)

    def _read(self) -> None:
        try:
            typed = os.read(self._descriptor, 64).decode(errors="replace")
        except OSError:
            typed = ""
        if not typed:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        for key in typed or END_OF_INPUT:
            self._on_key(key)
