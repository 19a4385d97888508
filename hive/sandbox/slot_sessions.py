"""Servers of the pool as sessions of their own, where no systemd starts them: under `hive up`.

A server outlives the helper that started it. The next one knows it by its record: the supervisor's pid with its start
time, and a mark in the supervisor's environment in case the pid was never written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hive.errors import ConfigError, HiveError, TimedOut
from hive.host import limits
from hive.host.cgroup import Leaf, Subtree, state_label
from hive.host.http_call import calling, connected_unix, streams_of
from hive.host.memory_group import held_by_group, held_by_processes, make_below_own
from hive.host.process import (
    CLOCK_TICKS,
    Identity,
    ProcessTable,
    exit_code,
    identify,
    spawn,
    wait_until_over,
)
from hive.host.tail import last_lines
from hive.http_answer import CallFailed, encode_request
from hive.link.slots import ProcessState, SlotGrant
from hive.paths import SUN_PATH_MAX
from hive.runtimes.log_pipes import AgentOutput, LogPipes
from hive.runtimes.signals import SignalGroup
from hive.sandbox.notify_socket import NotifySocket
from hive.sandbox.slot_records import SlotRecord, SlotRecords
from hive.settings.table import Paths
from hive.slots.slot_run import LAST_LINES, WHY_LINES, RunningSlot, SlotEnd, SlotUse, last_of
from hive.tasks import spawn as spawn_task

log = logging.getLogger("hive.sandbox")

MARK = "HIVE_SLOT"
OTHERS = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", MARK)
"""Beginnings of names in this process's environment that are meant for this process."""
HEALTH = "/health"
HEALTH_S = 2.0
LOOK_S = 0.5
"""Between looks at whether a server serves that an earlier helper started."""
WARDEN_S = 5.0
"""From the end of a supervisor to SIGKILL: its warden ends the server meanwhile."""
KILLED_S = 10.0
"""From SIGKILL to the end of everything: a large GPU context takes seconds to tear down."""
REPORT_S = 0.5
"""`hive up` tells how a process ended that it inherited."""
COST_SHARE = 20
"""Memory that only a walk of the processes tells is looked at for 1/20 of the time at most."""
LOG_TAIL = 2000
"""Lines of the log in which the beginning of the last run is looked for."""

CommandMaker = Callable[[str], Sequence[str]]
"""Slot id → the command that supervises its server."""


class ModelSession:
    """One server as a session; see `RunningSlot`."""

    def __init__(
        self,
        slot: str,
        record: SlotRecord,
        records: SlotRecords,
        paths: Paths,
        output: AgentOutput | None,
        said: NotifySocket,
        *,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`child` where it is this process's own. `record.main` None: it has ended before its pid was known."""
        self.run = record.run
        self.pid = 0 if record.main is None else record.main.pid
        self.grant: SlotGrant | None = record.grant
        self.state = ProcessState.SERVING if record.serves else ProcessState.STARTING
        self.socket = "" if record.socket == str(paths.slot_socket(slot)) else record.socket
        self._slot = slot
        self._record = record
        self._records = records
        self._paths = paths
        self._output = output
        self._said = said
        self._child = child
        self._leaf = Leaf(Path(record.leaf)) if record.leaf else None
        self._group = self._leaf or _signals(record)
        self._memory = Path(record.memory) if record.memory else None
        self._was_stopped = False
        self._reported: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._held: tuple[int | None, float] = (None, 0.0)
        """Memory of its processes, and when it may be looked at again."""
        self._ended = asyncio.Event()
        self._pidfd = -1
        fd = None if record.main is None else record.main.open()
        if record.main is None or not record.main.is_alive():  # also one that nobody has waited for
            self.state = ProcessState.STOPPING
        if fd is None:
            self._ended.set()
        else:
            self._pidfd = fd
            asyncio.get_running_loop().add_reader(fd, self._on_end)
        self._pids()  # what leaves the session later is known from now on

    def __repr__(self) -> str:
        return f"<ModelSession {self._slot} {self.pid}>"

    def age_s(self) -> float:
        main = self._record.main
        return (
            0.0 if main is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - main.start_ticks / CLOCK_TICKS)
        )

    def lives(self) -> bool:
        return not self._ended.is_set() and self._record.main is not None and self._record.main.is_alive()

    def granted(self, grant: SlotGrant) -> None:
        """Goes on as the start with this grant, for which it has waited."""
        self.grant = self._record.grant = grant
        if self._output is not None:
            self._output.say(f"{_begins(self.run)}\n")
        self._save()

    async def serves(self) -> bool:
        asked = None if self._child is not None else spawn_task(self._until_it_answers(), name="slot health")
        heard = spawn_task(self._said.is_ready.wait(), name="slot ready")
        ended = spawn_task(self._ended.wait(), name="slot ended")
        try:
            await asyncio.wait({heard, ended, *([asked] if asked else [])}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asked, heard, ended):
                if task is not None:
                    task.cancel()
        if self._ended.is_set():
            return False
        self._record.serves = True
        self._save()
        self._pids()
        return True

    async def _until_it_answers(self) -> None:
        """Asks the server itself: what it said while no helper listened is lost."""
        while True:
            with contextlib.suppress(OSError, CallFailed, TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    opening = _streams(Path(self._record.socket))
                    async with calling(opening, encode_request("GET", HEALTH, {"Host": "localhost"})) as call:
                        if await call.status() == 200:
                            return
            await asyncio.sleep(LOOK_S)

    async def over(self) -> SlotEnd:
        await self._ended.wait()
        code = await self._code()
        self._said.read()
        await wait_until_over(lambda: not self._pids(), WARDEN_S)
        told = False
        while self._pids():
            self._group.kill()
            await wait_until_over(lambda: not self._pids(), KILLED_S)
            if self._pids() and not told:
                told = True
                log.error("slot_not_killed id=%s pids=%s", self._slot, self._pids())
        was_oom = not self._was_stopped and self._memory is not None and limits.oom_kills(self._memory) > 0
        if self._output is not None:
            await self._output.finish()
        last = last_of(await asyncio.to_thread(read_log, self._paths, self._slot, LAST_LINES))
        self._forget()
        return SlotEnd(code, self._why(code, was_oom, last), was_oom, last)

    async def _code(self) -> int | None:
        if self._child is not None:
            return exit_code(self._child.wait())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                return await asyncio.shield(self._reported)
        return None

    def _why(self, code: int | None, was_oom: bool, last: list[str]) -> str:
        if was_oom:
            return "the kernel killed it: out of memory"
        if self._said.is_leaving and self._said.status:
            return self._said.status
        if self._was_stopped:
            return "it was stopped"
        how = "nobody saw how it ended" if code is None else f"exit code {code}"
        return f"{how}: {' | '.join(last[-WHY_LINES:])}" if last else how

    def reaped(self, pid: int, code: int) -> None:
        if pid == self.pid and not self._reported.done():
            self._reported.set_result(code)

    async def stop(self, grace_s: float) -> None:
        self._was_stopped = True
        if self._record.main is not None:
            self._record.main.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):  # what its warden leaves is nothing, mostly
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
                await wait_until_over(lambda: not self._is_left(), grace_s)
        until = time.monotonic() + KILLED_S
        while self._is_left():
            self._group.kill()
            if self._record.main is not None:
                self._record.main.send(signal.SIGKILL)
            if time.monotonic() > until:
                raise TimedOut(
                    f"the server of {self._slot} lives {KILLED_S:g} s after SIGKILL",
                    hint=f"its processes hang in the kernel: {self._pids()}",
                )
            await asyncio.sleep(0.02)

    async def look(self) -> SlotUse:
        cpu_us = self._leaf.cpu_us() if self._leaf is not None else self._group.usage(ProcessTable())[0]
        pids = self._pids()
        held = None if self._memory is None else held_by_group(self._memory)
        if held is None:
            held = await self._held_by(pids)
        return SlotUse(pids, held, cpu_us / 1e6)

    async def _held_by(self, pids: list[int]) -> int | None:
        held, again_at = self._held
        if time.monotonic() < again_at:
            return held
        began = time.monotonic()
        held = await asyncio.to_thread(held_by_processes, pids)
        self._held = held, time.monotonic() + COST_SHARE * (time.monotonic() - began)
        return held

    def let_go(self) -> None:
        self._not_watched()
        self._said.close(remove=False)
        if self._output is not None:
            self._output.close()
        if self._child is not None:
            self._child.returncode = 0  # it outlives this helper, which waits for it no more

    def _pids(self) -> list[int]:
        return self._group.pids()

    def _is_left(self) -> bool:
        return (self._record.main is not None and self._record.main.is_alive()) or bool(self._pids())

    def _on_end(self) -> None:
        self._not_watched()
        self._ended.set()

    def _not_watched(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _save(self) -> None:
        with contextlib.suppress(HiveError):  # a full disk: the next helper asks the server itself
            self._records.save(self._slot, self._record)

    def _forget(self) -> None:
        """Nothing is left of it but its log. The record goes last."""
        self._said.close(remove=True)
        socket = Path(self._record.socket)
        socket.unlink(missing_ok=True)
        if not self.socket:
            with contextlib.suppress(OSError):  # what its server left there stays
                socket.parent.rmdir()
        if self._leaf is not None:
            self._leaf.remove()
        if self._memory is not None:
            Leaf(self._memory).remove()
        self._records.remove(self._slot)


def _signals(record: SlotRecord) -> SignalGroup:
    """Its processes by /proc. One that never had a pid has none: pid 0 is nobody's."""
    return SignalGroup(record.main or Identity(0, 0, ""), uid=None, mark=record.mark)


async def _streams(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await streams_of(await connected_unix(path))


class SlotSessions:
    """Starts servers as sessions; see `SlotStarter`."""

    def __init__(
        self,
        paths: Paths,
        pipes: LogPipes,
        *,
        subtree: Subtree | None,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        command: CommandMaker | None = None,
    ) -> None:
        """`config`: the file this helper was started with; `environment`: None for this process's. `command`: instead
        of `hive run-model`."""
        self._paths = paths
        self._pipes = pipes
        self._subtree = subtree
        self._config = config
        base = os.environ if environment is None else environment
        self._environment = {name: value for name, value in base.items() if not name.startswith(OTHERS)}
        self._command = command or self._run_model
        self._label = state_label(paths.state)
        self._records = SlotRecords(paths.slot_records)
        self._running: dict[str, ModelSession] = {}

    def __repr__(self) -> str:
        return f"<SlotSessions {len(self._running)} started or found>"

    def _run_model(self, slot: str) -> list[str]:
        """By this very interpreter; -P so that the working directory cannot shadow a module."""
        paths = self._paths
        where = ("--socket", str(paths.slot_socket(slot)), "--grant", str(paths.slot_grant(slot)))
        config = () if self._config is None else ("--config", str(self._config.absolute()))
        state = ("--state-dir", str(paths.slot_state), "--hive-state-dir", str(paths.state))
        return [sys.executable, "-P", "-m", "hive", "run-model", slot, *where, *state, *config]

    async def prepare(self, slot: str) -> RunningSlot:
        return await self._begin(slot, None)

    async def start(self, slot: str, grant: SlotGrant, prepared: RunningSlot | None = None) -> RunningSlot:
        if isinstance(prepared, ModelSession):
            prepared.granted(grant)
            return prepared
        return await self._begin(slot, grant)

    async def _begin(self, slot: str, grant: SlotGrant | None) -> RunningSlot:
        socket, said_at = self._paths.slot_socket(slot), self._paths.slot_notify(slot)
        for path in (socket, said_at):
            if len(os.fsencode(path)) > SUN_PATH_MAX:
                raise ConfigError(
                    f"the path {path} is longer than the {SUN_PATH_MAX} bytes a socket's may have",
                    hint="set XDG_RUNTIME_DIR (or TMPDIR) to a shorter directory",
                )
        run = secrets.token_hex(8)
        leaf, memory = self._groups(slot)
        mark = f"{MARK}={self._label}.{slot}.{run}"
        record = SlotRecord(run=run, mark=mark, socket=str(socket), grant=grant, leaf=leaf, memory=memory)
        running: ModelSession | None = None
        try:
            for directory in (self._paths.slot_sockets, socket.parent, self._paths.slot_state):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._empty_groups(record)
            self._records.save(slot, record)
            output = self._pipes.make(_log_name(slot))
            if grant is not None:
                output.say(f"{_begins(run)}\n")
            running = self._spawned(slot, record, NotifySocket(said_at), output)
        except OSError as error:
            raise HiveError(f"cannot start the server of {slot}: {error}") from error
        finally:
            if running is None:
                self._undo(slot, record, said_at)
        self._running[slot] = running
        return running

    def _spawned(self, slot: str, record: SlotRecord, said: NotifySocket, output: AgentOutput) -> ModelSession:
        name, _, value = record.mark.partition("=")
        writing = output.writing_end()
        try:
            child = spawn(
                list(self._command(slot)),
                env={**self._environment, name: value, "NOTIFY_SOCKET": str(self._paths.slot_notify(slot))},
                stdout_fd=writing,
                cgroup_dir=Path(record.leaf) if record.leaf else None,
                limit_dirs=[Path(record.memory)] if record.memory and record.memory != record.leaf else [],
            )
        except BaseException:
            said.close(remove=True)
            output.remove()
            raise
        finally:
            os.close(writing)
        record.main = identify(child.pid)
        try:
            self._records.save(slot, record)
        except HiveError as error:  # the mark in its environment is what a later helper has
            log.error("slot_record_not_written id=%s error=%s", slot, error)
        return ModelSession(slot, record, self._records, self._paths, output, said, child=child)

    def _undo(self, slot: str, record: SlotRecord, said_at: Path) -> None:
        for group in {record.leaf, record.memory} - {""}:
            Leaf(Path(group)).remove()
        with contextlib.suppress(OSError):
            said_at.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            Path(record.socket).parent.rmdir()
        self._pipes.remove(_log_name(slot))
        self._records.remove(slot)

    def _groups(self, slot: str) -> tuple[str, str]:
        """Directories of its control group, and of the one that counts its memory (it may be of v1); empty: none."""
        leaf = None if self._subtree is None else str(self._subtree.leaf(_log_name(slot)).path)
        if self._subtree is not None and leaf is not None and "memory" in limits.enable(self._subtree):
            return leaf, leaf
        memory = make_below_own(f"hive-slot-{self._label}-{slot}")
        return leaf or "", "" if memory is None else str(memory)

    @staticmethod
    async def _empty_groups(record: SlotRecord) -> None:
        """Makes them anew; what an earlier server left in one is killed. Raises WrongState where that does not help."""
        for path in {record.leaf, record.memory} - {""}:
            group = Leaf(Path(path))
            if group.pids():
                group.kill()
                await wait_until_over(lambda group=group: not group.pids(), KILLED_S)  # type: ignore[misc]
            await group.let_go()
            group.make()

    async def find(self, granted: set[str], awaited: set[str]) -> dict[str, RunningSlot]:  # noqa: ARG002 - for units
        snapshot = ProcessTable()
        for slot, record in self._records.load().items():
            if record.main is None and (marked := snapshot.with_environment(record.mark)):
                record.main = Identity.of(marked[0])  # the helper was killed right after the fork; the oldest has it
            try:
                running = self._adopted(slot, record)
            except OSError as error:
                log.error("slot_not_adopted id=%s error=%s", slot, error)
                continue
            if slot in awaited:
                await running.stop(0.0)
                await running.over()
            else:
                self._running[slot] = running
        return dict(self._running)

    def _adopted(self, slot: str, record: SlotRecord) -> ModelSession:
        self._paths.slot_sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
        said = NotifySocket(self._paths.slot_notify(slot))
        output = self._pipes.adopt(_log_name(slot))
        running = ModelSession(slot, record, self._records, self._paths, output, said)
        if running.socket not in ("", str(self._paths.slot_socket_before(slot))):
            log.warning("slot_elsewhere id=%s socket=%s: it is ended", slot, record.socket)
            spawn_task(running.stop(0.0), name="end slot elsewhere")
        return running

    async def log(self, slot: str, lines: int) -> str:
        return await asyncio.to_thread(read_log, self._paths, slot, lines)


def _log_name(slot: str) -> str:
    """A dot is in no agent's id."""
    return f"model.{slot}"


def _begins(run: str) -> str:
    return f"hive: run {run} begins"


def read_log(paths: Paths, slot: str, lines: int) -> str:
    """The last `lines` of the last run; empty where there is none. Raises OSError."""
    data, _ = last_lines(paths.log(_log_name(slot)), max(lines, LOG_TAIL))
    rows = data.decode(errors="replace").splitlines()
    begun = next((at for at in range(len(rows) - 1, -1, -1) if rows[at].startswith("hive: run ")), -1)
    return "\n".join(rows[begun + 1 :][-lines:] if lines else [])
