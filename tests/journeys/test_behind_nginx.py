"""The page docs/how-to/behind-a-reverse-proxy.md is true, with its own configuration of nginx and of Hive.

A real nginx is before a whole Hive. Without nginx or openssl the tests are skipped, with the reason.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.book.blocks import blocks
from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until
from tests.ports import free_port
from tests.proxy.websocket_agent import ACCEPT, KEY
from tests.tls_front import make_authority, make_certificate

PAGE = "docs/how-to/behind-a-reverse-proxy.md"
CALLERS, MODEL, API = "agents.example.org", "model.example.org", "hive.example.org"
AT_HOME = f"echo.{CALLERS}"
WITHIN_S = 60
HTTP = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    include {folder}/hive.conf;
}}
"""

pytestmark = pytest.mark.redis


def written(kind: str) -> str:
    """The one block of this kind on the page."""
    (block,) = [block for block in blocks(PAGE) if block.kind == kind]
    return block.text


class Fronted(NamedTuple):
    """A Hive, and the nginx before it. `trusts`: those who vouch for nginx; `client`: of nginx, whatever the name."""

    hive: Stack
    port: int
    trusts: ssl.SSLContext
    client: httpx.Client

    def connect(self, name: str) -> ssl.SSLSocket:
        """A connection to nginx by one of its names."""
        plain = socket.create_connection(("127.0.0.1", self.port), WITHIN_S)
        return self.trusts.wrap_socket(plain, server_hostname=name)

    def request(
        self, name: str, target: str, *, body: bytes | None = None, fields: Mapping[str, str] | None = None
    ) -> httpx.Request:
        """A request by this name: GET, or POST with a body."""
        return self.client.build_request(
            "GET" if body is None else "POST",
            f"https://127.0.0.1:{self.port}{target}",
            content=body,
            headers={"Host": name, **(fields or {})},
            extensions={"sni_hostname": name},
        )

    def ask(
        self, name: str, target: str, *, body: bytes | None = None, fields: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return self.client.send(self.request(name, target, body=body, fields=fields))

    @contextmanager
    def stream(
        self, name: str, target: str, *, body: bytes | None = None, fields: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """The answer, its body not read yet."""
        answer = self.client.send(self.request(name, target, body=body, fields=fields), stream=True)
        try:
            yield answer
        finally:
            answer.close()

    def token_of(self, agent: str, kind: str) -> str:
        return str(self.hive.get(f"/api/agents/{agent}/tokens")[kind])


def as_here(text: str, folder: Path, port: int, ports: Mapping[str, int]) -> str:
    """The configuration of the page with the ports and the files of this test."""
    for there, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/hive/fullchain.pem": str(folder / "cert.pem"),
        "/etc/ssl/hive/key.pem": str(folder / "key.pem"),
        **{f" {number};": f" {ports[number]};" for number in ports},
    }.items():
        assert there in text, f"the page has no {there!r}"
        text = text.replace(there, here)
    return text


@pytest.fixture(scope="module")
def nginx() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("no nginx, or no openssl: apt-get install nginx-light openssl")
    return program


@pytest.fixture(scope="module")
def fronted(nginx: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    """With an agent `echo` behind ingress, and two external ones, `ann` and `ben`."""
    folder, port = tmp_path_factory.mktemp("front"), free_port()
    authority = make_authority(folder)
    make_certificate(folder, names=f"DNS:{CALLERS},DNS:*.{CALLERS},DNS:{MODEL},DNS:{API}")
    with (
        fake_backend("llama", "--token-delay", "0.2", "--tokens", "4") as backend,
        stack(url=backend.url, config=written("ini")) as hive,
    ):
        hive.create("echo", "fronted.py", port=free_port())
        until(lambda: hive.agent_lines("echo"), within_s=20, what="echo listens")
        for name in ("ann", "ben"):
            hive.post("/api/agents", {"name": name, "runtime": "external"})
        health = hive.health()
        proxy = health["proxy"]
        ports = {"8480": proxy["ingress_port"], "11435": proxy["port"], "3000": health["api"]["port"]}
        (folder / "hive.conf").write_text(as_here(written("nginx"), folder, port, ports))
        (folder / "nginx.conf").write_text(HTTP.format(folder=folder))
        command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_until_up(port, folder / "error.log", process)
                trusts = ssl.create_default_context(cafile=str(authority))
                with httpx.Client(verify=trusts, trust_env=False, timeout=WITHIN_S) as client:
                    yield Fronted(hive, port, trusts, client)
            finally:
                process.kill()


def _wait_until_up(port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
    until_at = time.monotonic() + WITHIN_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, f"nginx ended: {log.read_text(errors='replace')}"
        assert time.monotonic() < until_at, "nginx does not answer"
        time.sleep(0.02)


# --- callers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CALLERS, AT_HOME])
def test_an_agents_stream_arrives_piece_by_piece(fronted: Fronted, name: str) -> None:
    """The agent sends its next piece only when it was told to, and that is when the one before is here."""
    token, prefix = fronted.token_of("echo", "ingress"), "/agents/echo" if name == CALLERS else ""
    fields = {"X-Hive-Token": token}
    with fronted.stream(name, f"{prefix}/stream", fields=fields) as answer:
        lines = answer.iter_lines()
        for number in range(3):
            assert next(lines) == f"data: {number}"
            assert next(lines) == ""
            assert fronted.ask(name, f"{prefix}/go", fields=fields).text == "gone on"
        assert list(lines) == []


@pytest.mark.parametrize(("name", "target"), [(CALLERS, "/agents/echo/t/{}/ws"), (AT_HOME, "/.hive/t/{}/ws")])
def test_a_websocket_goes_through_ingress(fronted: Fronted, name: str, target: str) -> None:
    target = target.format(fronted.token_of("echo", "ingress"))
    with fronted.connect(name) as sock:
        sock.sendall(
            b"GET %b HTTP/1.1\r\nhost: %b\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-key: %b\r\nsec-websocket-version: 13\r\n\r\n" % (target.encode(), name.encode(), KEY)
        )
        head = _until_blank_line(sock)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-accept: " + ACCEPT.lower() in head.lower()
        for frame in (b"\x81\x83\x01\x02\x03\x04\x60\x60\x60", b"\x89\x80\x01\x02\x03\x04"):
            sock.sendall(frame)
            assert _exactly(sock, len(frame)) == frame


def _until_blank_line(sock: ssl.SSLSocket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _exactly(sock, 1)
    return head


def _exactly(sock: ssl.SSLSocket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = sock.recv(size - len(found))
        assert piece, f"it ended after {found!r}"
        found += piece
    return found


LIES = {
    "Forwarded": "for=203.0.113.9",
    "X-Forwarded-For": "203.0.113.9",
    "X-Forwarded-Host": "elsewhere.example",
    "X-Forwarded-Port": "1",
    "X-Forwarded-Proto": "gopher",
    "X-Forwarded-Prefix": "/elsewhere",
    "X-Real-IP": "203.0.113.9",
    "X-Tenant-ID": "acme",
    "X-Priority": "high",
    "X-Cache-Mode": "none",
    "X-Cache-Tag": "t",
    "Cookie": "c=d",
    "X-Other": "passes",
}


def test_below_the_shared_origin_fields_are_as_the_page_says(fronted: Fronted) -> None:
    token = fronted.token_of("echo", "ingress")
    answer = fronted.ask(CALLERS, "/agents/echo/head", fields={"X-Hive-Token": token, **LIES})
    told = answer.json()
    assert told["x-forwarded-prefix"] == "/agents/echo"
    assert told["host"] == CALLERS
    assert told["x-other"] == "passes"
    dropped = {name.lower() for name in LIES} - {"x-forwarded-prefix", "x-other"}
    assert not (dropped | {"x-hive-token"}) & told.keys()
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-hive-dropped"] == "cookie, set-cookie"


def test_at_an_origin_of_its_own_cookies_pass(fronted: Fronted) -> None:
    token = fronted.token_of("echo", "ingress")
    answer = fronted.ask(AT_HOME, "/head", fields={"X-Hive-Token": token, **LIES})
    told = answer.json()
    assert (told["host"], told["cookie"]) == (AT_HOME, "c=d")
    dropped = {name.lower() for name in LIES} - {"cookie", "x-other"}
    assert not (dropped | {"x-hive-token"}) & told.keys()
    assert answer.headers["set-cookie"] == "a=b"
    assert "x-hive-dropped" not in answer.headers


def test_a_body_of_more_than_nginx_takes_by_itself_passes(fronted: Fronted) -> None:
    token = fronted.token_of("echo", "ingress")
    answer = fronted.ask(CALLERS, "/agents/echo/", body=bytes(2_000_000), fields={"X-Hive-Token": token})
    assert (answer.status_code, answer.text) == (200, "2000000")


def test_a_wrong_token_is_hives_own_401(fronted: Fronted) -> None:
    answer = fronted.ask(CALLERS, "/agents/echo/", fields={"X-Hive-Token": "hi_wrong"})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"


# --- the model ---------------------------------------------------------------------------------------------------


def chat(*, stream: bool, tokens: int) -> bytes:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    return json.dumps({**asked, "stream": stream}).encode()


def as_agent(fronted: Fronted, name: str) -> dict[str, str]:
    token = fronted.token_of(name, "model")
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


def under_way(hive: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = hive.get("/api/queue")["requests"]
    return found


def test_a_models_stream_arrives_while_it_is_made_and_a_client_that_leaves_ends_it(fronted: Fronted) -> None:
    """It would take minutes: what is read of it cannot have waited for its end."""
    hive, fields = fronted.hive, as_agent(fronted, "ann")
    body = chat(stream=True, tokens=3000)
    with fronted.stream(MODEL, "/v1/chat/completions", body=body, fields=fields) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert [one["state"] for one in under_way(hive)] == ["streaming"]
    until(lambda: not under_way(hive), within_s=20, what="its place is free")


def test_two_agents_ask_by_turns_over_one_connection_to_nginx(fronted: Fronted) -> None:
    """A connection to the model's port belongs to one agent for ever: nginx opens one for each request."""
    connections = set()
    for name in ("ann", "ben", "ann", "ben"):
        body, fields = chat(stream=False, tokens=2), as_agent(fronted, name)
        answer = fronted.ask(MODEL, "/v1/chat/completions", body=body, fields=fields)
        assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
        connections.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(connections) == 1


# --- the API -----------------------------------------------------------------------------------------------------


def test_the_api_answers_by_the_name_that_hosts_has_and_by_no_other(fronted: Fronted) -> None:
    made = fronted.hive.post("/api/tokens", {"name": "front", "role": "viewer"})
    fields = {"Authorization": f"Bearer {made['token']}"}
    answer = fronted.ask(API, "/api/health", fields=fields)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    port = fronted.hive.health()["api"]["port"]
    other = {**fields, "Host": "other.example.org"}
    refused = httpx.get(f"http://127.0.0.1:{port}/api/health", headers=other, trust_env=False)
    assert (refused.status_code, refused.json()["detail"]) == (403, "this is not other.example.org")
