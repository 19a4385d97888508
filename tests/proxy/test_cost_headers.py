"""The figures that an answer of a model tells in its head: its time at the server, and whether a cache helped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.harness import CHAT, STREAM, Client, answer, post, proxied

COST = (b"x-cache-hit", b"x-cache-tokens-reused", b"x-gpu-time-ms")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (b'{"choices":[{}],"timings":{"cache_n":31,"prompt_n":1,"predicted_n":4}}', (b"true", b"31")),
        (b'{"choices":[{}],"timings":{"cache_n":0,"prompt_n":32,"predicted_n":4}}', (b"false", b"0")),
        (b'{"choices":[{}],"usage":{"prompt_tokens":3,"completion_tokens":1}}', (b"false", b"0")),
    ],
    ids=["reused", "nothing reused", "nothing told"],
)
async def test_a_whole_answer_tells_them_whatever_its_server_says(
    tmp_path: Path, told: bytes, expected: tuple[bytes, bytes]
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(told)
        client = await Client.unix(proxy.socket_path)
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert (status, (fields[COST[0]], fields[COST[1]])) == (200, expected)
        assert fields[COST[2]].isdigit()
        client.close()


async def test_a_list_of_models_cost_nothing_and_tells_nothing(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        _, fields, _ = await client.ask(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
        assert not set(COST) & set(fields)
        client.close()


async def test_a_stream_tells_in_its_head_what_is_known_before_it(tmp_path: Path) -> None:
    """Only an operator may switch the cache off for a request; from an agent the field is taken away."""
    async with proxied(tmp_path) as (proxy, _):
        own = await Client.tcp(proxy.port)
        agents = await Client.unix(proxy.socket_path)
        trusted = b"authorization: Bearer internal\r\nx-cache-mode: none\r\n"
        _, fields, _ = await own.ask(post(b"/v1/chat/completions", STREAM, fields=trusted))
        assert (fields[COST[0]], fields[COST[1]], COST[2] in fields) == (b"false", b"0", False)
        _, fields, _ = await agents.ask(post(b"/v1/chat/completions", STREAM, fields=b"x-cache-mode: none\r\n"))
        assert not set(COST) & set(fields)
        own.close()
        agents.close()
