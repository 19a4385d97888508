"""Heads that Hive writes itself, and answers to HEAD; chunks as the grammar has them."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.wire.chunks import MAX_LINE, BadChunks, ChunkDecoder
from hive.wire.dates import Dated, date_field
from tests.examples import examples
from tests.proxy.harness import CHAT, INGRESS_TOKEN, STREAM, Client, Proxy, answer, chunked, get, post, proxied

CALL = b"/agents/alice/t/" + INGRESS_TOKEN
REFUSED = [
    (b"HEAD /api/tags HTTP/1.1\r\n\r\n", 400),
    (b"HEAD  /api/tags HTTP/1.1\r\nhost: h\r\n\r\n", 400),
    (b"HEAD /api/tags HTTP/2.0\r\nhost: h\r\n\r\n", 505),
    (b"HEAD /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 9000), 414),
    (b"HEAD /api/tags HTTP/1.1\r\nhost: h\r\nx: %b\r\n\r\n" % (b"a" * 17_000), 431),
    (b"HEAD /api/tags HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}", 400),
    (b"HEAD /api/tags HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999999\r\n\r\n", 413),
    (b"HEAD /api/tags HTTP/1.1\r\nhost: h\r\nexpect: else\r\n\r\n", 417),
    (b"\r\nHEAD /api/tags HTTP/1.1\r\nhost h\r\n\r\n", 400),
    (b"HEAD /api/tags HTTP/1.1\r\nhost: h\r\nx: y", 408),
]


@pytest.mark.parametrize("door", ["unix", "ingress"])
@pytest.mark.parametrize(("raw", "status"), REFUSED)
async def test_a_refused_head_is_answered_without_a_body(tmp_path: Path, raw: bytes, status: int, door: str) -> None:
    """The answer to a refused HEAD request had a body, which is the beginning of the next answer."""
    async with proxied(tmp_path, head_s=0.3) as (proxy, _):
        unix = door == "unix"
        for step in (len(raw), 3000, 7 if len(raw) < 1000 else 500):
            client = await (Client.unix(proxy.socket_path) if unix else Client.tcp(proxy.ingress_port))
            for at in range(0, len(raw), step):
                client.writer.write(raw[at : at + step])
                await asyncio.sleep(0)
            found, fields, _ = await client.answer(head_only=True)
            assert (found, fields[b"connection"]) == (status, b"close")
            assert int(fields[b"content-length"]) > 0, "it says what a GET would have had"
            assert await client.at_end(), "and nothing comes behind the head"


async def test_a_refused_post_behind_a_head_has_its_body(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(get(b"/", method=b"HEAD")))[0] == 200
        status, _, body = await client.ask(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx y\r\n\r\n")
        assert (status, b"error" in body) == (400, True)


async def test_one_connection_too_many_that_asks_head_gets_no_body(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        proxy.path.shares.limit = 0
        for method, has_body in ((b"HEAD", False), (b"GET", True)):
            listener = proxy.alice.listeners[str(proxy.socket_path)]
            asyncio.get_running_loop().remove_reader(listener._sock.fileno())
            client = await Client.unix(proxy.socket_path)
            client.writer.write(get(b"/v1/models", method=method))
            listener.accept_waiting()
            status, _, _ = await client.answer(head_only=True)
            assert (status, await client.reader.read() != b"") == (503, has_body)


async def dated(proxy: Proxy, raw: bytes, *, ingress: bool = False) -> tuple[int, list[bytes]]:
    """(status, values of Date) of the answer."""
    client = await (Client.tcp(proxy.ingress_port) if ingress else Client.unix(proxy.socket_path))
    client.writer.write(raw)
    head = await client.reader.readuntil(b"\r\n\r\n")
    client.close()
    lines = head[:-4].split(b"\r\n")
    return int(lines[0].split()[1]), [line[6:] for line in lines[1:] if line.lower().startswith(b"date: ")]


async def test_every_head_of_hives_own_has_one_date(tmp_path: Path) -> None:
    """Own answers had none; RFC 9110 §6.6.1 wants one of every server with a clock."""
    theirs = b"Sun, 06 Nov 1994 08:49:37 GMT"
    async with proxied(tmp_path) as (proxy, backend):
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=backend.address))
        ask, call = post(b"/v1/chat/completions", CHAT), get(CALL + b"/x")
        found = [
            await dated(proxy, raw)
            for raw in (
                ask,
                get(b"/v1/models"),
                get(b"/nowhere"),
                b"GET  / HTTP/1.1\r\n\r\n",
                get(b"/", method=b"HEAD"),
            )
        ]
        backend.reply = chunked(b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")
        found += [await dated(proxy, post(b"/v1/chat/completions", STREAM))]
        found += [await dated(proxy, raw, ingress=True) for raw in (get(CALL + b"/.hive/state"), get(b"/agents/x/"))]
        backend.reply = answer(b"{}")
        found += [await dated(proxy, call, ingress=True)]
        assert [status for status, _ in found] == [200, 200, 403, 400, 200, 200, 200, 401, 200]
        for _, dates in found:
            assert len(dates) == 1
            assert abs(parsedate_to_datetime(dates[0].decode()).timestamp() - time.time()) < 10
        backend.reply = answer(b"{}").replace(b"content-type", b"Date: " + theirs + b"\r\ncontent-type")
        assert await dated(proxy, call, ingress=True) == (200, [theirs]), "an agent's own stays"


def test_a_date_is_formatted_once_a_second() -> None:
    made: list[bytes] = []
    dated = Dated(lambda key, date: made.append(date) or b"%d" % key)  # type: ignore[func-returns-value]
    assert [dated.at(key, now) for key, now in ((200, 1.0), (200, 1.9), (404, 1.5), (200, 2.0), (200, 1.9))] == [
        b"200",
        b"200",
        b"404",
        b"200",
        b"200",
    ]
    assert made == [date_field(second) for second in (1, 1, 2, 1)]


# --- chunks ----------------------------------------------------------------------------------------------------------

NAMES = st.text("abc-!", min_size=1, max_size=4)
VALUES = st.one_of(
    st.just(""),
    NAMES.map("={}".format),
    st.text('ab ;=\t\\"', max_size=5).map(lambda text: '="' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
)
EXTENSIONS = st.lists(st.tuples(NAMES, VALUES).map(lambda both: ";" + "".join(both)), max_size=3).map("".join)


def decoded(pieces: list[bytes]) -> tuple[bytes, bytes]:
    decoder, body = ChunkDecoder(), b""
    for number, piece in enumerate(pieces):
        more, rest = decoder.feed(piece)
        body += more
        if rest is not None:
            return body, rest + b"".join(pieces[number + 1 :])
    raise AssertionError("it did not end")


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=40), EXTENSIONS), max_size=6),
    st.lists(st.integers(1, 30), max_size=60),
    st.sampled_from([b"", b"X: y\r\n", b"A:\r\nB: \xff;=\r\n"]),
)
def test_chunks_are_the_same_wherever_their_bytes_are_split(
    chunks: list[tuple[bytes, str]], sizes: list[int], trailers: bytes
) -> None:
    raw = b"".join(b"%x%b\r\n%b\r\n" % (len(data), extension.encode(), data) for data, extension in chunks)
    raw += b"0\r\n" + trailers + b"\r\nGET / HTTP/1.1"
    pieces, at = [], 0
    for size in [*sizes, len(raw)]:
        if raw[at : at + size]:
            pieces.append(raw[at : at + size])
        at += size
    assert decoded(pieces) == (b"".join(data for data, _ in chunks), b"GET / HTTP/1.1")


@pytest.mark.parametrize(
    "line",
    [
        b"2;a=",
        b"2;=",
        b"2;=b",
        b"2;;",
        b"2; a",
        b"2 ;a",
        b'2;a="',
        b'2;a="b"c',
        b"2;a=b=",
        b"2;a\x7f",
        b"2;" + b"a" * MAX_LINE,
    ],
)
def test_a_malformed_extension_is_refused_wherever_it_is_split(line: bytes) -> None:
    """llhttp took `;a=` and `;=`, which another reader may take for something else."""
    for raw in (line + b"\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0" + line[1:] + b"\r\n\r\n"):
        for step in (len(raw), 1):
            with pytest.raises(BadChunks):
                decoded([raw[at : at + step] for at in range(0, len(raw), step)])
