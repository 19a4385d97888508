"""A real Hive whose database is damaged between two of its starts: no user is locked out, and no right comes back."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import free_port
from tests.up import test_up
from tests.up.test_up import HIVE, SLEEPER, HiveUp, agent, until

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.timeout(180),
]


hive = test_up.hive


def asked(port: int, token: str, path: str, body: object = None) -> int:
    """The status of one request on TCP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        fields = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), fields)
        return connection.getresponse().status
    finally:
        connection.close()


def turn(hive: HiveUp) -> dict[str, Any]:
    until(lambda: hive.client.get("/api/system/inference")["models"], hive.said)
    model = hive.client.get("/api/system/inference")["models"][0]["name"]
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def asks_model(hive: HiveUp, token: str) -> int:
    body = turn(hive)
    return asked(hive.client.get("/api/health")["proxy"]["port"], token, "/v1/chat/completions", body)


def asks_api(hive: HiveUp, token: str) -> int:
    return asked(hive.client.get("/api/health")["api"]["port"], token, "/api/health")


def requests_of(hive: HiveUp) -> int:
    found = hive.client.get("/api/usage")
    return sum(one["requests"] for one in found["agents"])


def said_by(hive: HiveUp, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HIVE, *words, "--state-dir", str(hive.state)], capture_output=True, text=True, check=False, timeout=60
    )


def kill_all_of(hive: HiveUp) -> None:
    """kill -9 of all of it at one moment; its agents live on."""
    children = [*hive.children().values()]
    for child in children:
        child.suspend()
    hive.send(signal.SIGKILL)
    hive.wait()
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=30)


def header_gone(path: Path) -> None:
    """With the write-ahead log, which has a copy of the first page."""
    log_gone(path)
    with path.open("r+b") as file:
        file.write(os.urandom(4096))


def log_gone(path: Path) -> None:
    """Of a Hive that was killed, with all that was committed last in it."""
    path.with_name("hive.db-wal").unlink()


@pytest.mark.parametrize(
    "damage", [header_gone, pytest.param(log_gone, marks=pytest.mark.wide)], ids=["header gone", "log gone"]
)
def test_after_a_damaged_database_tokens_hold_what_was_revoked_stays_so_and_status_says_what_is_gone(
    hive: HiveUp, damage: Callable[[Path], None]
) -> None:
    """Every agent's token was refused from then on, and those of the API too; agents lived on that nobody knew."""
    api = ("--api-port", str(free_port()))
    hive.start(*api).until_up()
    ann = agent(hive, "ann", SLEEPER)
    hive.client.post("/api/agents", {"name": "far", "runtime": "external", "command": []})
    agent(hive, "gone", SLEEPER)
    tokens = {name: hive.client.get(f"/api/agents/{name}/tokens")["model"] for name in ("ann", "far", "gone")}
    keys = {
        name: hive.client.post("/api/tokens", {"name": name, "role": "viewer"})["token"] for name in ("good", "revoked")
    }
    hive.client.delete("/api/agents/gone")
    hive.client.delete("/api/tokens/revoked")
    assert [asks_model(hive, token) for token in tokens.values()] == [200, 200, 401]
    assert [asks_api(hive, key) for key in keys.values()] == [200, 401]
    until(lambda: requests_of(hive) == 2, hive.said)
    kill_all_of(hive)
    database = hive.state / "hive.db"
    damage(database)

    hive.start(*api).until_up()
    view = hive.client.get("/api/agents/ann")
    assert (view["status"], view["pid"]) == ("running", ann["pid"]), hive.said()
    assert {one["name"] for one in hive.client.get("/api/agents")["agents"]} == {"ann", "far"}
    assert [asks_model(hive, token) for token in tokens.values()] == [200, 200, 401], hive.said()
    assert [asks_api(hive, key) for key in keys.values()] == [200, 401]
    status = json.loads(said_by(hive, "status", "--json").stdout)
    [told] = [one for one in status["next"] if one["problem"].startswith("the database ")]
    assert (status["status"], told["command"]) == ("degraded", f"hive restore FILE --state-dir {hive.state}")
    assert said_by(hive, "audit", "verify").returncode == 0, said_by(hive, "audit", "verify").stdout
    if damage is header_gone:
        for aside in hive.state.glob("hive.db.damaged-*"):
            assert str(hive.state / "hive.db.damaged-") in told["problem"]
            aside.unlink()
        after = json.loads(said_by(hive, "status", "--json").stdout)
        assert after["problems"] == []
    assert hive.end() == 0


def test_what_the_spool_still_has_is_in_the_new_database(hive: HiveUp) -> None:
    hive.start().until_up()
    agent(hive, "ann", SLEEPER)
    token = hive.client.get("/api/agents/ann/tokens")["model"]
    port = hive.client.get("/api/health")["proxy"]["port"]
    assert asks_model(hive, token) == 200
    until(lambda: requests_of(hive) == 1, hive.said)
    body = turn(hive)
    hive.children()["daemon"].send_signal(signal.SIGSTOP)
    assert [asked(port, token, "/v1/chat/completions", body) for _ in range(3)] == [200] * 3
    kill_all_of(hive)
    header_gone(hive.state / "hive.db")
    hive.start().until_up()
    until(lambda: requests_of(hive) >= 3, hive.said)
    time.sleep(0.5)
    assert requests_of(hive) in (3, 4), "the first one too where its spool was not trimmed yet"
    assert hive.end() == 0
    with sqlite3.connect(hive.state / "hive.db") as conn:
        assert conn.execute("SELECT count(DISTINCT id), count(*) FROM inference_usage").fetchone() in ((3, 3), (4, 4))
