"""The proxy restarted under load, as systemd does it: nobody is refused, no answer lies, every cost is recorded.

The test is systemd and keeps the TCP listeners, the real helper keeps the agents' own; both outlive each proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.client.client import Client
from hive.settings.table import Paths
from hive.up.directories import make_rest, make_state
from hive.up.services import redis_command
from tests.fakes import systemd
from tests.fakes.programs import fake_backend
from tests.fakes.systemd import Ear
from tests.journeys.stack import PYTHON, until

RESTARTS = int(os.environ.get("HIVE_RESTARTS", "3"))
SHORT_TOKENS, LONG_TOKENS = 20, 800
TOKEN_S = 0.01
"""So a short answer takes 0.2 s and ends within `drain_s`; a long one takes 8 s and does not."""
CONFIG = """
[proxy]
window_requests = 1000000
drain_s = 3
[inference]
auto_sleep_enabled = false
"""
HIVE = [sys.executable, "-P", "-m", "hive"]
AGENT = "runner"
CALLED = "web"


def listening() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    return sock


class Appliance:
    """Redis, helper and daemon, which stay; a proxy, which comes and goes."""

    def __init__(self, base: Path, backend: str) -> None:
        self.paths = Paths(base / "state", base / "r")
        self._config = base / "hive.conf"
        self._config.write_text(CONFIG)
        self._log = base / "log"
        self._ear = Ear(base / "notify")
        self._where = ["--state-dir", str(self.paths.state), "--runtime-dir", str(self.paths.runtime)]
        self._where += ["--config", str(self._config)]
        self._started: list[subprocess.Popen[Any]] = []
        self.model, self.ingress = listening(), listening()
        self.proxy: subprocess.Popen[Any] | None = None
        make_state(self.paths, uid=os.geteuid())
        make_rest(self.paths, uid=os.geteuid())
        self._start(redis_command(self.paths))
        self._start([*HIVE, "sandbox", *self._where])
        isolation = "uid" if os.geteuid() == 0 else "none"
        where = [*self._where, "--api-port", "0"]
        self._start([*HIVE, "daemon", *where, "--backend", f"llama={backend}", "--isolation", isolation])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _start(self, command: list[str]) -> None:
        with self._log.open("ab") as log:
            self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def start_proxy(self) -> None:
        """Returns when it said READY=1, as `systemctl start` of a unit of Type=notify does."""
        handed = [("model", self.model), ("ingress", self.ingress)]
        with self._log.open("ab") as log:
            self.proxy = systemd.start([*HIVE, "proxy", *self._where], handed, env=self._ear.env, stderr=log)
        until(
            lambda: self._ear.hears(0.5)[0] == "READY=1", within_s=20, what=f"a proxy that is ready: {self.log[-3000:]}"
        )

    def stop_proxy(self) -> None:
        assert self.proxy is not None
        self.proxy.send_signal(signal.SIGTERM)
        assert self.proxy.wait(60) == 0

    @property
    def api(self) -> Client:
        return Client(self.paths.api_socket)

    def create(self, name: str, *command: str, **spec: Any) -> str:
        """A running agent; its id."""
        self.api.post("/api/agents", {"name": name, "command": list(command), "tier": "high", **spec})
        self.api.post(f"/api/agents/{name}/start", {})
        return str(self.api.get(f"/api/agents/{name}")["id"])

    def rows(self) -> dict[str, tuple[bool, int, int, int]]:
        """Request id → (cut, status, tokens in, tokens out), read past the daemon."""
        with contextlib.closing(sqlite3.connect(f"file:{self.paths.database}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT id, cut, status, tokens_in, tokens_out FROM inference_usage").fetchall()
        return {row[0]: (bool(row[1]), row[2], row[3], row[4]) for row in found}

    def close(self) -> None:
        for name in (AGENT, CALLED):
            with contextlib.suppress(Exception):
                self.api.post(f"/api/agents/{name}/stop", {})
        if self.proxy is not None and self.proxy.poll() is None:
            self.proxy.terminate()
            self.proxy.wait(60)
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            process.wait(60)
        for sock in (self.model, self.ingress):
            sock.close()
        self._ear.close()


@contextlib.contextmanager
def appliance(backend: str) -> Iterator[Appliance]:
    base = Path(tempfile.mkdtemp(prefix="hive-test-", dir="/var/tmp"))
    base.chmod(0o711)
    found = Appliance(base, backend)
    try:
        until(lambda: found.api.get("/api/health")["helper"]["connected"], within_s=20, what="daemon and helper")
        found.start_proxy()
        yield found
    except BaseException:
        print(found.log[-6000:])
        raise
    finally:
        try:
            found.close()
        finally:
            shutil.rmtree(base, ignore_errors=True)


class Unix(http.client.HTTPConnection):
    """http.client over an agent's own socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("hive", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


class Caller(threading.Thread):
    """Asks without pause until it is told to stop, and counts what came of it.

    `whole`: answers with all that belongs to them, by request id → tokens as they say; `cut`: ids of answers that
    began and did not end. Everything else that may happen is counted in `came`: `refused` (no connection), `lost` (a
    new connection closed without a word), `stale` (a kept one was), `503`, `lies` (looks whole and is not).
    """

    def __init__(self, name: str, connect: Any, *, keep: bool, stream: bool, tokens: int, token: str) -> None:
        super().__init__(name=name)
        self._connect = connect
        self._keep = keep
        self._stream = stream
        self._tokens = tokens
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        self.whole: dict[str, tuple[int, int]] = {}
        self.cut: set[str] = set()
        self.came: Counter[str] = Counter()
        self.leave = threading.Event()

    def run(self) -> None:
        while not self.leave.is_set():
            reused = self._connection is not None
            try:
                self._connection = self._connection or self._opened()
            except OSError as error:
                self.came[f"refused {error!r}"] += 1
                continue
            keep = False
            try:
                keep = self._ask(self._connection, reused=reused)
            finally:
                if not (keep and self._keep):
                    self._connection.close()
                    self._connection = None
        if self._connection is not None:
            self._connection.close()

    def _opened(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection = self._connect()
        connection.connect()
        return connection

    def _ask(self, connection: http.client.HTTPConnection, *, reused: bool) -> bool:
        """One request; whether the connection can be kept."""
        try:
            self._send(connection)
            answer = connection.getresponse()
        except (ConnectionError, http.client.HTTPException) as error:
            self.came["stale" if reused else f"lost {error!r}"] += 1
            return False
        request_id = answer.getheader("x-request-id", "")
        try:
            body = answer.read()
        except (ConnectionError, http.client.HTTPException):
            self.came["cut"] += 1
            self.cut.add(request_id)
            return False
        if answer.status != 200:
            self.came[str(answer.status)] += 1
        elif (counts := self._counts(body)) is None:
            self.came["lies"] += 1
        else:
            self.came["whole"] += 1
            self.whole[request_id] = counts
        return not answer.will_close

    def _send(self, connection: http.client.HTTPConnection) -> None:
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
        body |= {"max_tokens": self._tokens, "stream": self._stream}
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        fields = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), fields)

    def _counts(self, body: bytes) -> tuple[int, int] | None:
        """Tokens in and out as the answer says; None where something of it is missing."""
        if not self._stream:
            usage = json.loads(body)["usage"]
        elif not body.endswith(b"data: [DONE]\n\n"):
            return None
        else:
            usage = json.loads(body.split(b"data: ")[-2])["usage"]
        if usage["completion_tokens"] != self._tokens:
            return None
        return usage["prompt_tokens"], usage["completion_tokens"]


class Visitor(Caller):
    """Calls an agent through ingress."""

    def _send(self, connection: http.client.HTTPConnection) -> None:
        connection.request("GET", f"/agents/{CALLED}/", headers={"X-Hive-Token": self._token})

    def _counts(self, body: bytes) -> tuple[int, int] | None:
        return (0, 0) if body.rstrip().endswith(b"</html>") else None


def callers(hive: Appliance, agent: str) -> list[Caller]:
    tokens, called = hive.api.get(f"/api/agents/{AGENT}/tokens"), hive.api.get(f"/api/agents/{CALLED}/tokens")
    port, ingress = hive.model.getsockname()[1], hive.ingress.getsockname()[1]

    def tcp() -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def unix() -> http.client.HTTPConnection:
        return Unix(hive.paths.agent_socket(agent))

    def through_ingress() -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", ingress, timeout=30)

    kinds: list[tuple[str, Any, bool, bool, int]] = [
        ("tcp new", tcp, False, False, SHORT_TOKENS),
        ("tcp kept", tcp, True, False, SHORT_TOKENS),
        ("tcp stream", tcp, False, True, SHORT_TOKENS),
        ("unix new", unix, False, False, SHORT_TOKENS),
        ("unix kept", unix, True, True, SHORT_TOKENS),
        ("tcp long stream", tcp, True, True, LONG_TOKENS),
        ("unix long stream", unix, False, True, LONG_TOKENS),
    ]
    found = [
        Caller(name, connect, keep=keep, stream=stream, tokens=count, token=tokens["model"])
        for name, connect, keep, stream, count in kinds
    ]
    visitor = Visitor("ingress", through_ingress, keep=False, stream=False, tokens=0, token=called["ingress"])
    return [*found, visitor]


@pytest.mark.wide
@pytest.mark.redis
@pytest.mark.timeout(180)
def test_the_proxy_restarts_under_load_and_nobody_is_refused() -> None:
    flags = ("--tokens", str(LONG_TOKENS), "--token-delay", str(TOKEN_S))
    with fake_backend("llama", *flags) as backend, appliance(backend.address) as hive:
        agent = hive.create(AGENT, "/bin/sleep", "1000")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            web_port = free.getsockname()[1]
        hive.create(CALLED, PYTHON, "-m", "http.server", str(web_port), "--bind", "127.0.0.1", port=web_port)
        load = callers(hive, agent)
        for caller in load:
            caller.start()
        try:
            for _ in range(RESTARTS):
                before = [caller.came["whole"] for caller in load if "long" not in caller.name]
                until(lambda before=before: _each_got_on(load, before), within_s=20, what="every caller is served")  # type: ignore[misc]
                hive.stop_proxy()
                hive.start_proxy()
            before = [caller.came["whole"] for caller in load if "long" not in caller.name]
            until(lambda: _each_got_on(load, before), within_s=20, what="every caller is served after the last restart")
        finally:
            for caller in load:
                caller.leave.set()
            for caller in load:
                caller.join()
        print({caller.name: dict(caller.came) for caller in load})
        _nobody_was_refused(load)
        _all_is_recorded(hive, load)


def _each_got_on(load: list[Caller], before: list[int]) -> bool:
    short = [caller for caller in load if "long" not in caller.name]
    return all(caller.came["whole"] >= count + 2 for caller, count in zip(short, before, strict=True))


def _nobody_was_refused(load: list[Caller]) -> None:
    """A connection that was kept may be found closed (`stale`), as with every server; nothing else may happen.

    What is longer than `drain_s` is cut, or refused where its answer had not begun.
    """
    for caller in load:
        allowed = {"whole", "stale"} | ({"cut", "503"} if "long" in caller.name else set())
        assert caller.came.keys() <= allowed, (caller.name, caller.came)
    cut = sum(caller.came["cut"] for caller in load)
    assert cut >= RESTARTS, "what is longer than drain_s was cut, and its client could tell"


def _all_is_recorded(hive: Appliance, load: list[Caller]) -> None:
    """Each whole answer once with its own counts, each that was cut as cut, and nothing besides."""
    asked = [caller for caller in load if not isinstance(caller, Visitor)]
    whole = {request: (False, 200, *counts) for caller in asked for request, counts in caller.whole.items()}
    cut = {request for caller in asked for request in caller.cut}
    until(lambda: whole.keys() | cut <= hive.rows().keys(), within_s=20, what="every answer has its row")
    rows = hive.rows()
    assert {request: row for request, row in rows.items() if not row[0]} == whole
    assert cut <= {request for request, row in rows.items() if row[0]}
