"""A real daemon on TCP: where it listens, and tokens over its end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hive.client.client import Client
from hive.control import api_tokens
from hive.control.api_tokens import LiveTokens
from hive.control.listening import WantedAddress
from hive.domain import Role
from hive.errors import ConfigError, Unauthorized
from hive.store.audit import Filter
from hive.store.database import Database
from tests.control.box import Box

ANYWHERE = WantedAddress("127.0.0.1", 0, move=False)
INTERNAL = "0123456789abcdef-internal"


async def status_of(port: int | None, token: str, path: str = "/api/health") -> int:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}", headers={"authorization": f"Bearer {token}"})
        return answer.status_code


def port_of(box: Box) -> int | None:
    return box.services.health.view()["api"]["port"]


async def test_without_a_port_it_is_on_its_socket_only(box: Box) -> None:
    await box.start_daemon()
    assert box.services.health.view()["api"] == {"listen": "127.0.0.1", "port": None}


async def test_a_taken_port_ends_a_daemon_that_may_not_move_and_the_next_one_comes_up(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 for the API cannot be taken"):
            await box.start_daemon(api=WantedAddress("127.0.0.1", port, move=False))
        box.daemon = None
    await box.start_daemon(api=WantedAddress("127.0.0.1", port, move=False))
    assert port_of(box) == port


async def test_tokens_outlive_the_daemon_and_so_does_their_end(box: Box) -> None:
    await box.start_daemon(api=ANYWHERE)
    kept = await box.api_token("kept", Role.VIEWER, None, "uid:0")
    gone = await box.api_token("gone", Role.VIEWER, None, "uid:0")
    assert await status_of(port_of(box), kept) == 200
    await box.services.api_tokens.revoke("gone", now=time.time())
    [before] = [token for token in await box.services.api_tokens.tokens() if token.revoked_at is None]
    await box.stop_daemon()
    await box.start_daemon(api=ANYWHERE)
    [after] = [token for token in await box.services.api_tokens.tokens() if token.revoked_at is None]
    assert after == before
    assert after.last_used_at is not None, "it is written when the daemon leaves"
    assert [await status_of(port_of(box), made) for made in (kept, gone)] == [200, 401]


async def test_when_a_token_was_used_is_written_now_and_then_and_not_for_each_request(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_tokens, "WRITTEN_EVERY_S", 0.2)
    await box.start_daemon(api=ANYWHERE)
    made = await box.api_token("a", Role.VIEWER, None, "uid:0")
    assert box.daemon is not None
    database = box.daemon._database

    async def read_back() -> float | None:
        rows = await database.read(lambda conn: conn.execute("SELECT last_used_at FROM api_tokens").fetchone())
        return None if rows[0] is None else float(rows[0])

    assert await read_back() is None
    await status_of(port_of(box), made)
    while (at := await read_back()) is None:  # noqa: ASYNC110 - a row of a table has no event
        await asyncio.sleep(0.02)
    assert abs(at - time.time()) < 60


async def test_the_credential_of_an_installed_hive_is_an_admin(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "api-token").write_text("hive_first-administrator\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("HIVE_INTERNAL_TOKEN", INTERNAL)
    await box.start_daemon(api=ANYWHERE)
    assert await status_of(port_of(box), "hive_first-administrator", "/api/tokens") == 200
    assert await status_of(port_of(box), INTERNAL, "/api/tokens") == 403


async def test_nobody_is_handed_hives_own_token_over_tcp(box: Box) -> None:
    """An operator's token that was revoked or had expired left its holder another one, which does neither."""
    await box.start_daemon(api=ANYWHERE)
    await box.start_proxy()
    made = await box.api_token("ci", Role.OPERATOR, None, "uid:0")
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        head = {"authorization": f"Bearer {made}"}
        answer = await client.get(f"http://127.0.0.1:{port_of(box)}/api/system/access", headers=head)
    assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted")
    assert box.services.internal_token not in answer.text
    orders = await box.audit(Filter(act="order.access"))
    assert [(row["actor"], row["origin"], row["outcome"]) for row in orders] == [
        ("token:ci", "tcp:127.0.0.1", "not_permitted")
    ]
    there = Client(box.paths.api_socket, timeout_s=20)
    assert (await asyncio.to_thread(there.get, "/api/system/access"))["token"] == box.services.internal_token


async def test_tokens_that_died_long_ago_are_forgotten_while_the_daemon_runs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired ones, and when revoked ones were used last, stayed in memory until a restart."""
    now = time.time()
    ring = LiveTokens(database, internal=INTERNAL)
    for name, expires_at in (("for-ever", None), ("long-ago", now + 1), ("just-now", now + api_tokens.EXPIRED_TOLD_S)):
        _, token = await ring.create(name, Role.VIEWER, expires_at=expires_at, actor="uid:0", now=now)
        ring.find(token, now)
    await ring.revoke("for-ever", now=now)
    monkeypatch.setattr(time, "time", lambda: now + api_tokens.EXPIRED_TOLD_S + 1)
    monkeypatch.setattr(api_tokens, "WRITTEN_EVERY_S", 0.0)
    running = asyncio.ensure_future(ring.run())
    while repr(ring) != "<LiveTokens 2 tokens, 0 held>" or ring._used:  # noqa: ASYNC110 - the ring has no event
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(Unauthorized, match="just-now has expired"):
        ring.find(token, now + api_tokens.EXPIRED_TOLD_S + 1)
    assert {token.last_used_at for token in await ring.tokens()} == {now}
    again = LiveTokens(database, internal=INTERNAL)
    await again.load()
    assert repr(again) == repr(ring)


@pytest.mark.parametrize("text", ["short", "with space in the middle"])
async def test_a_credential_that_is_none_keeps_the_daemon_from_starting(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "api-token").write_text(text)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match="the credential api-token is no token"):
        await box.start_daemon(api=ANYWHERE)
    box.daemon = None


def test_two_daemons_as_programs_stand_side_by_side(tmp_path: Path, short_path: Path) -> None:
    """On uvloop, as they run. The second finds the port taken, and moves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    programs: list[subprocess.Popen[bytes]] = []
    ports = []
    try:
        for name in ("1", "2"):
            state, runtime = tmp_path / name, short_path / name
            state.mkdir()
            runtime.mkdir()
            where = ["--state-dir", str(state), "--runtime-dir", str(runtime), "--api-port", str(port)]
            env = {**os.environ, "HIVE_INTERNAL_TOKEN": INTERNAL}
            programs.append(subprocess.Popen([sys.executable, "-P", "-m", "hive", "daemon", *where], env=env))
            client = Client(runtime / "hive.sock", timeout_s=20)
            while not client.answers():
                assert programs[-1].poll() is None
                time.sleep(0.02)
            ports.append(client.get("/api/health")["api"]["port"])
        assert ports[0] < ports[1]
        assert [asyncio.run(status_of(found, INTERNAL)) for found in ports] == [200, 200]
        assert [asyncio.run(status_of(found, "hive_wrong")) for found in ports] == [401, 401]
    finally:
        for program in programs:
            program.terminate()
            program.wait()
