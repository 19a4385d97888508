"""A program inside a container: begun by the engine, ended by signals, for the engine has no way to end one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any

from hive.errors import HiveError, TimedOut
from hive.host.engine import Engine
from hive.host.process import Identity, identify
from hive.runtimes.entering import KILL_S, Entered, EnteredProgram, readable
from hive.runtimes.signals import SignalGroup

log = logging.getLogger("hive.sandbox")

LOOK_S = 0.02
SLOW_LOOK_S = 0.5
"""Between questions to the engine where the process cannot be seen from here."""
BEGINS_S = 10.0
NOTICES_S = 5.0
"""The engine may take so long to notice an end."""


async def enter_container(engine: Engine, container: str, program: EnteredProgram) -> Entered:
    """Begins it. Raises WrongState (paused, ended), NotFound and NotPermitted for the program, DependencyDown."""
    terminal = program.terminal
    body = {
        "Cmd": program.spec.command,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": terminal is not None,
        "Env": [program.run_mark, *([] if terminal is None else [f"TERM={terminal.kind}"])],
    }
    made = str((await engine.ask("POST", f"/containers/{container}/exec", body))["Id"])
    sock = await engine.taken_over(f"/exec/{made}/start", {"Detach": False, "Tty": terminal is not None})
    entered = EnteredContainer(engine, made, sock, program)
    try:
        await entered.look()
        if terminal is not None:
            await entered.resize(terminal.rows, terminal.columns)
    except BaseException:
        await entered.kill()
        sock.close()
        entered.close()
        raise
    return entered


class EnteredContainer:
    """See `Entered`. Its caller has the connection to the engine, and the bytes go past this process."""

    form = "engine"

    def __init__(self, engine: Engine, exec_id: str, sock: socket.socket, program: EnteredProgram) -> None:
        self.descriptors: list[int] = []
        self._sock = sock
        self._engine = engine
        self._id = exec_id
        self._mark = program.run_mark
        self._pidfd = -1
        self._group: SignalGroup | None = None

    def __repr__(self) -> str:
        return f"<EnteredContainer {self._id[:12]}>"

    async def look(self) -> None:
        """Finds its process, which the engine begins after its answer; what ended at once has none any more."""
        until = time.monotonic() + BEGINS_S
        while not ((told := await self._told()).get("Pid") or told.get("ExitCode") is not None):
            if time.monotonic() > until:
                raise TimedOut(f"the engine did not begin the program within {BEGINS_S:g} s")
            await asyncio.sleep(LOOK_S)
        who = identify(int(told.get("Pid") or 0)) if told.get("ExitCode") is None else None
        if who is not None:
            self._see(who)
        self.descriptors = [self._sock.detach()]

    def _see(self, who: Identity) -> None:
        self._pidfd = who.open() or -1
        self._group = SignalGroup(who, uid=None, mark=self._mark)

    async def ended(self) -> int | None:
        if self._pidfd >= 0:
            await readable(self._pidfd)
        until, look_s = time.monotonic() + NOTICES_S, LOOK_S if self._pidfd >= 0 else SLOW_LOOK_S
        while (told := await self._told())["Running"]:
            if self._pidfd >= 0 and time.monotonic() > until:
                return None
            await asyncio.sleep(look_s)
        return None if told["ExitCode"] is None else int(told["ExitCode"])

    async def kill(self) -> bool:
        if self._group is None:
            return True
        until = time.monotonic() + KILL_S
        while self._group.pids():
            self._group.kill()
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def resize(self, rows: int, columns: int) -> None:
        await self._engine.ask("POST", f"/exec/{self._id}/resize", query={"h": str(rows), "w": str(columns)})

    async def _told(self) -> dict[str, Any]:
        told = await self._engine.ask("GET", f"/exec/{self._id}/json")
        if not isinstance(told, dict):
            raise HiveError("the engine says nothing of the program it runs")
        return told

    def close(self) -> None:
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
