"""Chunked bodies (RFC 9112 §7.1), of requests and of answers: decoded by llhttp, bounded and ended here.

Chunk extensions are read over and trailers dropped; what they may take up is bounded.
"""

from __future__ import annotations

import httptools

META_FREE = 16 * 1024
"""Bytes of chunk extensions and trailers that a body may always have; beyond that, not more than the body itself."""
MAX_TRAILERS = 100
LEAST_A_CHUNK = 5
"""A digit and two line ends: what a chunk costs without extension."""
_HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"\r\n\r\n"
_CRLF = (b"\r", b"\n")


class BadChunks(Exception):
    """The chunked body is malformed or nearly empty of content."""


class ChunkDecoder:
    """One chunked body, split anywhere, into its bytes.

    llhttp does not tell where a body ends inside what it was fed, but every body ends with an empty line: so it is
    fed up to each empty line and asked whether that was the end. It is never fed a byte of the next message.

    >>> decoder = ChunkDecoder()
    >>> decoder.feed(b"3;a=b\\r\\nabc\\r\\n"), decoder.feed(b"2\\r\\nde\\r\\n0\\r\\nX: y\\r\\n\\r\\nGET /")
    ((b'abc', None), (b'de', b'GET /'))
    """

    __slots__ = ("_parser", "_raw", "_seen", "_size", "_tail")

    def __init__(self) -> None:
        self._seen = _Seen()
        self._parser = httptools.HttpRequestParser(self._seen)
        self._parser.feed_data(_HEAD)
        self._seen.trailers = 0
        self._tail = b""
        self._raw = self._size = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """(body bytes decoded, None while the body goes on or the bytes that follow its end). Raises BadChunks."""
        seen = self._seen
        rest: bytes | None = None
        try:
            if data.find(_END) < 0 and (data[:1] not in _CRLF or (self._tail + data[:3]).find(_END) < 0):
                self._parser.feed_data(data)
            else:
                rest = self._feed_by_empty_lines(data)
        except httptools.HttpParserError as error:
            raise BadChunks(f"malformed chunk: {str(error)[:80]}") from None
        self._tail = data[-3:] if len(data) > 2 else (self._tail + data)[-3:]
        pieces = seen.pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._raw += len(data) - len(rest or b"") - LEAST_A_CHUNK * len(pieces)
        self._size += len(body)
        pieces.clear()
        if self._raw > META_FREE + 2 * self._size or seen.trailers > MAX_TRAILERS:
            raise BadChunks("more chunk extensions and trailers than body")
        return body, rest

    def _feed_by_empty_lines(self, data: bytes) -> bytes | None:
        joined = self._tail + data
        offset = len(self._tail)
        at = 0
        while at < len(data):
            end = joined.find(_END, max(0, at + offset - 3))
            end = len(data) if end < 0 else end + len(_END) - offset
            self._parser.feed_data(data[at:end])
            if self._seen.done:
                return data[end:]
            at = end
        return None


class _Seen:
    """What the parser calls; it knows of no parser, so the two make no reference cycle."""

    __slots__ = ("done", "pieces", "trailers")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.trailers = 0
        self.done = False

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)

    def on_header(self, _name: bytes, _value: bytes) -> None:
        self.trailers += 1

    def on_message_complete(self) -> None:
        self.done = True
