"""The tour's own Hive: `hive up` with the demo backend, as a child, in the tour's directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hive.client.calls import Answer, AsyncClient
from hive.errors import ConfigError, DependencyDown, HiveError, NotPermitted, TimedOut
from hive.host.process import exit_code, spawn
from hive.paths import runtime_dir
from hive.settings.table import Paths
from hive.tour.steps import PLACES
from hive.up import directories

UP_S = 60.0
END_S = 40.0
LEAVING_S = 40.0
"""Longest time for the processes of a killed Hive to leave."""
LOOK_S = 0.05
SEEN_S = 1.0
LAST_BYTES = 4000
KINDS = (ConfigError, NotPermitted, DependencyDown, TimedOut)
"""Errors of a `hive up` that the tour passes on as they are, by their exit codes."""
CONF = f"""[inference]
auto_sleep_enabled = true
[proxy]
backend_concurrency = {PLACES}
drain_s = 1
[sleep]
check_s = 0.5
minimum_awake_s = 1
deep_after_s = 0
pressure_some_avg10 = 0
[agents]
stop_grace_s = 3
"""
"""Sleep comes soon, and deep sleep when the tour orders it; at the end nobody is waited for long."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS")
PASSED_BEGINNINGS = ("LC_", "XDG_", "PYTHON")


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of the tour's Hive: no setting of this user's, no Redis and no state directory of another Hive.

    >>> environment({"PATH": "/bin", "REDIS_URL": "redis://h", "HIVE_STATE_DIR": "/s", "LC_ALL": "C", "BACKEND": "x"})
    {'PATH': '/bin', 'LC_ALL': 'C'}
    """
    return {name: value for name, value in ours.items() if name in PASSED_ON or name.startswith(PASSED_BEGINNINGS)}


class OwnHive:
    """One Hive with its state in `directory`. `ended`: everything of it has gone."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self._config = directory / "hive.conf"
        self._log = directory / "up.log"
        self._up: subprocess.Popen[bytes] | None = None
        self._daemon: AsyncClient | None = None
        self._environment = environment(os.environ)

    def __repr__(self) -> str:
        return f"<OwnHive {self.state} {'down' if self._up is None else self._up.pid}>"

    @property
    def paths(self) -> Paths:
        return Paths(self.state, runtime_dir(self.state, os.getuid(), self._environment))

    @property
    def daemon(self) -> AsyncClient:
        assert self._daemon is not None
        return self._daemon

    async def come_up(self) -> Answer:
        """The daemon's health once all of it answers. Raises the error that `hive up` ended with, TimedOut."""
        self._config.write_text(CONF)
        self._up = self._start()
        self._daemon = AsyncClient(self.paths.api_socket)
        until = time.monotonic() + UP_S
        while time.monotonic() < until:
            if self._up.poll() is not None:
                raise failure(exit_code(self._up.returncode), self.last_words())
            with contextlib.suppress(HiveError):
                health = await self._daemon.get("/api/health")
                if is_whole(health):
                    return health
            await asyncio.sleep(LOOK_S)
        raise TimedOut(f"the tour's Hive is not up after {UP_S:g} s", hint="hive doctor looks at this machine")

    def check(self) -> None:
        """Raises HiveError where it has ended although nobody has told it to."""
        if self._up is not None and self._up.poll() is not None:
            raise failure(exit_code(self._up.returncode), self.last_words())

    async def check_soon(self) -> None:
        """The same for a moment: its daemon is gone before the end of `hive up` itself is seen."""
        until = time.monotonic() + SEEN_S
        while time.monotonic() < until:
            self.check()
            await asyncio.sleep(LOOK_S)

    async def end(self, hurry: asyncio.Event) -> None:
        """Ends all of it in order, agents first; faster once `hurry` is set. Raises HiveError where something stays."""
        if self._up is not None:
            with contextlib.suppress(ProcessLookupError):
                self._up.send_signal(signal.SIGTERM)
            await _until_ended(self._up, hurry, within_s=END_S)
        await self.end_what_is_left(hurry)

    async def end_what_is_left(self, hurry: asyncio.Event) -> None:
        """The same of a Hive that was killed: its processes leave by themselves, its agents live on, and the next
        `hive up` on that state takes them over and ends them."""
        await _until_free(self.state / "up.lock", within_s=LEAVING_S)
        socket = self.state / "socket"  # removed at an orderly end
        if socket.exists():
            runtime = Path(socket.read_text().strip()).parent
            if not self._config.exists():
                self._config.write_text(CONF)
            again = self._start("--exit-after", "0.1")
            try:
                while again.poll() is None and not hurry.is_set():  # noqa: ASYNC110 - a process sets no event
                    await asyncio.sleep(LOOK_S)
            finally:
                await _until_ended(again, hurry, within_s=END_S)
            directories.clear(Paths(self.state, runtime))
            if again.returncode != 0:
                raise failure(exit_code(again.returncode), self.last_words())
        directories.clear(self.paths)

    def last_words(self) -> str:
        """The end of all that it wrote."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C at the terminal reaches the tour alone; it ends when the tour does,
        however that ends."""
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            command = up_command(self.state, self._config)
            return spawn([*command, *more], env=self._environment, stdout_fd=log, pdeathsig=signal.SIGTERM)
        finally:
            os.close(log)


def up_command(state: Path, config: Path) -> Sequence[str]:
    """The command line of that Hive: free ports, so that it never meets another one."""
    where = [
        "--state-dir",
        str(state),
        "--config",
        str(config),
        "--port",
        "0",
        "--ingress-port",
        "0",
        "--api-port",
        "0",
    ]
    return [sys.executable, "-P", "-m", "hive", "up", "--backend", "demo", *where]


def is_whole(health: Answer) -> bool:
    """Whether every part of it answers.

    >>> parts = {"proxy": {"connected": True, "port": 1, "ingress_port": 2}, "helper": {"connected": True}}
    >>> is_whole({**parts, "backend": {"up": True}}), is_whole({**parts, "backend": None})
    (True, False)
    """
    proxy, backend = health["proxy"], health["backend"]
    parts = (proxy["connected"], proxy["port"], proxy["ingress_port"], health["helper"]["connected"])
    return all(parts) and backend is not None and bool(backend["up"])


def failure(code: int, said: str) -> HiveError:
    """The error that a `hive up` ended with, by what it wrote last.

    >>> failure(5, "up       | leaving\\nhive: redis-server is not installed\\nhint: install it\\n").hint
    'install it'
    >>> failure(5, "hive: no\\n").code, failure(137, "killed").message
    ('dependency_down', "the tour's Hive ended with 137: killed")
    """
    lines = said.strip().splitlines()
    told = [line.removeprefix("hive: ") for line in lines if line.startswith("hive: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    why = told[-1] if told else " ".join(lines[-1:]) or "it said nothing"
    kind = next((kind for kind in KINDS if kind.exit_code == code), HiveError)
    return kind(why if told else f"the tour's Hive ended with {code}: {why}", hint=hints[-1] if hints else "")


async def _until_ended(process: subprocess.Popen[bytes], hurry: asyncio.Event, *, within_s: float) -> None:
    """Returns once it has ended: a hurry is passed on as a second signal, after `within_s` it is killed."""
    until, is_hurried = time.monotonic() + within_s, False
    while process.poll() is None:
        if hurry.is_set() and not is_hurried:
            is_hurried = True
            process.send_signal(signal.SIGTERM)
        if time.monotonic() > until:
            process.kill()
        await asyncio.sleep(LOOK_S)


async def _until_free(lock: Path, *, within_s: float) -> None:
    """Returns once nobody holds this lock, or there is none. Raises TimedOut."""
    until = time.monotonic() + within_s
    while not _is_free(lock):
        if time.monotonic() > until:
            raise TimedOut(f"processes of a Hive still use {lock.parent} after {within_s:g} s")
        await asyncio.sleep(LOOK_S)


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
