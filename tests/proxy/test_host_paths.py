"""Error texts of a server name none of the directories of its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.dialects.errors import without_host_paths
from hive.domain import BackendInfo, BackendKind
from tests.proxy.harness import CHAT, STREAM, Client, answer, chunked, post, proxied

BLOB = "/root/.ollama/models/blobs/sha256-ab12"
SAID = f"llama-server process has terminated: open {BLOB}: no such file or directory"
MENDED = SAID.replace(BLOB, "sha256-ab12")
FAILED = b"500 Internal Server Error"


@pytest.mark.parametrize(
    ("kind", "target", "told"),
    [
        (BackendKind.OLLAMA, b"/api/chat", {"error": SAID}),
        (BackendKind.OLLAMA, b"/v1/chat/completions", {"error": {"message": SAID, "type": "api_error"}}),
        (BackendKind.LLAMA, b"/v1/chat/completions", {"error": {"message": SAID, "type": "server_error", "code": 500}}),
        (BackendKind.LLAMA, b"/api/chat", {"error": {"message": SAID, "type": "server_error", "code": 500}}),
        (BackendKind.REMOTE, b"/v1/messages", {"error": {"message": SAID, "type": "server_error", "code": 500}}),
    ],
)
async def test_an_error_is_relayed_without_the_hosts_directories(
    tmp_path: Path, kind: BackendKind, target: bytes, told: object
) -> None:
    """Agents were told where the host keeps its models."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        backend.reply = answer(json.dumps(told).encode(), status=FAILED)
        asked = json.dumps({**json.loads(CHAT), "max_tokens": 5}).encode()
        for body in (asked, asked.replace(b"{", b'{"stream":true,', 1)):
            status, _, said = await (await Client.unix(proxy.socket_path)).ask(post(target, body))
            assert status == 500
            error = json.loads(said)["error"]
            assert (error if isinstance(error, str) else error["message"]) == MENDED


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("kind", "target", "first", "error"),
    [
        (BackendKind.OLLAMA, b"/api/chat", b'{"model":"m","message":{"content":"a"},"done":false}\n', b"%b\n"),
        (
            BackendKind.VLLM,
            b"/v1/chat/completions",
            b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
            b"data: %b\n\n",
        ),
    ],
)
async def test_an_error_in_a_stream_as_well(
    tmp_path: Path, kind: BackendKind, target: bytes, first: bytes, error: bytes, *, begun: bool
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        pieces = [*([first] if begun else []), error % json.dumps({"error": SAID}).encode()]
        of_a_stream = b"application/x-ndjson" if kind is BackendKind.OLLAMA else b"text/event-stream"
        backend.reply = chunked(*pieces, content_type=of_a_stream)
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(target, STREAM, fields=b"connection: close\r\n"))
        said = await client.reader.read()
        assert MENDED.encode() in said
        assert b"/root" not in said


async def test_an_answer_that_is_no_error_keeps_its_paths(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.LLAMA)
        message = {"role": "assistant", "content": f"look at {BLOB}"}
        told = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        backend.reply = answer(told)
        assert (await (await Client.unix(proxy.socket_path)).ask(post(b"/v1/chat/completions", CHAT)))[2] == told


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("failed to load '/srv/models/a b.gguf'", "failed to load 'a b.gguf'"),
        ('File "/opt/vllm/lib/python3.11/x.py", line 5', 'File "x.py", line 5'),
        ("first\n/home/me/x.gguf: gone", "first\nx.gguf: gone"),
        ("path=/var/lib/hive/models/", "path="),
        ("`/v1/chat/completions` and /api/chat and /docs", "`/v1/chat/completions` and /api/chat and /docs"),
        ("https://ollama.com/download/linux", "https://ollama.com/download/linux"),
        ("meta-llama/Llama-3/x is not there, try 1/2/3", "meta-llama/Llama-3/x is not there, try 1/2/3"),
        ("C:\\Users\\me\\.ollama\\x.gguf", "x.gguf"),
    ],
)
def test_what_is_a_path_and_what_is_none(said: str, left: str) -> None:
    assert json.loads(without_host_paths(json.dumps({"error": said}).encode())) == {"error": left}


@given(said=st.text(alphabet="/\\\"ab: .vC\n'", max_size=60))
def test_what_was_json_is_json(said: str) -> None:
    json.loads(without_host_paths(json.dumps({"error": said}).encode()))


async def test_a_server_that_is_not_there_is_named_without_its_sockets_directory(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        socket = tmp_path / "vllm.sock"
        proxy.path.use_backend(BackendInfo(kind=BackendKind.VLLM, address=str(socket), up=True), [])
        status, _, said = await (await Client.unix(proxy.socket_path)).ask(post(b"/v1/chat/completions", CHAT))
        assert status == 502
        assert b"the backend at vllm.sock is not reachable" in said
        assert str(tmp_path).encode() not in said
