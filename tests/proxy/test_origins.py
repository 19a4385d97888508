"""Cookies and the like between browsers and agents: dropped where agents share an origin, passed at their own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hive.errors import ConfigError
from hive.proxy.origins import SHARED, agent_of, dropped
from hive.settings.file import load
from tests.proxy.harness import INGRESS_TOKEN, Backend, Client, Proxy, answer, proxied
from tests.proxy.websocket_agent import KEY, Echo, switched

DOMAIN = "agents.example.org"
OWN = b"alice.agents.example.org"
KEEPS = (
    b"set-cookie: session=1; Path=/; HttpOnly",
    b"clear-site-data: *",
    b"service-worker-allowed: /",
    b"strict-transport-security: max-age=1",
    b'alt-svc: h3=":443"',
    b"nel: {}",
)
"""Fields that a browser would remember for the whole origin."""


def call(target: bytes, *more: bytes, host: bytes = b"h", token: bytes | None = INGRESS_TOKEN) -> bytes:
    lines = [b"GET %b HTTP/1.1" % target, b"host: " + host, *more]
    lines += [b"x-hive-token: " + token] if token else []
    return b"\r\n".join([*lines, b"", b""])


async def agent_of_alice(proxy: Proxy, *fields: bytes) -> Backend:
    agent = Backend()
    await agent.start()
    agent.reply = answer(b"hello").replace(b"\r\n", b"\r\n" + b"".join(field + b"\r\n" for field in fields), 1)
    proxy.registry.learn(msgspec.structs.replace(proxy.row, address=agent.address))
    return agent


async def test_where_agents_share_an_origin_nothing_is_left_in_the_browser_and_that_is_told(tmp_path: Path) -> None:
    """A cookie one agent set with Path=/ was sent to every other, and HSTS or an Alt-Svc of one held for all."""
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of_alice(proxy, *KEEPS, b"x-hive-dropped: nothing", b"etag: x")
        client = await Client.tcp(proxy.ingress_port)
        status, fields, body = await client.ask(call(b"/agents/alice/", b"cookie: session=bobs", b"accept: a/b"))
        assert (status, body) == (200, b"hello")
        assert not {name.lower() for name in fields} & SHARED
        assert fields[b"etag"] == b"x"
        told = b"alt-svc, clear-site-data, cookie, nel, service-worker-allowed, set-cookie, strict-transport-security"
        assert fields[b"x-hive-dropped"] == told
        head, _ = agent.requests[0]
        assert b"accept: a/b\r\n" in head
        assert b"cookie" not in head
        client.close()
        await agent.stop()


async def test_where_nothing_is_dropped_nothing_is_told(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of_alice(proxy, b"etag: x")
        client = await Client.tcp(proxy.ingress_port)
        _, fields, _ = await client.ask(call(b"/agents/alice/"))
        assert b"x-hive-dropped" not in fields
        client.close()
        await agent.stop()


async def test_at_an_origin_of_its_own_all_of_it_passes(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        agent = await agent_of_alice(proxy, *KEEPS)
        client = await Client.tcp(proxy.ingress_port)
        asked = call(b"/agents/bob/turn?q=1", b"cookie: session=1", host=b"Alice.Agents.example.org:8480")
        status, fields, body = await client.ask(asked)
        assert (status, body) == (200, b"hello")
        assert {b"%b: %b" % (name, fields[name]) for name in (line.partition(b":")[0] for line in KEEPS)} == set(KEEPS)
        assert b"x-hive-dropped" not in fields
        head, _ = agent.requests[0]
        assert head.startswith(b"GET /agents/bob/turn?q=1 HTTP/1.1\r\n")
        assert b"cookie: session=1\r\n" in head
        assert b"x-forwarded-prefix" not in head
        assert b"x-hive-token" not in head
        client.close()
        await agent.stop()


async def test_a_cookie_for_the_names_of_other_agents_is_dropped_there_too(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        agent = await agent_of_alice(proxy, b"set-cookie: a=b; Domain=agents.example.org", b"nel: {}")
        client = await Client.tcp(proxy.ingress_port)
        _, fields, _ = await client.ask(call(b"/", host=OWN))
        assert b"set-cookie" not in fields
        assert (fields[b"nel"], fields[b"x-hive-dropped"]) == (b"{}", b"set-cookie")
        client.close()
        await agent.stop()


async def test_a_browser_may_have_the_token_in_the_path_there(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        agent = await agent_of_alice(proxy)
        client = await Client.tcp(proxy.ingress_port)
        status, _, _ = await client.ask(call(b"/.hive/t/%b/turn?q=1" % INGRESS_TOKEN, host=OWN, token=None))
        assert status == 200
        head, _ = agent.requests[0]
        assert head.startswith(b"GET /turn?q=1 HTTP/1.1\r\n")
        assert b"x-forwarded-prefix: /.hive/t/%b\r\n" % INGRESS_TOKEN in head
        status, _, told = await client.ask(call(b"/.hive/state", host=OWN))
        assert (status, msgspec.json.decode(told)["agent"]) == (200, "alice")
        client.close()
        await agent.stop()


@pytest.mark.parametrize(
    "request_bytes",
    [
        call(b"/", host=OWN, token=None),
        call(b"/", host=OWN, token=b"hi_wrong"),
        call(b"/", host=b"bob." + DOMAIN.encode()),
        call(b"/", host=b"x.alice." + DOMAIN.encode()),
        call(b"/", host=b"." + DOMAIN.encode()),
        call(b"/.hive/t/hi_wrong/", host=OWN, token=None),
        call(b"/agents/alice/", host=b"bob." + DOMAIN.encode()),
    ],
)
async def test_a_name_in_the_host_takes_its_token_and_wakes_nobody_without(
    tmp_path: Path, request_bytes: bytes
) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        agent = await agent_of_alice(proxy)
        assert proxy.alice.gate.close(2, now=0.0) is None
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(request_bytes))[0] == 401
        assert agent.requests == []
        assert proxy.alice.gate.parked == 0
        client.close()
        await agent.stop()


async def test_another_host_is_the_shared_origin_still(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        agent = await agent_of_alice(proxy, *KEEPS)
        client = await Client.tcp(proxy.ingress_port)
        for host in (b"h", DOMAIN.encode(), b"x" + DOMAIN.encode(), OWN + b".evil.org"):
            status, fields, _ = await client.ask(call(b"/agents/alice/", host=host))
            assert status == 200
            assert b"set-cookie" not in fields
        client.close()
        await agent.stop()


async def test_so_it_is_with_the_answer_that_opens_a_websocket(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_domain=DOMAIN) as (proxy, _):
        for host, target, passes in ((b"h", b"/agents/alice/", False), (OWN, b"/", True)):
            echo, agent = Echo(switched(b"Set-Cookie: a=b")), Backend()
            await agent.start()
            agent.script = echo
            proxy.registry.learn(msgspec.structs.replace(proxy.row, address=agent.address))
            client = await Client.tcp(proxy.ingress_port)
            upgrade = (b"upgrade: websocket", b"connection: Upgrade", b"sec-websocket-version: 13")
            client.writer.write(call(target, *upgrade, b"sec-websocket-key: " + KEY, b"cookie: c=d", host=host))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ")
            assert (b"\r\nset-cookie: a=b\r\n" in head) is passes
            assert (b"\r\nx-hive-dropped: cookie, set-cookie\r\n" in head) is not passes
            assert (b"cookie: c=d\r\n" in echo.head) is passes
            client.close()
            await agent.stop()


def test_names_and_fields_are_told_apart_whatever_they_look_like() -> None:
    assert agent_of(b"alice.agents.example.org.", DOMAIN.encode()) == "alice"
    assert agent_of(b"\xe4.agents.example.org", DOMAIN.encode()) == "ä"
    assert agent_of(b"[::1]:8480", DOMAIN.encode()) is None
    twice = [(b"set-cookie", b"a=b"), (b"set-cookie", b"c=d")]
    assert dropped([], twice, shared=True)[1] == b"x-hive-dropped: set-cookie\r\n"
    assert dropped([], twice, shared=False)[1] == b""


def test_what_is_no_domain_is_refused(tmp_path: Path) -> None:
    for wrong in ("*.example.org", "Agents.example.org", ".example.org", "http://x", "a b"):
        (tmp_path / "hive.conf").write_text(f"[proxy]\ningress_domain = {wrong}\n")
        with pytest.raises(ConfigError, match="ingress_domain"):
            load(tmp_path / "hive.conf", env={})
