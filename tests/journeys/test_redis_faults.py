"""Redis fails in every way it has, under load, in a whole Hive: no request fails, no token is missing, none waits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_chaos import recorded
from tests.ports import free_port

ASKERS = 4
PAUSE_S = 0.01
"""Between an answer and the next request of the same asker."""
BAD_S = 3.0
"""Time for which Redis stays bad; SLOW_S where it is slow."""
SLOW_S = 5.0
CALM_S = 0.7
"""Load before and after."""
SETTLE_S = 20.0
KEYS = 20_000
pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(180)]


class Load:
    """Requests over TCP from a few askers, each as fast as it is answered; what they were told is kept."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(ASKERS)]
        self.answers: dict[str, tuple[int, int]] = {}
        self.failures: list[str] = []

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]})
        while not self._over.wait(PAUSE_S):
            try:
                connection.request("POST", "/v1/chat/completions", body, self._head)
                response = connection.getresponse()
                answer = json.loads(response.read())
                assert response.status == 200, f"{response.status} {answer}"
                usage = answer["usage"]
                told = usage["prompt_tokens"], usage["completion_tokens"]
                with self._lock:
                    self.answers[response.headers["x-request-id"]] = told
            except Exception as error:
                self.failures.append(repr(error))
                connection.close()
        connection.close()

    @property
    def sums(self) -> tuple[int, int, int]:
        """(answers, tokens in, tokens out)."""
        told = list(self.answers.values())
        return len(told), sum(tokens for tokens, _ in told), sum(tokens for _, tokens in told)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


class Victim:
    """The Redis of one Hive, and a connection of the test's own to make it fail by."""

    def __init__(self, hive: Stack) -> None:
        self.hive = hive
        self.socket = Path((hive.state / "socket").read_text().strip()).with_name("redis.sock")

    def admin(self, **more: object) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), **more)  # type: ignore[arg-type]

    def kill(self) -> None:
        killed = self.hive.kill("redis")
        until(lambda: self.hive.pid_of("redis") != killed, within_s=60, what="a new Redis")

    def stays_dead(self, for_s: float) -> None:
        """Killed again whenever it comes back."""
        over = time.monotonic() + for_s
        while time.monotonic() < over:
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(self.hive.pid_of("redis"), signal.SIGKILL)
            time.sleep(0.05)


# --- the faults -------------------------------------------------------------------------------------------------------


def killed_and_empty(victim: Victim) -> None:
    for _ in range(2):
        victim.kill()
        time.sleep(BAD_S / 3)


def dead_for_a_while(victim: Victim) -> None:
    victim.stays_dead(BAD_S)


def silent(victim: Victim) -> None:
    """It takes connections and answers nothing."""
    pid = victim.hive.pid_of("redis")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(SLOW_S)
    os.kill(pid, signal.SIGCONT)


def slow_by_5_s(victim: Victim) -> None:
    _slow(victim, 5.0, for_s=SLOW_S + 2)


def slow_but_in_time(victim: Victim) -> None:
    """Every answer comes just before it is given up."""
    _slow(victim, 0.8, for_s=SLOW_S)


def _slow(victim: Victim, delay_s: float, *, for_s: float) -> None:
    """Puts itself between Hive and Redis: every answer is late by `delay_s`."""
    real = victim.socket.with_name("real.sock")
    victim.socket.rename(real)
    relay = Relay(victim.socket, real, delay_s)
    relay.start()
    try:
        with redis.Redis(unix_socket_path=str(real)) as admin:
            admin.client_kill_filter(_type="normal", skipme=True)
        time.sleep(for_s)
    finally:
        relay.end()
        real.rename(victim.socket)


class Relay(threading.Thread):
    """Passes bytes on, those of the answers late."""

    def __init__(self, here: Path, there: Path, delay_s: float) -> None:
        super().__init__()
        self._here, self._there, self._delay_s = here, there, delay_s
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._listens = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.passed = 0

    def start(self) -> None:
        super().start()
        assert self._listens.wait(5)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join()
        self._loop.close()
        assert self.passed > 0, "Hive never asked"

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._pass, str(self._here))
        self._listens.set()
        await self._over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_redis, from_redis = None, None
        try:
            from_redis, to_redis = await asyncio.open_unix_connection(str(self._there))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(reader, to_redis, 0.0))
                both.create_task(self._copy(from_redis, writer, self._delay_s))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, to_redis):
                if each is not None:
                    each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            self.passed += 1
            writer.write(data)
        raise ConnectionResetError


def wrong_password(victim: Victim) -> None:
    with victim.admin() as admin:
        admin.config_set("requirepass", "another")
        admin.client_kill_filter(_type="normal", skipme=True)
    time.sleep(BAD_S)
    with victim.admin(password="another") as admin:
        admin.config_set("requirepass", "")


def nothing_permitted(victim: Victim) -> None:
    with victim.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "default", "-@all", "+acl", "+ping")
        time.sleep(BAD_S)
        admin.execute_command("ACL", "SETUSER", "default", "+@all")


def read_only(victim: Victim) -> None:
    with victim.admin() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(BAD_S)
        admin.execute_command("REPLICAOF", "NO", "ONE")


def out_of_memory(victim: Victim) -> None:
    with victim.admin() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1")
        time.sleep(BAD_S)
        admin.config_set("maxmemory", "0")


def emptied(victim: Victim) -> None:
    """The stream, its group and all keys are gone, and it is the same process."""
    for _ in range(3):
        with victim.admin() as admin:
            admin.flushall()
        time.sleep(BAD_S / 3)


def loading(victim: Victim) -> None:
    """It becomes a replica of a full one, loads that slowly, and comes back with nothing of Hive's."""
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory]
        command += ["--loglevel", "warning", "--repl-diskless-sync-delay", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other, redis.Redis(port=port) as full:
            try:
                until(full.ping, within_s=5, what="the other Redis")
                full.mset({f"key:{number}": "x" for number in range(KEYS)})
                with victim.admin() as admin:
                    admin.config_set("key-load-delay", "100")
                    admin.config_set("loading-process-events-interval-bytes", "1024")
                    admin.execute_command("REPLICAOF", "127.0.0.1", str(port))
                    until(lambda: admin.info("persistence")["loading"], within_s=10, what="LOADING")
                    time.sleep(BAD_S)
                    admin.execute_command("REPLICAOF", "NO", "ONE")
                    admin.config_set("key-load-delay", "0")
                    until(lambda: not admin.info("persistence")["loading"], within_s=10, what="it has loaded")
                    admin.flushall()
            finally:
                other.terminate()


class Fault(NamedTuple):
    """`is_down`: as long as it lasts the daemon says that Redis is down, which shows that it was one."""

    happens: Callable[[Victim], None]
    is_down: bool = True


FAULTS = [
    Fault(killed_and_empty, is_down=False),
    Fault(dead_for_a_while),
    Fault(silent),
    Fault(slow_by_5_s),
    Fault(slow_but_in_time, is_down=False),
    Fault(wrong_password),
    Fault(nothing_permitted),
    Fault(read_only, is_down=False),
    Fault(out_of_memory, is_down=False),
    Fault(emptied, is_down=False),
    Fault(loading, is_down=False),  # a replica refuses to write first, and what refuses is asked again seldom
]


class Watcher(threading.Thread):
    """Watches for Redis to be seen down, and counts the rows that came while it was."""

    def __init__(self, hive: Stack) -> None:
        super().__init__()
        self._hive = hive
        self._over = threading.Event()
        self.was_down = False
        self.rows_meanwhile = 0

    def run(self) -> None:
        before: int | None = None
        while not self._over.wait(0.1):
            is_down, rows = not self._hive.health()["redis"]["up"], recorded(self._hive)[0]
            if is_down and before is not None:
                self.rows_meanwhile += rows - before
            self.was_down |= is_down
            before = rows if is_down else None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self._over.set()
            self.join()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.happens.__name__)
def test_no_request_fails_and_no_token_is_lost(fault: Fault) -> None:
    """Nor does a row wait: as many came while Redis was bad as there were answers, but for those of a moment."""
    with fake_backend("llama") as backend, stack(url=backend.url) as hive:
        hive.create("asker", "idler.py", tier="high")
        load = Load(hive.health()["proxy"]["port"], hive.get("/api/agents/asker/tokens")["model"])
        watcher, begun = Watcher(hive), time.monotonic()
        with load.running(), watcher.watching():
            time.sleep(CALM_S)
            answers, rows = len(load.answers), recorded(hive)[0]
            fault.happens(Victim(hive))
            answers, rows = len(load.answers) - answers, recorded(hive)[0] - rows
            time.sleep(CALM_S)
        rate = len(load.answers) / (time.monotonic() - begun)
        print(
            f"{fault.happens.__name__}: {len(load.answers)} answers, {rate:.0f}/s; of {answers} there were {rows} rows"
        )
        assert load.failures == []
        assert rate > 20, "the load is no load"
        assert rows > answers / 2
        if fault.is_down:
            assert watcher.was_down, "Hive did not notice"
            assert watcher.rows_meanwhile > 0
        until(lambda: recorded(hive) == load.sums, within_s=SETTLE_S, what=f"rows {recorded(hive)} = {load.sums}")
        until(lambda: hive.health()["redis"]["up"], within_s=10, what="Redis is up again")
