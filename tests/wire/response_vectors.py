"""Raw answers of a backend with what must become of each: data for tests in tests/wire and tests/proxy.

`relayed`: the body given reaches the client as it is. `refused`: no byte of it does, the client gets a 502.
`cut`: what was good is relayed, then the client sees an abrupt end. All are answers to GET.
"""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """`pieces` are written one after the other, then the backend closes if `closes`."""

    name: str
    pieces: list[bytes]
    outcome: str
    body: bytes = b""
    closes: bool = True


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\n{}"
EVENT = b'data: {"choices":[]}\n\n'
ONE = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n"


def ok(name: str, *pieces: bytes, body: bytes = b"{}", closes: bool = False) -> Answer:
    return Answer(name, list(pieces), "relayed", body, closes)


def refused(name: str, *pieces: bytes, closes: bool = False) -> Answer:
    """Refused by what it says, not by its end: the backend keeps the connection open."""
    return Answer(name, list(pieces), "refused", b"", closes)


def head(*lines: bytes, body: bytes = b"{}") -> bytes:
    return OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def status(line: bytes) -> bytes:
    return line + b"\r\nContent-Length: 2\r\n\r\n{}"


ANSWERS = [
    # what must keep working
    ok("plain", WHOLE),
    ok("no-reason", status(b"HTTP/1.1 200 ")),
    ok("no-reason-no-space", status(b"HTTP/1.1 200")),
    ok("obs-text-reason", status(b"HTTP/1.1 200 d'accord \xe9")),
    ok("http-1.0-length", status(b"HTTP/1.0 200 OK"), closes=True),
    ok("mixed-case-names", head(b"cOnTeNt-LeNgTh: 2")),
    ok("ows-around-length", head(b"Content-Length:\t 2 \t")),
    ok("one-byte-at-a-time", *[bytes([byte]) for byte in WHOLE]),
    ok("interim-100", b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE),
    ok("interim-103-apart", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", WHOLE),
    ok("eight-interims", b"HTTP/1.1 102 Processing\r\n\r\n" * 8 + WHOLE),
    ok(
        "chunked-upper-hex",
        head(b"Transfer-Encoding: CHUNKED", body=b"0A\r\n0123456789\r\n0\r\n\r\n"),
        body=b"0123456789",
    ),
    ok("chunk-extension", head(b"Transfer-Encoding: chunked", body=b'2;a=b;c="d e"\r\n{}\r\n0\r\n\r\n')),
    ok("trailer", head(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nX: y\r\n\r\n")),
    ok("crlf-in-chunk", head(b"Transfer-Encoding: chunked", body=b"6\r\n{\r\n\r\n}\r\n0\r\n\r\n"), body=b"{\r\n\r\n}"),
    ok("says-close", head(b"Content-Length: 2", b"Connection: close"), closes=True),
    ok("names-a-field-away", head(b"Content-Length: 2", b"Connection: x-a", b"X-A: 1")),
    ok("offers-an-upgrade", head(b"Content-Length: 2", b"Upgrade: h2c", b"Connection: upgrade")),
    ok("hundred-fields", head(*[b"X: y"] * 99, b"Content-Length: 2")),
    ok("60-kib-head", head(b"X: " + b"y" * 60_000, b"Content-Length: 2")),
    # length and coding
    refused(
        "both-length-and-coding",
        head(b"Content-Length: 2", b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\n"),
    ),
    refused(
        "both-coding-first", head(b"Transfer-Encoding: chunked", b"Content-Length: 2", body=b"2\r\n{}\r\n0\r\n\r\n")
    ),
    refused("two-lengths", head(b"Content-Length: 2", b"Content-Length: 3")),
    refused("two-equal-lengths", head(b"Content-Length: 2", b"Content-Length: 2")),
    refused("list-of-lengths", head(b"Content-Length: 2, 2")),
    refused("plus-length", head(b"Content-Length: +2")),
    refused("negative-length", head(b"Content-Length: -2")),
    refused("hex-length", head(b"Content-Length: 0x2")),
    refused("empty-length", head(b"Content-Length: ")),
    refused("leading-zero-length", head(b"Content-Length: 02")),
    refused("overflowing-length", head(b"Content-Length: 18446744073709551618")),
    refused("gzip-chunked", head(b"Transfer-Encoding: gzip, chunked", body=b"2\r\n{}\r\n0\r\n\r\n")),
    refused("chunked-gzip", head(b"Transfer-Encoding: chunked, gzip", body=b"2\r\n{}\r\n0\r\n\r\n")),
    refused("identity", head(b"Transfer-Encoding: identity")),
    refused("xchunked", head(b"Transfer-Encoding: xchunked", body=b"2\r\n{}\r\n0\r\n\r\n")),
    refused("chunked-twice", head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
    refused("chunked-in-1.0", CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"2\r\n{}\r\n0\r\n\r\n"),
    refused("204-with-length", b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n{}"),
    refused("204-chunked", b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    refused("204-then-bytes", b"HTTP/1.1 204 No Content\r\n\r\n{}"),
    refused("more-than-length", head(b"Content-Length: 2", body=b"{}{}")),
    refused("second-answer", WHOLE + WHOLE),
    # status line
    refused("http-0.9", b"<html>hello</html>\r\n\r\n"),
    refused("json-only", b'{"a":1}'),
    refused("smtp", b"220 smtp ready\r\n"),
    refused("tls-alert", b"\x15\x03\x01\x00\x02\x02\x46"),
    refused("http-2.0", status(b"HTTP/2.0 200 OK")),
    refused("http-1.2", status(b"HTTP/1.2 200 OK")),
    refused("no-minor", status(b"HTTP/1 200 OK")),
    refused("lower-case", status(b"http/1.1 200 OK")),
    refused("icy", status(b"ICY 200 OK")),
    refused("status-000", status(b"HTTP/1.1 000 OK")),
    refused("status-099", status(b"HTTP/1.1 099 OK")),
    refused("status-600", status(b"HTTP/1.1 600 OK")),
    refused("status-999", status(b"HTTP/1.1 999 OK")),
    refused("status-20", status(b"HTTP/1.1 20 OK")),
    refused("status-2000", status(b"HTTP/1.1 2000 OK")),
    refused("status-letters", status(b"HTTP/1.1 abc OK")),
    refused("two-spaces", status(b"HTTP/1.1  200 OK")),
    refused("tab", status(b"HTTP/1.1\t200 OK")),
    refused("nul-in-reason", status(b"HTTP/1.1 200 O\x00K")),
    refused("escape-in-reason", status(b"HTTP/1.1 200 \x1b[31m")),
    refused("empty-line-first", b"\r\n" + WHOLE),
    refused("101", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"),
    # interim answers
    refused("nine-interims", b"HTTP/1.1 102 Processing\r\n\r\n" * 9 + WHOLE),
    refused("nine-interims-apart", *[b"HTTP/1.1 100 Continue\r\n\r\n"] * 9),
    refused("interim-with-body", b"HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\n{}" + WHOLE),
    refused("interim-chunked", b"HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE),
    # fields
    refused("nul-in-value", head(b"X: a\x00b", b"Content-Length: 2")),
    refused("cr-in-value", head(b"X: a\rb", b"Content-Length: 2")),
    refused("escape-in-value", head(b"X: \x1b[2J", b"Content-Length: 2")),
    refused("delete-in-value", head(b"X: a\x7f", b"Content-Length: 2")),
    refused("lf-in-value", head(b"X: a\nSet-Cookie: b", b"Content-Length: 2")),
    refused("bare-lf-everywhere", WHOLE.replace(b"\r\n", b"\n")),
    refused("bare-cr-everywhere", WHOLE.replace(b"\r\n", b"\r")),
    refused("folded", head(b"X: a", b" b", b"Content-Length: 2")),
    refused("space-first", head(b" X: a", b"Content-Length: 2")),
    refused("space-before-colon", head(b"Content-Length : 2")),
    refused("no-colon", head(b"nonsense", b"Content-Length: 2")),
    refused("empty-name", head(b": a", b"Content-Length: 2")),
    refused("bracket-in-name", head(b"X[a]: b", b"Content-Length: 2")),
    refused("8-bit-name", head(b"X\xe9: b", b"Content-Length: 2")),
    refused("101-fields", head(*[b"X: y"] * 100, b"Content-Length: 2")),
    refused("65-kib-head", head(b"X: " + b"y" * 66_000, b"Content-Length: 2")),
    refused("65-kib-of-name", OK + b"X" * 70_000),
    refused("65-kib-of-reason", b"HTTP/1.1 200 " + b"O" * 70_000),
    # chunks
    refused("chunk-not-hex", head(b"Transfer-Encoding: chunked", body=b"xyz\r\n")),
    refused("chunk-plus", head(b"Transfer-Encoding: chunked", body=b"+2\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-0x", head(b"Transfer-Encoding: chunked", body=b"0x2\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-empty-size", head(b"Transfer-Encoding: chunked", body=b"\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-space", head(b"Transfer-Encoding: chunked", body=b"2 \r\n{}\r\n0\r\n\r\n")),
    refused("chunk-overflow", head(b"Transfer-Encoding: chunked", body=b"10000000000000002\r\n{}")),
    refused("chunk-bare-lf", head(b"Transfer-Encoding: chunked", body=b"2\n{}\n0\n\n")),
    refused("chunk-too-long", head(b"Transfer-Encoding: chunked", body=b"2\r\n{}{}\r\n0\r\n\r\n")),
    refused("chunk-bare-semicolon", head(b"Transfer-Encoding: chunked", body=b"2;\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-extension-no-value", head(b"Transfer-Encoding: chunked", body=b"2;a=\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-extension-no-name", head(b"Transfer-Encoding: chunked", body=b"2;=\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-extension-nul", head(b"Transfer-Encoding: chunked", body=b"2;a\x00\r\n{}\r\n0\r\n\r\n")),
    refused("chunk-extension-20-kib", head(b"Transfer-Encoding: chunked", body=b"2;" + b"a" * 20_000 + b"\r\n{}\r\n")),
    refused("chunk-zeros-20-kib", head(b"Transfer-Encoding: chunked", body=b"0" * 20_000 + b"2\r\n{}\r\n")),
    refused("trailers-20-kib", head(b"Transfer-Encoding: chunked", body=b"0\r\nX: " + b"y" * 20_000 + b"\r\n\r\n")),
    refused("150-trailers", head(b"Transfer-Encoding: chunked", body=b"0\r\n" + b"X: y\r\n" * 150 + b"\r\n")),
    refused("trailer-without-colon", head(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nfoo\r\n\r\n")),
    refused("trailer-nul", head(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nX: \x00\r\n\r\n")),
    refused(
        "bytes-after-last-chunk", head(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n")
    ),
    # ends too early
    refused("nothing", closes=True),
    refused("half-a-status-line", b"HTTP/1.1 20", closes=True),
    refused("half-a-head", OK + b"Content-Le", closes=True),
    refused("only-an-interim", b"HTTP/1.1 100 Continue\r\n\r\n", closes=True),
    refused("head-without-body", OK + b"Content-Length: 2\r\n\r\n", closes=True),
    refused("half-a-body", OK + b"Content-Length: 4\r\n\r\n{}", closes=True),
    # a stream that has begun: what was good is relayed, the end is abrupt
    Answer("stream-cut-between-chunks", [CHUNKED + ONE], "cut", EVENT),
    Answer("stream-cut-in-a-chunk", [CHUNKED + ONE, b"40\r\ndata: "], "cut", EVENT),
    Answer("stream-then-garbage", [CHUNKED + ONE, b"nonsense\r\n"], "cut", EVENT, closes=False),
    Answer("stream-then-bare-lf", [CHUNKED + ONE, b"5\ndata:"], "cut", EVENT, closes=False),
    Answer("stream-then-long-extension", [CHUNKED + ONE, b"5;" + b"x" * 20_000], "cut", EVENT, closes=False),
    Answer("stream-without-its-end", [CHUNKED + ONE, DONE], "cut", EVENT),
    Answer("stream-ends-in-bad-trailer", [CHUNKED + ONE, DONE + b"0\r\nX\x00: y\r\n\r\n"], "cut", EVENT, closes=False),
]
