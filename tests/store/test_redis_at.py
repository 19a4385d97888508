"""A Redis of somebody else's: found by its URL, entered with a password or as an ACL user, never named with either."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import redis

from hive.errors import ConfigError, DependencyDown
from hive.store.live import Live
from hive.store.redis_at import RedisAt, redis_at
from tests.ports import free_port
from tests.tls_front import make_authority, make_certificate

PASSWORD, WRONG = "p/a@s:s#word", "not-the-password"
QUOTED = "p%2Fa%40s%3As%23word"

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its socket. The default user has a password, `hive` the same, and `poor` may do nothing but log in."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    here = tmp_path_factory.mktemp("r")
    acl = [f"user default on >{PASSWORD} ~* &* +@all", f"user hive on >{PASSWORD} ~* &* +@all"]
    (here / "users.acl").write_text("\n".join([*acl, f"user poor on >{PASSWORD} -@all"]) + "\n")
    command = ["redis-server", "--port", "0", "--unixsocket", f"{here}/s", "--save", "", "--dir", str(here)]
    with subprocess.Popen([*command, "--aclfile", f"{here}/users.acl"], stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with contextlib.suppress(redis.ConnectionError), redis.Redis(unix_socket_path=f"{here}/s") as client:
                    with contextlib.suppress(redis.AuthenticationError):
                        client.ping()
                    break
                assert process.poll() is None, "redis-server did not start"
            yield here / "s"
        finally:
            process.kill()


def found(url: str, password: str | None = None) -> RedisAt:
    def credential(name: str, env: Mapping[str, str]) -> bytes | None:
        return f"{password}\n".encode() if password is not None and name == "redis-password" else None

    return redis_at(Path("/nonexistent/redis.sock"), "daemon", {"REDIS_URL": url}, credential)


@contextlib.asynccontextmanager
async def asked(at: RedisAt) -> AsyncIterator[Live]:
    """One that was answered, whatever was said."""
    live = Live(at)
    with contextlib.suppress(DependencyDown):
        await live._do(("PING",))
    yield live
    await live.close()


@pytest.mark.parametrize(
    ("url", "password"),
    [
        (f"unix://:{QUOTED}@", None),
        (f"unix://hive:{QUOTED}@", None),
        ("unix://", PASSWORD),
        ("unix://hive@", PASSWORD),
        (f"unix://hive:{QUOTED}@", WRONG),
    ],
    ids=["password in the URL", "user in the URL", "password apart", "password of a user apart", "the URL's counts"],
)
async def test_a_password_or_an_acl_user_lets_in(
    server: Path, url: str, password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hive"):
        async with asked(found(f"{url}{server}", password)) as live:
            assert live.up
            assert live.why_down == ""
    assert f"redis_up path={server}" in caplog.text


@pytest.mark.parametrize(
    ("url", "password", "said"),
    [
        ("unix://", None, "Authentication required"),
        ("unix://", WRONG, "invalid username-password pair"),
        (f"unix://:{WRONG}@", None, "invalid username-password pair"),
        (f"unix://poor:{QUOTED}@", None, "no permissions"),
    ],
)
async def test_who_is_not_let_in_is_told_why_once_and_without_the_password(
    server: Path, url: str, password: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hive"):
        async with asked(found(f"{url}{server}", password)) as live:
            assert not live.up
            assert said in live.why_down
            for _ in range(3):
                with pytest.raises(DependencyDown, match=said):
                    await live._do(("PING",))
    told = [record.getMessage() for record in caplog.records if "redis_down" in record.getMessage()]
    assert len(told) == 1
    assert said in told[0]
    assert not any(secret in caplog.text + live.why_down for secret in (WRONG, PASSWORD, QUOTED))


NO_URLS = [
    "redis://:pa/ss@redis:6379",
    "redis://u:s3cret@redis:port",
    "redis://:s3cret@[h",
    "redis://:s3cret@redis/first",
    "rediss://:s3cret@redis?ssl_cert_reqs=none",  # would be half obeyed
    "memcached://:s3cret@redis",
]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_none_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(url)
    assert "REDIS_URL is not the address of a Redis" in caught.value.message
    assert not any(part in caught.value.message + caught.value.hint for part in ("s3cret", "pa/ss", "'pa'"))
    assert caught.value.__suppress_context__


async def test_a_database_of_its_own_is_chosen(server: Path) -> None:
    async with asked(found(f"unix://:{QUOTED}@{server}?db=3")) as live:
        await live._do(("SET", "here", "1"))
    with redis.Redis(unix_socket_path=str(server), password=PASSWORD, db=3) as client:
        assert client.get("here") == b"1"


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a Redis with TLS, and the authority of its certificate."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    here, port = tmp_path_factory.mktemp("t"), free_port()
    authority = make_authority(here)
    make_certificate(here)
    tls = ["--tls-port", str(port), "--tls-cert-file", f"{here}/cert.pem", "--tls-key-file", f"{here}/key.pem"]
    tls += ["--tls-ca-cert-file", str(authority), "--tls-auth-clients", "no"]
    command = ["redis-server", "--port", "0", "--bind", "127.0.0.1", "--save", "", "--dir", str(here), *tls]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, "redis-server did not start"
            yield port, authority
        finally:
            process.kill()


async def test_over_tls_it_is_asked_where_its_certificate_is_trusted(
    with_tls: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, authority = with_tls
    async with asked(found(f"rediss://localhost:{port}")) as live:
        assert not live.up
        assert "certificate verify failed" in live.why_down
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    async with asked(found(f"rediss://localhost:{port}")) as live:
        assert live.up, live.why_down
