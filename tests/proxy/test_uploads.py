"""Forms with a file on the data path: over real sockets, with a stand-in for the runner that answers recorded bytes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.proxy.under_way import queue_now
from hive.proxy.upload import LEFT_FREE
from tests.proxy.harness import CHAT, Backend, Client, answer, nothing_is_held, post, read_request
from tests.proxy.test_slots import Pool, pooled
from tests.waiting import until

AT = b"/v1/audio/transcriptions"
WORDS = b'{"text":"the quick brown fox"}'
SOUND = bytes(range(256)) * 512 + b"\r\n--xx\r\n--x" * 50
"""128 KiB with every byte in it, and what looks like the beginning of a boundary."""


def part(name: bytes, value: bytes, *, more: bytes = b"") -> bytes:
    return b'--xx-b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)


def sound(data: bytes = SOUND, *, name: bytes = b"file") -> bytes:
    return part(name, data, more=b'; filename="/home/alice/secret.wav"\r\nContent-Type: audio/wav')


def form(*parts: bytes, at: bytes = AT, fields: bytes = b"") -> bytes:
    body = b"".join(parts) + b"--xx-b--\r\n"
    return head(len(body), at=at, fields=fields) + body


def head(length: int, *, at: bytes = AT, fields: bytes = b"") -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nhost: h\r\n%bcontent-type: multipart/form-data; boundary=xx-b\r\n"
        b"content-length: %d\r\n\r\n" % (at, fields, length)
    )


def told(data: bytes = WORDS) -> bytes:
    return answer(data).replace(b"content-length", b"x-hive-cost: audio_s=6.02\r\ncontent-length", 1)


def parts_of(request: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The parts of a form as the server has it: the head of each, and what is in it."""
    boundary = re.search(rb"content-type: multipart/form-data; boundary=(\S+)", request[0])
    assert boundary is not None
    begun, *parts, end = request[1].split(b"--" + boundary[1])
    assert (begun, end) == (b"", b"--\r\n")
    return [(head, value[:-2]) for head, _, value in (piece[2:].partition(b"\r\n\r\n") for piece in parts)]


@asynccontextmanager
async def hearing(tmp_path: Path, *models: str, **settings: Any) -> AsyncIterator[tuple[Pool, Backend, Client]]:
    """A pool with a whisper server that is loaded; `/tmp` of the test is its disk."""
    async with pooled(tmp_path, "whisper", *models, **settings) as pool:
        pool.proxy.path.uploads.use_directory(tmp_path)
        server = pool.servers["whisper"]
        server.reply = told()
        pool.tell(*(pool.row(model) for model in ("whisper", *models)))
        client = await pool.client()
        yield pool, server, client
        client.close()
        await until(lambda: nothing_is_held(pool.proxy))
        assert not named_in(tmp_path)


def named_in(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("upload-")]


def error_of(answered: tuple[int, dict[bytes, bytes], bytes]) -> tuple[int, str]:
    return answered[0], json.loads(answered[2])["error"]["message"]


async def test_a_form_is_built_anew_and_what_is_in_the_file_stays(tmp_path: Path) -> None:
    """The file comes first, as curl sends it, the name it had stays here, and text goes in the order of the table."""
    async with hearing(tmp_path) as (pool, server, client):
        fields = [part(b"temperature", b".5"), part(b"timestamp_granularities[]", b"word"), part(b"stream", b"false")]
        answered = await client.ask(form(sound(), part(b"x_mine", b"1"), *fields, part(b"MODEL", b"whisper")))
        assert (answered[0], answered[2]) == (200, WORDS)
        assert b"x-hive-cost" not in answered[1]
        assert parts_of(server.requests[0]) == [
            (b'Content-Disposition: form-data; name="model"', b"whisper"),
            (b'Content-Disposition: form-data; name="temperature"', b"0.5"),
            (b'Content-Disposition: form-data; name="timestamp_granularities[]"', b"word"),
            (b'Content-Disposition: form-data; name="stream"', b"false"),
            (
                b'Content-Disposition: form-data; name="file"; filename="audio"\r\n'
                b"Content-Type: application/octet-stream",
                SOUND,
            ),
        ]
        assert answered[1][b"x-hive-dropped"] == b"x_mine"
        assert pool.proxy.events[-1].endpoint == AT.decode()


async def test_text_is_answered_as_text(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (_, server, client):
        srt = b"1\n00:00:00,000 --> 00:00:02,000\nhello\n"
        server.reply = answer(srt, content_type=b"text/plain; charset=utf-8")
        answered = await client.ask(form(sound(), part(b"response_format", b"srt"), part(b"model", b"whisper")))
        assert (answered[0], answered[2]) == (200, srt)
        assert answered[1][b"content-type"] == b"text/plain; charset=utf-8"


async def test_a_form_may_come_byte_by_byte_and_in_chunks(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (_, server, client):
        whole = form(part(b"model", b"whisper"), sound(b"RIFF\r\n--xx-\r\r\n"))
        for byte in whole:
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200
        body = whole.partition(b"\r\n\r\n")[2]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
        begun = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        assert (await client.ask(begun + chunks + b"0\r\n\r\n"))[0] == 200
        assert [parts_of(request)[-1][1] for request in server.requests] == [b"RIFF\r\n--xx-\r\r\n"] * 2


BAD: dict[str, tuple[bytes, int, str]] = {
    "no_file": (form(part(b"model", b"whisper")), 400, '"file" is missing'),
    "text_as_file": (form(part(b"model", b"whisper"), part(b"file", b"x")), 400, '"file" is a text'),
    "two_files": (form(part(b"model", b"whisper"), sound(), sound()), 400, '"file" more than once'),
    "other_file": (form(part(b"model", b"whisper"), sound(), sound(name=b"mask")), 400, '"mask" is a file'),
    "empty_file": (form(part(b"model", b"whisper"), sound(b"")), 400, '"file" is empty'),
    "twice": (form(part(b"model", b"whisper"), part(b"model", b"m"), sound()), 400, '"model" more than once'),
    "no_model": (form(sound()), 400, '"model" is missing'),
    "no_name": (form(b"--xx-b\r\nContent-Disposition: form-data\r\n\r\nx\r\n", sound()), 400, "no name"),
    "no_disposition": (form(b"--xx-b\r\nX: y\r\n\r\nx\r\n", sound()), 400, "cannot be read"),
    "line_feed": (form(sound(), part(b"model", b"whisper").replace(b"\r\nC", b"\r\n\nC", 1)), 400, "line break"),
    "nested": (
        form(part(b"files", b"x", more=b"\r\nContent-Type: multipart/mixed; boundary=i"), sound()),
        400,
        "form within the form",
    ),
    "encoded": (form(part(b"p", b"eA==", more=b"\r\nContent-Transfer-Encoding: base64")), 400, '"p" is encoded'),
    "not_utf8": (form(part(b"model", b"\xff"), sound()), 400, '"model" is not UTF-8'),
    "not_a_number": (form(part(b"model", b"whisper"), part(b"temperature", b"1e"), sound()), 400, "must be a number"),
    "not_a_switch": (form(part(b"model", b"whisper"), part(b"stream", b"2"), sound()), 400, "true or false"),
    "refused": (form(part(b"model", b"whisper"), part(b"include[]", b"logprobs"), sound()), 400, '"include"'),
    "url": (form(part(b"model", b"whisper"), part(b"url", b"http://x"), sound()), 400, "nothing is fetched"),
    "wrong_boundary": (form(sound()).replace(b"boundary=xx-b", b"boundary=other"), 400, "boundary"),
    "no_boundary": (form(sound()).replace(b"; boundary=xx-b", b""), 400, "needs a boundary"),
    "long_boundary": (form(sound()).replace(b"=xx-b", b"=" + b"x" * 201), 400, "needs a boundary"),
    "json": (post(AT, CHAT), 415, "multipart/form-data"),
    "packed": (form(sound(), fields=b"content-encoding: gzip\r\n"), 415, "send the form as it is"),
    "named_by_charset": (form(part(b"file", b"x", more=b"; filename*=UTF-8''x")), 400, "filename* is not"),
    "empty": (head(0), 400, "empty"),
    "end_missing": (head(len(part(b"model", b"w"))) + part(b"model", b"w"), 400, "before its last boundary"),
    "long_text": (form(part(b"prompt", b"x" * 70_000), sound()), 413, "longer than 65536 bytes"),
    "long_prompt": (form(part(b"model", b"whisper"), part(b"prompt", b"x" * 9000), sound()), 413, '"prompt" is longer'),
    "many_headers": (form(part(b"p", b"x", more=b"\r\nX: y" * 9)), 413, "too much"),
    "long_header": (form(part(b"p", b"x", more=b"\r\nX: " + b"y" * 3000)), 413, "too much"),
    "long_name": (form(part(b"n" * 300, b"x")), 400, "200 characters"),
    "many_parts": (form(*(part(b"p%d" % i, b"") for i in range(100))), 413, "too much"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_form_that_is_none_is_refused_in_words_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    request, status, words = BAD[case]
    async with hearing(tmp_path) as (pool, server, client):
        answered = error_of(await client.ask(request))
        assert answered[0] == status, answered
        assert words in answered[1]
        assert not server.requests
        client.close()
        await until(lambda: nothing_is_held(pool.proxy))


async def test_a_million_parts_end_at_the_first_few(tmp_path: Path) -> None:
    """The rest is not looked at: the connection ends with the answer."""
    async with hearing(tmp_path) as (pool, server, client):
        one = part(b"p", b"")
        client.writer.write(head(len(one) * 1_000_000 - (len(one) * 1_000_000 >> 1)) + one * 1000)
        assert error_of(await client.answer())[0] in (400, 413)
        assert not server.requests
        assert nothing_is_held(pool.proxy)


async def test_a_longer_form_than_the_setting_is_refused_at_its_head(tmp_path: Path) -> None:
    async with hearing(tmp_path, upload_max_mb=1, body_max_bytes=2 << 20) as (_, _server, client):
        client.writer.write(head((1 << 20) + 1))
        status, message = error_of(await client.answer())
        assert (status, "exceeds 1048576 bytes ([proxy] upload_max_mb)" in message) == (413, True)


async def test_a_form_may_be_longer_than_other_bodies(tmp_path: Path) -> None:
    async with hearing(tmp_path, upload_max_mb=25, body_max_bytes=1 << 20) as (_, server, client):
        data = os.urandom(1 << 20) * 24
        assert (await client.ask(form(sound(data), part(b"model", b"whisper"))))[0] == 200
        assert parts_of(server.requests[0])[-1][1] == data
        client.writer.write(head(2 << 20, at=b"/v1/chat/completions"))
        assert error_of(await client.answer())[0] == 413


async def test_a_model_of_another_category_is_refused_with_where_it_is_asked(tmp_path: Path) -> None:
    async with hearing(tmp_path, "m") as (_, server, client):
        status, message = error_of(await client.ask(form(sound(), part(b"model", b"m"))))
        assert (status, message) == (
            400,
            "/v1/audio/transcriptions takes models for sound, and m is one for text; models for text are asked at "
            "/v1/chat/completions",
        )
        status, message = error_of(await client.ask(post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"whisper"'))))
        assert status == 400
        assert "whisper is one for sound" in message
        assert "/v1/audio/transcriptions or /v1/audio/translations" in message
        assert not server.requests


async def test_without_any_server_for_sound_it_is_not_supported(tmp_path: Path) -> None:
    async with pooled(tmp_path, "m") as pool:
        pool.tell(pool.row("m"))
        client = await pool.client()
        status, message = error_of(await client.ask(form(sound(), part(b"model", b"m"))))
        assert status == 501
        assert "whisper does" in message
        for at in (b"/v1/audio/speech", b"/v1/images/edits", b"/v1/images/variations"):
            other = await pool.client()
            assert error_of(await other.ask(post(at, b"{}")))[0] == 501


async def test_a_disk_that_is_full_refuses_before_the_body_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hearing(tmp_path) as (pool, _server, client):
        monkeypatch.setattr("hive.proxy.upload.LEFT_FREE", LEFT_FREE << 30)
        client.writer.write(head(1 << 20, fields=b"expect: 100-continue\r\n"))
        status, message = error_of(await client.answer())
        assert (status, message) == (503, "the disk has no room for this upload now")
        assert pool.proxy.path.uploads.budget.used == 0


async def test_what_is_left_of_the_disk_to_others_is_left_by_all_uploads_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at with the head alone: heads that came together, or that named no length, filled the disk."""
    async with hearing(tmp_path) as (pool, server, client):
        whole = form(sound(SOUND * 4), part(b"model", b"whisper"))
        client.writer.write(whole[:-60_000])
        await until(lambda: pool.proxy.path.uploads.budget.used > 60_000)
        monkeypatch.setattr("hive.proxy.upload.LEFT_FREE", LEFT_FREE << 30)
        client.writer.write(whole[-60_000:])
        assert error_of(await client.answer()) == (503, "the disk has no room for this upload now")
        assert not server.requests
        assert pool.proxy.path.uploads.budget.used == 0


async def test_a_disk_that_cannot_be_written_to_refuses_and_lets_go(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (pool, _server, client):
        pool.proxy.path.uploads.directory = tmp_path / "gone"
        assert error_of(await client.ask(form(sound(), part(b"model", b"whisper"))))[0] == 503
        assert pool.proxy.path.uploads.budget.used == 0


async def test_files_have_a_name_for_no_longer_than_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_TMPFILE the name is gone before the first byte is written."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    async with hearing(tmp_path) as (_, server, client):
        client.writer.write(form(sound(), part(b"model", b"whisper"))[:-9])
        await until(lambda: any("upload-" in os.readlink(f"/proc/self/fd/{name}") for name in _descriptors()))
        assert not named_in(tmp_path)
        client.writer.write(form(sound(), part(b"model", b"whisper"))[-9:])
        assert (await client.answer())[0] == 200
        assert parts_of(server.requests[0])[-1][1] == SOUND


def _descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


async def test_a_client_that_leaves_amid_its_upload_leaves_nothing(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (pool, server, client):
        client.writer.write(form(sound(), part(b"model", b"whisper"))[:-50_000])
        await until(lambda: pool.proxy.path.uploads.budget.used > 50_000)
        client.close()
        await until(lambda: nothing_is_held(pool.proxy))
        assert not server.requests


async def test_a_file_that_stands_still_ends_like_any_slow_body(tmp_path: Path) -> None:
    async with hearing(tmp_path, body_idle_s=0.3) as (pool, server, client):
        client.writer.write(form(sound(), part(b"model", b"whisper"))[:-50_000])
        assert error_of(await client.answer())[0] == 408
        assert pool.proxy.path.uploads.budget.used == 0
        assert not server.requests


async def test_an_agent_has_its_share_of_the_disk(tmp_path: Path) -> None:
    """A file of the largest size each may always have; what is more is refused while others are let in."""
    async with hearing(tmp_path, upload_max_mb=1, upload_disk_mb=8) as (pool, _, client):
        other = await Client.unix(pool.proxy.another("bob"))
        second = await pool.client()
        client.writer.write(form(sound(b"x" * 900_000), part(b"model", b"whisper"))[:-3])
        await until(lambda: pool.proxy.path.uploads.budget.used > 800_000)
        second.writer.write(form(sound(b"x" * 900_000), part(b"model", b"whisper")))
        assert error_of(await second.answer())[0] == 503
        assert (await other.ask(form(sound(b"x" * 900_000), part(b"model", b"whisper"))))[0] == 200
        client.writer.write(form(sound(b"x" * 900_000), part(b"model", b"whisper"))[-3:])
        assert (await client.answer())[0] == 200
        for one in (other, second):
            one.close()


async def test_the_largest_unfinished_upload_gives_way(tmp_path: Path) -> None:
    async with hearing(tmp_path, upload_max_mb=1, upload_disk_mb=1) as (pool, _, client):
        other = await Client.unix(pool.proxy.another("bob", tenant="b"))
        client.writer.write(form(sound(b"x" * 900_000), part(b"model", b"whisper"))[:-3])
        await until(lambda: pool.proxy.path.uploads.budget.used > 800_000)
        assert (await other.ask(form(sound(b"x" * 900_000), part(b"model", b"whisper"))))[0] == 200
        assert error_of(await client.answer()) == (503, "this upload gave way: those held at once exceed Hive's budget")
        other.close()


async def test_a_form_in_chunks_that_is_in_gives_way_to_nobody(tmp_path: Path) -> None:
    """Its text counted as an upload that had not ended, so that it was cut at work where others lacked room."""
    async with hearing(tmp_path) as (pool, server, client):
        is_there, go_on = asyncio.Event(), asyncio.Event()

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.requests.append(await read_request(reader))
            is_there.set()
            await go_on.wait()
            writer.write(told())

        server.script = work
        body = form(sound(), part(b"model", b"whisper")).partition(b"\r\n\r\n")[2]
        begun = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        client.writer.write(begun + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        await is_there.wait()
        assert not pool.proxy.alice.bodies.uploads
        assert not pool.proxy.alice.uploads.uploads
        go_on.set()
        assert (await client.answer())[0] == 200


async def test_a_server_that_goes_before_it_has_the_form_is_followed_by_the_next(tmp_path: Path) -> None:
    """The file is still there: it is sent again, whole."""
    data = SOUND * 20
    async with hearing(tmp_path) as (pool, server, client):

        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            writer.transport.abort()

        server.script = leave
        client.writer.write(form(sound(data), part(b"model", b"whisper")))
        await until(lambda: server.closed == 1)
        server.script = None
        await pool.waits("whisper")
        pool.tell(pool.row("whisper", generation=2))
        assert (await client.answer())[0] == 200
        assert parts_of(server.requests[0])[-1][1] == data


async def test_a_server_that_dies_at_work_is_a_502_and_no_words_of_it(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (_, server, client):

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(told()[:-10])
            await writer.drain()
            writer.transport.abort()

        server.script = die
        status, message = error_of(await client.ask(form(sound(), part(b"model", b"whisper"))))
        assert (status, "quick" in message) == (502, False)


async def test_an_answer_that_comes_before_the_form_is_sent_is_relayed(tmp_path: Path) -> None:
    """Of a runner that refuses early: what is missing of the form does not follow, and its connection ends."""
    async with hearing(tmp_path) as (_, server, client):

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(b'{"error":{"message":"too long","code":"x"}}', status=b"413 Too Long"))
            await writer.drain()
            await reader.read()

        server.script = refuse
        assert error_of(await client.ask(form(sound(SOUND * 40), part(b"model", b"whisper")))) == (413, "too long")
        server.script = None
        assert (await client.ask(form(sound(), part(b"model", b"whisper"))))[0] == 200
        assert server.connections == 2


async def test_a_form_for_a_cold_model_waits_for_its_load(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (pool, server, client):
        pool.close("whisper")
        client.writer.write(form(sound(), part(b"model", b"whisper")))
        await pool.waits("whisper")
        pool.tell(pool.row("whisper", generation=2))
        assert (await client.answer())[0] == 200
        assert parts_of(server.requests[0])[-1][1] == SOUND


async def test_a_client_that_is_gone_keeps_its_place_until_the_server_has_stopped(tmp_path: Path) -> None:
    """The server is told by a half-close, and the next request waits in Hive's line, not at the server."""
    async with hearing(tmp_path, between_bytes_s=60) as (pool, server, client):
        pool.tell(pool.row("whisper", places=1))
        stopped, told_of_it = asyncio.Event(), asyncio.Event()

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.requests.append(await read_request(reader))
            assert await reader.read(1) == b""
            told_of_it.set()
            await stopped.wait()

        server.script = work
        line = pool.proxy.path.slots.pooled["whisper-1"].line
        client.writer.write(form(sound(), part(b"model", b"whisper")))
        await until(lambda: server.requests)
        client.close()
        await told_of_it.wait()
        other = await pool.client()
        server.script = None
        other.writer.write(form(sound(), part(b"model", b"whisper")))
        await pool.waits("whisper")
        assert (line.running, line.waiting, len(server.requests)) == (1, 1, 1)
        rows = queue_now(pool.proxy.registry, 0.0).requests
        assert sorted((row.state, row.endpoint, row.model) for row in rows) == [
            ("cancelling", AT.decode(), "whisper"),
            ("queued", AT.decode(), "whisper"),
        ]
        assert pool.proxy.alice.gate.in_flight == 1
        stopped.set()
        assert (await other.answer())[0] == 200
        other.close()


async def test_a_server_that_does_not_stop_loses_the_place_in_the_end(tmp_path: Path) -> None:
    async with hearing(tmp_path, between_bytes_s=0.3) as (pool, server, client):
        pool.tell(pool.row("whisper", places=1))
        ended = asyncio.Event()

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.requests.append(await read_request(reader))
            await ended.wait()

        server.script = work
        client.writer.write(form(sound(), part(b"model", b"whisper")))
        await until(lambda: server.requests)
        client.close()
        await until(lambda: pool.proxy.registry.stopping)
        await until(lambda: nothing_is_held(pool.proxy))
        ended.set()


async def test_a_stream_of_events_is_relayed_as_it_comes(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (pool, server, client):
        delta = b'data: {"type":"transcript.text.delta","delta":"the"}\n\n'
        done = b'data: {"type":"transcript.text.done","text":"the"}\n\n'
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-hive-cost: audio_s=6.0\r\n"
                b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(delta), delta)
            )
            begun.set()
            await go_on.wait()
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))

        server.script = stream
        client.writer.write(form(sound(), part(b"stream", b"true"), part(b"model", b"whisper")))
        head_of_it = await client.reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head_of_it
        assert delta in await client.reader.readuntil(b"\n\n\r\n")
        assert pool.proxy.path.uploads.budget.used == 0, "no other server will be asked, so the file is gone"
        go_on.set()
        assert done in await client.reader.readuntil(b"0\r\n\r\n")


async def test_a_form_goes_by_a_unix_socket_too(tmp_path: Path) -> None:
    """As to every runner: its socket buffer is smaller than the file."""
    async with hearing(tmp_path) as (pool, server, client):
        path = tmp_path / "runner.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        unix = await asyncio.start_unix_server(server._serve, sock=listening)
        server.address = str(path)
        pool.tell(pool.row("whisper", generation=2))
        data = SOUND * 30
        assert (await client.ask(form(sound(data), part(b"model", b"whisper"))))[0] == 200
        assert parts_of(server.requests[0])[-1][1] == data
        unix.close()
