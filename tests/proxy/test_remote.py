"""A remote backend on the data path: TLS that is checked, its path, its key, and a schema it insists on.

The strict server is a stand-in, named as such: it judges requests by the types of the installed openai package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from hive.domain import BackendInfo, BackendKind, FoundCapabilities, ModelInfo
from tests.proxy.harness import CHAT, JSON_ANSWER, Backend, Client, Proxy, answer, chunked, post, proxied, read_request
from tests.tls_front import KEY, key_file, make_authority, make_certificate

TARGET = b"/v1/chat/completions"
STRICT = FoundCapabilities(fields=(), found="OpenAI's schema alone")
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder)
    make_certificate(folder)
    return folder


class Far(Backend):
    """The harness's backend behind TLS; `certificates` None: plain HTTP. `seen`: what the handshakes said."""

    def __init__(self, certificates: Path | None) -> None:
        super().__init__()
        self._certificates = certificates
        self.seen: list[tuple[str | None, str | None]] = []

    async def start(self) -> None:
        context = None
        if self._certificates is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._certificates / "cert.pem", self._certificates / "key.pem")
            context.set_alpn_protocols(["h2", "http/1.1"])
            self._asked: str | None = None
            context.sni_callback = lambda _sock, name, _context: setattr(self, "_asked", name)
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0, ssl=context)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("ssl_object")
        self.seen.append((self._asked, found.selected_alpn_protocol()) if found is not None else (None, None))
        await self._serve(reader, writer)


@contextlib.asynccontextmanager
async def remote(
    tmp_path: Path, certificates: Path | None, *, ca: Path | None = None, host: str = "localhost", key: str = KEY
) -> AsyncIterator[tuple[Proxy, Far]]:
    far = Far(certificates)
    await far.start()
    async with proxied(tmp_path) as (proxy, _):
        key_path = str(key_file(tmp_path, key)) if key else ""
        inference = msgspec.structs.replace(
            proxy.settings.inference, backend_api_key_file=key_path, backend_ca_file=str(ca or "")
        )
        proxy.path.use_settings(msgspec.structs.replace(proxy.settings, inference=inference))
        address = f"https://{host}:{far.address.rpartition(':')[2]}/llm"
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=address, up=True, capabilities=STRICT))
        try:
            yield proxy, far
        finally:
            await far.stop()


def use(proxy: Proxy, backend: BackendInfo) -> None:
    proxy.path.use_backend(backend, [ModelInfo(name="m")])


async def ask(proxy: Proxy, target: bytes, body: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    client = await Client.unix(proxy.socket_path)
    return await client.ask(post(target, json.dumps({"model": "m", **body}).encode()))


async def test_it_is_asked_below_its_path_with_hives_key_and_never_with_a_clients(
    tmp_path: Path, certificates: Path
) -> None:
    async with remote(tmp_path, certificates, ca=certificates / "ca.pem", key="sk-1%b%d") as (proxy, far):
        client = await Client.tcp(proxy.port)
        fields = b"authorization: Bearer hm_alice\r\nx-api-key: mine\r\n"
        for _ in range(2):
            status, _, _ = await client.ask(post(TARGET, CHAT, fields=fields))
            assert status == 200
        head = far.requests[0][0].split(b"\r\n")
        assert head[0] == b"POST /llm/v1/chat/completions HTTP/1.1"
        assert b"authorization: Bearer sk-1%b%d" in head
        assert b"host: localhost:%b" % far.address.rpartition(":")[2].encode() in head
        assert b"hm_alice" not in far.requests[0][0]
        assert b"mine" not in far.requests[0][0]
        assert far.seen == [("localhost", "http/1.1")], "one connection, kept"


async def test_a_long_body_goes_through_tls_whole(tmp_path: Path, certificates: Path) -> None:
    async with remote(tmp_path, certificates, ca=certificates / "ca.pem") as (proxy, far):
        long = [{"role": "user", "content": "word " * 600_000}]
        assert (await ask(proxy, TARGET, {"messages": long}))[0] == 200
        assert json.loads(far.requests[0][1])["messages"] == long


async def bad_request(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a TLS handshake as a server of plain HTTP does."""
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")


async def test_without_a_key_none_is_sent(tmp_path: Path, certificates: Path) -> None:
    async with remote(tmp_path, certificates, ca=certificates / "ca.pem", key="") as (proxy, far):
        assert (await ask(proxy, TARGET, {"messages": HELLO}))[0] == 200
        assert b"authorization" not in far.requests[0][0].lower()


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("unknown", b"is not trusted: "),
        ("expired", b"is not trusted: certificate has expired"),
        ("another name", b"is not trusted: Hostname mismatch"),
        ("plain", b"no TLS could be agreed on: "),
    ],
)
async def test_who_cannot_prove_who_it_is_gets_no_request_and_no_key(
    tmp_path: Path, certificates: Path, which: str, said: bytes
) -> None:
    its, ca = certificates, certificates / "ca.pem"
    if which in ("expired", "another name"):
        its = tmp_path / "its"
        its.mkdir()
        ca = make_authority(its)
        make_certificate(its, expired=which == "expired", names="DNS:elsewhere.example")
    async with remote(tmp_path, None if which == "plain" else its, ca=None if which == "unknown" else ca) as (
        proxy,
        far,
    ):
        if which == "plain":
            far.script = bad_request
        status, _, body = await ask(proxy, TARGET, {"messages": HELLO})
        assert status == 502
        assert said in body
        assert far.requests == []
        assert b"sk-" not in body


async def test_its_refusal_of_hives_key_is_not_the_agents_to_read(tmp_path: Path, certificates: Path) -> None:
    async with remote(tmp_path, certificates, ca=certificates / "ca.pem") as (proxy, far):
        words = b'{"error":{"message":"Incorrect API key provided: sk-hive...4f1c"}}'
        far.reply = answer(words, status=b"401 Unauthorized")
        status, _, body = await ask(proxy, TARGET, {"messages": HELLO})
        assert (status, json.loads(body)["error"]["src"]) == (502, "hive")
        assert b"4f1c" not in body
        far.reply = answer(b'{"error":{"message":"no such thing here"}}', status=b"404 Not Found")
        assert (await ask(proxy, b"/v1/embeddings", {"input": "x"}))[::2] == (
            404,
            b'{"error":{"message":"no such thing here"}}',
        )


async def test_a_key_that_cannot_be_read_stops_its_requests_and_names_no_file(
    tmp_path: Path, certificates: Path
) -> None:
    async with remote(tmp_path, certificates, ca=certificates / "ca.pem") as (proxy, far):
        (tmp_path / "api-key").chmod(0o644)
        proxy.path.use_settings(proxy.path.settings)
        status, _, body = await ask(proxy, TARGET, {"messages": HELLO})
        assert (status, far.requests) == (503, [])
        assert str(tmp_path).encode() not in body
        (tmp_path / "api-key").chmod(0o600)
        (tmp_path / "api-key").write_text("sk-another")
        proxy.path.use_settings(proxy.path.settings)
        assert (await ask(proxy, TARGET, {"messages": HELLO}))[0] == 200
        assert b"Bearer sk-another\r\n" in far.requests[0][0]


# --- a server that insists on OpenAI's schema --------------------------------------------------------------------

KNOWN = set(CompletionCreateParamsBase.__annotations__) | {"stream"}
IN_A_MESSAGE = {"role", "content", "tool_calls", "tool_call_id", "refusal", "function_call", "audio"}
STREAMED = (Path(__file__).with_name("streams") / "llama-chat-asked.sse").read_bytes()


async def strict(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A stand-in for OpenAI's own: what it does not know it refuses, in OpenAI's words."""
    while True:
        _, body = await read_request(reader)
        asked = json.loads(body)
        unknown = sorted(asked.keys() - KNOWN)
        unknown += [name for message in asked["messages"] for name in sorted(message.keys() - IN_A_MESSAGE)]
        if unknown:
            said = json.dumps({"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}).encode()
            writer.write(answer(said, status=b"400 Bad Request"))
        else:
            writer.write(chunked(STREAMED) if asked.get("stream") else answer(JSON_ANSWER))


@pytest.mark.parametrize(
    ("target", "body"),
    [
        (b"/v1/chat/completions", {"messages": HELLO, "temperature": 0}),
        (b"/v1/messages", {"messages": HELLO, "max_tokens": 4, "system": "Be short."}),
        (
            b"/api/chat",
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "f"}}]},
                    {"role": "tool", "tool_name": "f", "content": "7"},
                ],
                "options": {"temperature": 0, "top_k": 40, "repeat_penalty": 1, "num_ctx": 4096},
            },
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_server_answers_every_dialect(
    tmp_path: Path, target: bytes, body: dict[str, Any], stream: bool
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.script = strict
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True, capabilities=STRICT))
        status, fields, said = await ask(proxy, target, {**body, "stream": stream})
        assert status == 200, said
        if target == b"/api/chat":
            dropped = fields[b"x-hive-dropped"].decode().split(", ")
            assert {"options.top_k", "options.repeat_penalty", "messages.thinking"} <= set(dropped)


async def test_what_a_client_writes_itself_a_strict_server_judges_itself(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.script = strict
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True, capabilities=STRICT))
        status, _, said = await ask(proxy, TARGET, {"messages": HELLO, "top_k": 3})
        assert (status, b"Unrecognized request argument supplied: top_k" in said) == (400, True)


@pytest.mark.parametrize("kind", [BackendKind.REMOTE, BackendKind.VLLM])
async def test_whose_account_it_is_is_told_to_no_server(tmp_path: Path, kind: BackendKind) -> None:
    """`metadata.user_id` of the anthropic package became `user`: an account's id went to a foreign server, which
    answered 400 if it takes only 64 or 128 characters of it."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER)
        use(proxy, BackendInfo(kind=kind, address=backend.address, up=True))
        about = {"user_id": "user_" + "a" * 150, "other": 1}
        body = {"messages": HELLO, "max_tokens": 5, "metadata": about}
        _, fields, _ = await ask(proxy, b"/v1/messages", body)
        assert "metadata.user_id" in fields[b"x-hive-dropped"].decode().split(", ")
        assert b"user_aaa" not in backend.requests[0][1]
        assert "user" not in json.loads(backend.requests[0][1])


async def test_by_plain_http_it_is_asked_by_its_own_name(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True, capabilities=STRICT))
        assert (await ask(proxy, TARGET, {"messages": HELLO}))[0] == 200
        assert b"\r\nhost: %b\r\n" % backend.address.encode() in backend.requests[0][0]


# --- what a backend said of itself -------------------------------------------------------------------------------


async def test_what_llama_server_would_pass_over_is_refused(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        status, _, said = await ask(proxy, b"/v1/completions", {"prompt": "a", "suffix": "b"})
        assert (status, backend.requests) == (501, [])
        assert b"which passes over it: it continues the prompt" in said
        assert (await ask(proxy, b"/v1/completions", {"prompt": "a", "suffix": ""}))[0] == 200


async def test_a_path_that_a_server_says_it_lacks_is_gone_around_refused_or_its_own_to_refuse(tmp_path: Path) -> None:
    """A vLLM that generates answered embeddings with `{"detail":"Not Found"}`, which says nothing of why."""
    async with proxied(tmp_path) as (proxy, backend):
        told = FoundCapabilities(endpoints=("/v1/chat/completions",), found="/openapi.json")
        use(proxy, BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True, capabilities=told))
        assert (await ask(proxy, b"/v1/messages", {"messages": HELLO, "max_tokens": 4}))[0] == 200
        assert backend.requests[0][0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
        status, _, said = await ask(proxy, b"/api/embed", {"input": "x"})
        assert (status, len(backend.requests)) == (501, 1)
        assert b"does not offer /api/embed: its model makes text and no embeddings" in said
        status, _, said = await ask(proxy, b"/v1/embeddings", {"input": "x"})
        assert (status, len(backend.requests)) == (501, 1)
        assert b"does not offer /v1/embeddings: its model makes text and no embeddings" in said
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True, capabilities=told))
        backend.reply = answer(b'{"detail":"Not Found"}', status=b"404 Not Found")
        status, _, said = await ask(proxy, b"/v1/embeddings", {"input": "x"})
        assert (status, json.loads(said)["error"]["message"]) == (404, "the backend refused it (404): Not Found")


async def test_a_gateway_before_openais_models_is_told_the_limit_as_the_setting_says(tmp_path: Path) -> None:
    """The name went by the host alone, so a gateway under another host answered nothing."""
    async with proxied(tmp_path) as (proxy, backend):
        use(proxy, BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True))
        asked = {"messages": HELLO, "max_tokens": 5}
        for name in ("auto", "max_completion_tokens", "max_tokens"):
            inference = msgspec.structs.replace(proxy.settings.inference, backend_limit_name=name)
            proxy.path.use_settings(msgspec.structs.replace(proxy.settings, inference=inference))
            for target in (b"/v1/chat/completions", b"/v1/messages"):
                assert (await ask(proxy, target, asked))[0] == 200
        sent = [json.loads(body) for _, body in backend.requests]
        names = [[name for name in body if "tokens" in name] for body in sent]
        assert names == [["max_tokens"]] * 2 + [["max_completion_tokens"]] * 2 + [["max_tokens"]] * 2
