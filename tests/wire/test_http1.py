"""The wire rules: bytes split anywhere give the same requests; ambiguity is refused, never repaired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import HeadTooLarge, HiveError, TooLarge
from hive.wire.http1 import MAX_FIELDS, MAX_HEAD, BadResponse, Request, RequestParser, ResponseParser


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
        parser.feed(piece)
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
        HEAD + b"Upgrade: h2c\r\nConnection: upgrade\r\n",
        HEAD.replace(b"1.1", b"2.0"),
        HEAD.replace(b"HTTP/1.1", b"ICE/1.0"),
    ],
)
def test_whatever_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(HiveError) as refused:
        parse(head + b"\r\n")
    assert 400 <= refused.value.status < 500


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
        parser.feed(piece)
        body += parser.take()
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
