"""Servers of OpenAI's dialect that Hive does not start: recognised, asked with the key, and why not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hive.backends.backend import open_backend
from hive.backends.recognise import find, recognise, why_unknown
from hive.domain import BackendKind, ModelInfo
from hive.errors import BackendDown, ConfigError, NotPermitted, NotSupported
from hive.host.access import RemoteAccess, access_of
from hive.settings.table import InferenceSection
from tests.listening import listening
from tests.tls_front import KEY, Front, front, key_file

LIST = {"object": "list", "data": [{"id": "m", "object": "model", "created": 7, "owned_by": "them"}, {"id": "n"}]}
CHAT = {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Chat"}}}}}}
DESCRIBED = {
    "paths": {"/v1/chat/completions": CHAT, "/v1/models": {"get": {}}, "/v1/messages": {"post": {}}},
    "components": {
        "schemas": {
            "Chat": {"anyOf": [{"$ref": "#/components/schemas/Base"}]},
            "Base": {"properties": {"model": {}, "top_k": {}, "cache_salt": {"type": "string"}}},
        }
    },
}


@asynccontextmanager
async def listing(answers: dict[str, object], *, key: str = "") -> AsyncIterator[tuple[str, list[tuple[str, str]]]]:
    """A server on loopback; `key`: it wants that one. Each question it was asked, and with what authorization."""
    asked: list[tuple[str, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        shown = [line.partition(": ")[2] for line in lines if line.lower().startswith("authorization: ")]
        target = lines[0].split()[1]
        asked.append((target, "".join(shown)))
        status = 200 if target in answers else 404
        if key and shown != [f"Bearer {key}"]:
            status = 401
        body = json.dumps(answers[target] if status == 200 else {"error": {"message": "no"}}).encode()
        head = f"HTTP/1.1 {status} X\r\nOpenAI-Version: 2020-10-01\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async with listening(answer) as address:
        yield address, asked


async def test_an_openai_list_is_a_remote_where_somebody_named_it_and_nothing_elsewhere() -> None:
    async with listing({"/v1/models": LIST}) as (address, asked):
        assert await recognise(address) is None
        assert await find([address]) is None
        found = await recognise(address, RemoteAccess("sk-1"))
        assert found is not None
        assert (found.kind, found.address, found.version) == (BackendKind.REMOTE, address, "2020-10-01")
        assert {shown for _, shown in asked} == {""}, "who asks for no key is shown none"
        backend = open_backend(found.kind, address)
        assert await backend.models() == [ModelInfo(name="m", owned_by="them", created=7), ModelInfo(name="n")]
        assert (await backend.health(), await backend.version()) == (True, "2020-10-01")


async def test_below_a_path_it_is_remote_whatever_it_is() -> None:
    """A vLLM may be behind it; what stands before it decides what of it can be asked."""
    async with listing({"/llm/v1/models": LIST, "/version": {"version": "0.32.0"}}) as (address, asked):
        found = await recognise(f"http://{address}/llm", RemoteAccess())
        assert found is not None
        assert found.kind is BackendKind.REMOTE
        assert [target for target, _ in asked] == ["/llm/v1/models"]


async def test_a_known_kind_at_the_root_stays_that_kind() -> None:
    async with listing({"/v1/models": LIST, "/props": {"build_info": "b9"}}) as (address, asked):
        found = await recognise(address, RemoteAccess("sk-1"))
        assert found is not None
        assert (found.kind, found.version) == (BackendKind.LLAMA, "b9")
        assert {shown for _, shown in asked} == {""}


async def test_a_key_is_shown_where_one_is_asked_for() -> None:
    async with listing({"/v1/models": LIST}, key="sk-1") as (address, _):
        found = await recognise(address, RemoteAccess("sk-1"))
        assert found is not None
        assert found.kind is BackendKind.REMOTE
        assert await recognise(address, RemoteAccess("sk-2")) is None
        assert "refuses Hive's key (401)" in await why_unknown(address, RemoteAccess("sk-2"))
        assert "asks for a key (401), and it is shown none" in await why_unknown(address, RemoteAccess())
        backend = open_backend(BackendKind.REMOTE, address, RemoteAccess("sk-2"))
        assert await backend.health() is False
        with pytest.raises(BackendDown, match="refuses Hive's key"):
            await backend.version()


async def test_what_describes_itself_takes_what_it_describes_and_else_openais_schema_alone() -> None:
    async with listing({"/v1/models": LIST, "/openapi.json": DESCRIBED}) as (address, _):
        told = await open_backend(BackendKind.REMOTE, address).capabilities()
        assert told.endpoints == ("/v1/chat/completions", "/v1/messages")
        assert told.fields == ("top_k", "cache_salt", "reasoning_content")
        assert await open_backend(BackendKind.VLLM, address).capabilities() == told
    async with listing({"/v1/models": LIST, "/openapi.json": {"paths": {}}}) as (address, _):
        told = await open_backend(BackendKind.REMOTE, address).capabilities()
        assert (told.endpoints, told.fields) == (None, ())
        assert (await open_backend(BackendKind.VLLM, address).capabilities()).fields is None


@pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.REMOTE, BackendKind.DEMO])
async def test_who_does_not_load_on_request_says_why(kind: BackendKind) -> None:
    backend = open_backend(kind, "127.0.0.1:1")
    for verb in (backend.load("m"), backend.unload("m")):
        with pytest.raises(NotSupported, match=r"m is not (un)?loaded on request: .{20}"):
            await verb


# --- TLS, by a real nginx ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """In front of nobody: 502 with the key, 401 without it."""
    with front(tmp_path_factory.mktemp("nginx"), "127.0.0.1:1") as found:
        yield found


async def test_why_a_far_server_is_of_no_use_is_said(nginx: Front, tmp_path: Path) -> None:
    address = nginx.url.removesuffix("/v1")
    assert await recognise(address, RemoteAccess(KEY)) is None
    unknown = await why_unknown(address, RemoteAccess(KEY))
    assert "its certificate is not trusted: unable to get local issuer certificate" in unknown
    wrong = await why_unknown(address, RemoteAccess("sk-wrong", str(nginx.ca)))
    assert "refuses Hive's key (401)" in wrong
    assert "502" in await why_unknown(address, RemoteAccess(KEY, str(nginx.ca)))
    (tmp_path / "its").mkdir()
    with front(tmp_path / "its", "127.0.0.1:1", expired=True) as expired:
        said = await why_unknown(expired.url.removesuffix("/v1"), RemoteAccess(KEY, str(expired.ca)))
        assert "its certificate is not trusted: certificate has expired" in said
        assert expired.log.read_text() == "", "nothing was asked of it"
    no_file = RemoteAccess(KEY, str(tmp_path / "none.pem"))
    assert "backend_ca_file" in await why_unknown(address, no_file)
    assert await open_backend(BackendKind.REMOTE, address, no_file).health() is False


# --- the key -----------------------------------------------------------------------------------------------------


def test_the_key_is_the_credential_else_the_file_else_none(tmp_path: Path) -> None:
    path = key_file(tmp_path, "sk-file")
    inference = InferenceSection(backend_api_key_file=str(path))
    assert access_of(InferenceSection(), {}).key == ""
    assert access_of(inference, {}).key == "sk-file"
    given = tmp_path / "credentials"
    given.mkdir()
    (given / "backend-api-key").write_text("sk-given\n")
    env = {"CREDENTIALS_DIRECTORY": str(given)}
    assert access_of(inference, env).key == "sk-given"
    (given / "backend-api-key").write_text("")
    assert access_of(inference, env).key == "sk-file"
    assert "sk-" not in repr(access_of(inference, env))


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [("sk-1", 0o644, NotPermitted), ("", 0o600, ConfigError), ("a b", 0o600, ConfigError), ("é", 0o600, ConfigError)],
)
def test_a_key_file_that_others_can_read_or_that_holds_no_key_is_refused(
    tmp_path: Path, text: str, mode: int, error: type[Exception]
) -> None:
    path = key_file(tmp_path, text)
    path.chmod(mode)
    with pytest.raises(error) as refused:
        access_of(InferenceSection(backend_api_key_file=str(path)), {})
    assert "sk-1" not in str(refused.value)


def test_a_link_is_no_key_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(key_file(tmp_path))
    with pytest.raises(ConfigError):
        access_of(InferenceSection(backend_api_key_file=str(tmp_path / "link")), {})
