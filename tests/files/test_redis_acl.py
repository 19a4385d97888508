"""The appliance's Redis with its own configuration: what Hive's services do is let through, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import Agent, AgentSpec, BackendInfo, BackendKind, ModelInfo, Tier
from hive.errors import DependencyDown
from hive.files.redis_acl import acl_file
from hive.settings.table import Paths
from hive.store import agents, keys, live
from hive.store.channels import SystemEvent
from hive.store.database import Database
from hive.store.live import Live
from hive.store.redis_at import RedisAt
from hive.store.viewer import Viewer
from hive.tasks import spawn
from hive.tui import source
from hive.tui.source import Source

pytestmark = pytest.mark.redis

CONF = Path(__file__).parents[2] / "conf" / "redis.conf"
PASSWORDS = {"daemon": "daemon's password"}
HASHES = {user: hashlib.sha256(password.encode()).hexdigest() for user, password in PASSWORDS.items()}
AGENT = "0197a1b2-c3d4"


@pytest.fixture(scope="module")
def one_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One Redis for every refusal: none of them changes it."""
    with serving(tmp_path_factory.mktemp("r")) as socket:
        yield socket


@pytest.fixture
def appliance(short_path: Path) -> Iterator[Path]:
    with serving(short_path) as socket:
        yield socket


@contextlib.contextmanager
def serving(short_path: Path, *, others: str = "") -> Iterator[Path]:
    """Redis as hive-redis.service runs it, but for its paths and the receiver of its readiness; its socket.

    `others`: more lines of its ACL.
    """
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (short_path / "users.acl").write_text(acl_file(HASHES) + others)
    socket = short_path / "redis.sock"
    places = ["--unixsocket", str(socket), "--aclfile", str(short_path / "users.acl")]
    with (
        (short_path / "log").open("wb") as out,
        subprocess.Popen(
            ["redis-server", str(CONF), *places, "--supervised", "no"], stdout=out, cwd=short_path
        ) as server,
    ):
        try:
            while True:
                with contextlib.suppress(redis.ConnectionError), viewing(socket) as viewer:
                    viewer.ping()
                    break
                assert server.poll() is None, (short_path / "log").read_text()
            yield socket
        finally:
            server.kill()


@contextlib.contextmanager
def viewing(socket: Path, user: str = "viewer") -> Iterator[Any]:
    password = PASSWORDS.get(user, "anything")
    client = redis.Redis(unix_socket_path=str(socket), username=user, password=password, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


@contextlib.asynccontextmanager
async def living(socket: Path, user: str) -> AsyncIterator[Live]:
    store = Live(RedisAt(str(socket), user, PASSWORDS[user]))
    task = spawn(store.run(), name="live")
    try:
        yield store
    finally:
        assert not task.done()
        await store.close()


# --- what Hive does ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "GATHER_S", 0.005)


async def test_everything_the_daemon_says_and_asks_is_let_through(appliance: Path) -> None:
    async with living(appliance, "daemon") as store:
        prompt = ("0123456789abcdef", "Be kind.")
        store.put_agent(AGENT, paused=True, tier=Tier.HIGH, instance="machine-1", cid=7, prompt=prompt)
        store.put_agent("other", paused=False, tier=Tier.LOW)
        store.set_totals(AGENT, tokens_in=1, tokens_out=2, requests=3)
        store.set_models([ModelInfo(name="tiny")])
        store.set_backend(BackendInfo(kind=BackendKind.LLAMA, address="/x.sock", label="x"))
        store.set_config({"proxy.queue_depth": "3"})
        store.publish(SystemEvent(at=1.0, kind="backend.up"))
        await store._flush()
        store.touch(AGENT, 1000.0)
        store.add_usage([{"e": "p1", "n": 1, "d": b"{}"}])
        await store._flush()
        with viewing(appliance) as viewer:
            assert viewer.zrange(keys.AGENTS_ACTIVITY, 0, -1, withscores=True) == [(AGENT, 1000.0)]
            assert viewer.xlen(keys.USAGE_STREAM) == 1
            assert viewer.hgetall(keys.agent_tokens(AGENT)) == {"input": "1", "output": "2", "requests": "3"}
            assert viewer.get(keys.vm_cid(7)) == AGENT
            assert viewer.get(keys.CONFIG_RUNTIME) == '{"proxy.queue_depth":"3"}'
            assert viewer.get(keys.INFERENCE_BACKEND) == "llama"
            assert viewer.get(keys.agent_prompt(AGENT)) == prompt[0]
            assert viewer.smembers(keys.prompt_agents(prompt[0])) == {AGENT}
            store.put_agent(AGENT, paused=False, tier=Tier.HIGH, instance="machine-2", cid=8)
            await store._flush()
            assert viewer.get(keys.vm_cid(7)) is None
            store.forget_agent(AGENT)
            await store._flush()
            left = viewer.scan_iter()
            assert [key for key in left if AGENT in key or key.startswith(("hive:vm:", "hive:prompt:"))] == []
            assert viewer.zscore(keys.AGENTS_ACTIVITY, AGENT) is None


async def test_what_a_proxy_of_an_earlier_version_left_is_taken_out_of_the_stream(short_path: Path) -> None:
    """Redis comes up with the rights of this version, and with what that one wrote."""
    with (
        serving(short_path, others="user root on nopass ~* &* +@all\n") as socket,
        viewing(socket, "root") as root,
    ):
        root.xgroup_create(keys.USAGE_STREAM, keys.USAGE_GROUP, id="0", mkstream=True)
        root.xadd(keys.USAGE_STREAM, {"e": "p1", "n": 1})
        async with living(socket, "daemon") as store:
            entries = await store.old_usage(10)
            assert len(entries) == 1
            await store.settle_old_usage([entry.id for entry in entries])
            assert await store.old_usage(10) == []
        assert root.xinfo_groups(keys.USAGE_STREAM) == []


def test_a_viewer_looks_at_everything(appliance: Path) -> None:
    with viewing(appliance) as viewer:
        assert list(viewer.scan_iter()) == []
        assert viewer.get("hive:agent:tier:x") is None
        assert viewer.hgetall("hive:agent:tokens:x") == {}
        assert viewer.xrange("hive:usage") == []
        assert viewer.info("memory")["maxmemory_policy"] == "noeviction"
        with viewer.pubsub() as listening:
            listening.subscribe("hive:agent:status")
            assert listening.get_message(timeout=5)["type"] == "subscribe"


async def test_hive_top_reads_as_the_viewer_what_the_daemon_wrote_last(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon of an installed Hive is down; what had not ended was in Redis only."""
    monkeypatch.setattr(source, "APPLIANCE_RUNTIME", short_path)
    monkeypatch.setattr(source, "APPLIANCE_STATE", short_path)
    (paths := Paths(short_path, short_path, apart=True)).redis_socket.parent.mkdir()
    paths.database.parent.mkdir()
    database = Database.open(paths.database)
    await database.write(lambda conn: agents.insert(conn, Agent(id=AGENT, spec=AgentSpec(name="ann"))))
    database.close()
    top = Source([short_path / "hive.sock"], None, uid=0, env={})
    with serving(paths.redis_socket.parent) as socket:
        assert socket == paths.redis_socket
        async with living(socket, "daemon") as daemon:
            daemon.touch(AGENT, time.time() - 60)
            daemon.set_totals(AGENT, tokens_in=3, tokens_out=4, requests=1)
            await daemon._flush()
            row = (await asyncio.to_thread(top.look)).agents[0]
            assert (row.tokens_in, row.tokens_out, row.requests) == (3, 4, 1)
            assert 55 < (row.idle_s or 0) < 120
            daemon.touch(AGENT, time.time())
            daemon.set_totals(AGENT, tokens_in=13, tokens_out=14, requests=2)
            await daemon._flush()
            assert (await asyncio.to_thread(top.look)).agents[0].tokens_out == 14
        with contextlib.closing(Viewer(str(socket), user="")) as nameless, pytest.raises(DependencyDown):
            nameless.look()
    assert (await asyncio.to_thread(top.look)).agents[0].tokens_out == 0


# --- what nobody may ---------------------------------------------------------------------------------------------

NOBODY_MAY = (
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "KEYS *",
    "EVAL return(1) 0",
    "SCRIPT FLUSH",
    "FUNCTION LIST",
    "ACL LIST",
    "ACL WHOAMI",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "SAVE",
    "BGREWRITEAOF",
    "REPLICAOF NO ONE",
    "MODULE LIST",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SWAPDB 0 0",
    "MIGRATE h 1 k 0 1",
    "SET other:key 1",
    "SET hive:agent:tokens:x 1",
    "SET hive:usage 1",
    "GETDEL hive:agent:tier:x",
    "RENAME hive:usage hive:agent:tier:x",
    "PUBLISH other:channel x",
    "XTRIM hive:usage MAXLEN 0",
    "SORT hive:usage BY other:*",
)
EACH_MAY_NOT = {
    "daemon": (
        "GET hive:agent:tier:x",
        "XRANGE hive:usage - +",
        "DEL hive:usage",
        "DEL hive:agents:activity",
        "DEL hive:models:available",
        "DEL hive:agent:tier:x other:key",
        "MGET hive:agent:tier:x",
        "HINCRBY hive:agent:tokens:x a 1",
        "GET hive:prompt:0123456789abcdef",
        "SUBSCRIBE hive:x",
    ),
    "viewer": (
        "GET hive:prompt:0123456789abcdef",
        "STRLEN hive:prompt:0123456789abcdef",
        "GETRANGE hive:prompt:0123456789abcdef 0 -1",
        "MGET hive:agent:tier:x hive:prompt:0123456789abcdef",
        "SADD hive:prompt:agents:0123456789abcdef x",
        "GET other:key",
        "SET hive:agent:tier:x high",
        "DEL hive:agent:tier:x",
        "XADD hive:usage * a b",
        "XREAD BLOCK 0 STREAMS hive:usage $",
        "PUBLISH hive:agent:status x",
        "SUBSCRIBE other",
        "EXPIRE hive:agent:tier:x 1",
        "HSET hive:agent:tokens:x input 1",
        "HINCRBY hive:agent:tokens:x input 1",
        "ZADD hive:agents:activity 1 x",
        "SORT hive:usage STORE hive:other",
        "BLPOP hive:usage 0",
        "BZPOPMIN hive:agents:activity 0",
        "XREADGROUP GROUP daemon daemon BLOCK 0 STREAMS hive:usage >",
        "WAIT 1 0",
        "CLIENT PAUSE 1000",
    ),
}
REFUSED = [(user, words) for user, own in EACH_MAY_NOT.items() for words in (*NOBODY_MAY, *own)]


@pytest.mark.parametrize(("user", "words"), REFUSED, ids=[f"{user}: {words}" for user, words in REFUSED])
def test_what_is_not_its_business_is_refused(one_for_all: Path, user: str, words: str) -> None:
    with viewing(one_for_all, user) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*words.split())


@pytest.mark.parametrize("arguments", [{}, {"username": "default", "password": "x"}, {"username": "daemon"}])
def test_nobody_is_let_in_without_a_name_and_its_password(one_for_all: Path, arguments: dict[str, Any]) -> None:
    client = redis.Redis(unix_socket_path=str(one_for_all), **{"password": "wrong", **arguments} if arguments else {})
    with contextlib.closing(client), pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


def test_it_listens_at_no_port_and_writes_everything_down(one_for_all: Path) -> None:
    with viewing(one_for_all) as viewer:
        found = viewer.info()
    assert found["tcp_port"] == 0
    assert found["aof_enabled"] == 1
    assert one_for_all.stat().st_mode & 0o777 == 0o770


# --- the file ----------------------------------------------------------------------------------------------------


def test_the_file_holds_no_password() -> None:
    text = acl_file(HASHES)
    assert not [password for password in PASSWORDS.values() if password in text]
    assert all(f"#{digest}" in text for digest in HASHES.values())


def test_a_service_without_a_password_is_off() -> None:
    found = re.findall(r"^user (\w+) (on|off)", acl_file({}), re.MULTILINE)
    assert found == [("default", "off"), ("daemon", "off"), ("viewer", "on")]


@given(st.text().filter(lambda text: not re.fullmatch(r"[0-9a-f]{64}", text)))
def test_what_is_no_hash_gets_into_no_file(text: str) -> None:
    with pytest.raises(ValueError, match="SHA-256"):
        acl_file({"daemon": text})
