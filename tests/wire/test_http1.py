"""The wire rules: bytes split anywhere give the same requests; ambiguity is refused, never repaired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest, HeadTooLarge, HiveError, TooLarge
from hive.wire.chunks import META_FREE
from hive.wire.heads import MAX_FIELDS, MAX_HEAD, MAX_TARGET, BadResponse
from hive.wire.http1 import Request, RequestParser, ResponseParser


class Seen:
    """Keeps every request that was complete."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def on_head(self, request: Request) -> None: ...

    def on_body(self, request: Request, size: int) -> None: ...

    def on_request(self, request: Request) -> None:
        self.requests.append(request)


STREAM = (
    b"POST /api/chat HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
    b"GET /api/tags HTTP/1.1\r\nhost: h\r\n\r\n"
    b"POST /api/chat HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX: y\r\n\r\n"
    b"POST /api/chat HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nworld"
)


def parse(*pieces: bytes, max_body: int = 1000) -> list[Request]:
    seen = Seen()
    parser = RequestParser(seen, max_body=max_body)
    for piece in pieces:
        while piece:
            piece = parser.feed(piece)
    return seen.requests


@given(st.lists(st.integers(1, 60), max_size=30))
def test_requests_do_not_depend_on_where_the_bytes_are_split(sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in [*sizes, len(STREAM)]:
        if STREAM[at : at + size]:
            pieces.append(STREAM[at : at + size])
        at += size
    bodies = [(request.method, request.target, b"".join(request.body)) for request in parse(*pieces)]
    assert bodies == [
        (b"POST", b"/api/chat", b"hello"),
        (b"GET", b"/api/tags", b""),
        (b"POST", b"/api/chat", b"abcde"),
        (b"POST", b"/api/chat", b"world"),
    ]


HEAD = b"POST /api/chat HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n",
        HEAD + b"Content-Length: 02\r\n",
        HEAD + b"Content-Length: 2, 2\r\n",
        HEAD + b"Content-Length: 99999999999999999999\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        HEAD + b"Transfer-Encoding: identity\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n",
        HEAD + b"Host: other\r\n",
        HEAD.replace(b"Host: h\r\n", b""),
        HEAD + b"Content_Length: 2\r\n",
        HEAD + b" X: y\r\n",
        HEAD + b"X : y\r\n",
        HEAD + b"X: a\r\n b\r\n",
        HEAD + b"Expect: something\r\n",
        HEAD.replace(b"1.1", b"1.2"),
        HEAD.replace(b"Host: h", b"Host: h, i"),
        HEAD.replace(b"Host: h", b"Host: a@h"),
        HEAD.replace(b"POST ", b"POST  "),
        HEAD.replace(b"POST ", b"GET ") + b"Content-Length: 2\r\n",
        HEAD.replace(b"POST ", b"GET ") + b"Transfer-Encoding: chunked\r\n",
        HEAD.replace(b"/api", b"http://h/api"),
        HEAD.replace(b"/api", b"/api#"),
        HEAD.replace(b"\r\n", b"\n"),
        b"\r\n\r\n" + HEAD,
        b"\n" + HEAD,
        HEAD.replace(b"HTTP/1.1", b"ICE/1.0"),
    ],
)
def test_whatever_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(HiveError) as refused:
        parse(head + b"\r\n")
    assert 400 <= refused.value.status < 500


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"POST /api/chat HTTP/2.0", 505),
        (b"PRI * HTTP/2.0", 505),
        (b"GET /" + b"x" * MAX_TARGET + b" HTTP/1.1", 414),
        (b"CONNECT evil:443 HTTP/1.1", 405),
        (b"TRACE /api/tags HTTP/1.1", 405),
        (b"OPTIONS * HTTP/1.1", 405),
        (b"get /api/tags HTTP/1.1", 501),
        (b"G@T /api/tags HTTP/1.1", 400),
        (b"GET /api/tags", 400),
    ],
)
def test_a_request_line_is_refused_with_what_is_wrong_about_it(line: bytes, status: int) -> None:
    with pytest.raises(HiveError) as refused:
        parse(line + b"\r\nHost: h\r\n\r\n")
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"GET /api/tags\r\n", 400),
        (b"GET /api/tags HTTP/3.0\r\n", 505),
        (b"GET /api/tags HTTP/1.1\n", 400),
        (b"GET /api/tags HTTP/1.1\r\nX: \x00", 400),
        (b"GET /api/tags HTTP/1.1\r\nX: y\rz", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"A" * 30, 400),
        (b"GET /" + b"x" * (MAX_TARGET + 100), 414),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * MAX_HEAD, 431),
        (b"\r\n\r", None),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r", None),
    ],
)
def test_an_unfinished_head_is_refused_as_soon_as_it_can_be(part: bytes, status: int | None) -> None:
    for pieces in ([part], [part[at : at + 1] for at in range(len(part))]):
        if status is None:
            assert parse(*pieces) == []
            continue
        with pytest.raises(HiveError) as refused:
            parse(*pieces)
        assert refused.value.status == status


def test_an_upgrade_is_an_offer_that_is_not_taken() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    for framing, body in (
        (b"Content-Length: 2\r\n", b"{}"),
        (b"Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
    ):
        one, two = parse(HEAD + upgrade + framing + b"\r\n" + body + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (b"".join(one.body), one.keep_alive, two.target) == (b"{}", True, b"/")


def test_a_known_head_with_another_length_is_known_and_means_the_other_length() -> None:
    def request(body: bytes, more: bytes = b"") -> bytes:
        return HEAD + b"Content-Length: %d\r\nX: y\r\n%b\r\n%b" % (len(body), more, body)

    bodies = [b"{}", b"x" * 100, b"", b"{}"]
    requests = parse(b"".join(request(body) for body in bodies))
    assert [b"".join(each.body) for each in requests] == bodies
    assert [each.field(b"content-length") for each in requests] == [b"2", b"100", b"0", b"2"]
    assert all(each.fields is requests[0].fields for each in requests)  # what was made of them holds for all
    with pytest.raises(TooLarge):
        parse(request(b"{}"), request(b"x" * 1001))
    with pytest.raises(BadRequest):
        parse(request(b"{}"), request(b"{}").replace(b"Length: 2", b"Length: 02"))
    with pytest.raises(BadRequest):
        parse(request(b"{}"), request(b"{}", b"Content-Length: 3\r\n"))
    known_get = request(b"").replace(b"POST", b"GET ").replace(b"GET  ", b"GET ")
    with pytest.raises(BadRequest):
        parse(known_get, known_get.replace(b"Length: 0", b"Length: 1") + b"x")


def test_a_known_head_that_comes_in_two_pieces_is_read_wherever_it_is_cut() -> None:
    """Compiled, one that was cut right before the digits of its length ended in a SystemError."""
    whole = HEAD + b"Content-Length: 2\r\nX: y\r\n\r\n{}"
    for cut in range(1, len(whole)):
        known, again = parse(whole, whole[:cut], whole[cut:])
        assert (b"".join(known.body), b"".join(again.body)) == (b"{}", b"{}"), cut
        assert again.field(b"content-length") == b"2", cut


@pytest.mark.parametrize(
    "chunks",
    [
        b"2;" + b"a" * META_FREE + b"\r\n{}\r\n0\r\n\r\n",
        b"0" * META_FREE + b"002\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\nX: " + b"y" * META_FREE + b"\r\n\r\n",
        b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 102 + b"\r\n",
        (b"1;" + b"a" * 100 + b"\r\nx\r\n") * 200,
    ],
)
def test_chunk_extensions_and_trailers_may_not_outweigh_the_body(chunks: bytes) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for pieces in ([head + chunks], [head, *[chunks[at : at + 7] for at in range(0, len(chunks), 7)]]):
        with pytest.raises(BadRequest):
            parse(*pieces)


def test_many_small_chunks_and_few_extensions_are_taken_and_trailers_dropped() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    (small,) = parse(head + b"1\r\nx\r\n" * 900 + b"0\r\n\r\n")
    assert b"".join(small.body) == b"x" * 900
    assert len(small.body) == 1, "memory is bounded by bytes, not by chunks"
    (one,) = parse(head + b"2;a=b\r\n{}\r\n0\r\nHost: evil\r\nAuthorization: evil\r\n\r\n")
    assert (one.field(b"host"), one.field(b"authorization")) == (b"h", None)


def test_heads_and_bodies_are_bounded_whichever_way_they_come() -> None:
    with pytest.raises(HeadTooLarge):
        parse(HEAD + b"X: " + b"y" * MAX_HEAD + b"\r\n\r\n")
    with pytest.raises(HeadTooLarge):
        parse(HEAD, *[b"X: y\r\n"] * (MAX_FIELDS + 1), b"\r\n")
    with pytest.raises(HeadTooLarge):
        parse(HEAD + b"X: ", *[b"y" * 1000] * 20)
    with pytest.raises(TooLarge):
        parse(HEAD + b"Content-Length: 1001\r\n\r\n")
    with pytest.raises(TooLarge):
        parse(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"64\r\n" + b"x" * 100 + b"\r\n"] * 11)


def test_a_repeated_head_is_remembered_and_a_changed_one_is_checked_again() -> None:
    good = HEAD + b"Content-Length: 2\r\n\r\n{}"
    assert [request.content_length for request in parse(good, good)] == [2, 2]
    with pytest.raises(HiveError):
        parse(good, good.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"))


def answers(*pieces: bytes) -> tuple[int | None, bytes, bool]:
    parser = ResponseParser()
    body = b""
    for piece in pieces:
        body += parser.feed(piece)
    return parser.head.status if parser.head else None, body, parser.complete


def test_an_interim_answer_is_passed_over() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert answers(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + whole) == (200, b"ok", True)


def test_an_answer_without_a_length_never_completes_by_itself() -> None:
    assert answers(b"HTTP/1.1 200 OK\r\n\r\n", b"abc", b"def") == (200, b"abcdef", False)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"220 smtp ready\r\n",
    ],
)
def test_nonsense_from_the_backend_is_no_answer(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        answers(raw)
