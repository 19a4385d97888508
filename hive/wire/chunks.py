"""Chunked bodies (RFC 9112 §7.1), of requests and of answers: read strictly, bounded, and ended where they end.

Chunk extensions are skipped and trailers dropped; both must follow the grammar, and their size is bounded. llhttp takes
`;a=` and `;=` for extensions, which others may read as something else: so it is not asked here.
"""

from __future__ import annotations

import re

META_FREE = 16 * 1024
"""Bytes of chunk extensions and trailers that a body may always have; beyond that, not more than the body itself."""
MAX_LINE = 4 * 1024
"""Bytes of a chunk's size with its extensions, or of a trailer."""
MAX_TRAILERS = 100
LEAST_A_SIZE = 3
"""A digit and a line end: a size without extension."""
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*'
_EXTENSION = rb';%b(?:=(?:%b|%b"))?' % (_TOKEN, _TOKEN, _QUOTED)
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_PLAIN_SIZE = re.compile(rb"([1-9A-Fa-f][0-9A-Fa-f]{0,15})\r\n")
"""Of a chunk that is not the last one, without zeros before it: never longer than the chunk itself."""
_SIZE_EXTENDED = re.compile(rb"([0-9A-Fa-f]{1,16})(?:%b)+\r\n" % _EXTENSION)
_SIZE_SO_FAR = re.compile(rb"[0-9A-Fa-f]{1,16}(?:%b)*(?:;(?:%b(?:=(?:%b\\?)?)?)?|\r)?" % (_EXTENSION, _TOKEN, _QUOTED))
"""Beginnings of such a line: it ends inside an extension, or before the line's end."""
_TRAILER = re.compile(rb"%b:[\t -~\x80-\xff]*\r\n" % _TOKEN)
_TRAILER_SO_FAR = re.compile(rb"\r|%b(?::[\t -~\x80-\xff]*\r?)?" % _TOKEN)
_FRAMES = re.compile(rb"(?i:content-length|transfer-encoding):")
"""Fields that no trailer may have, as they frame a message (RFC 9110 §6.5.1)."""
_CRLF = b"\r\n"


class BadChunks(Exception):
    """The chunked body is malformed or nearly empty of content."""


class ChunkDecoder:
    """One chunked body, split anywhere, into its bytes.

    >>> decoder = ChunkDecoder()
    >>> decoder.feed(b"3;a=b\\r\\nabc\\r\\n"), decoder.feed(b"2\\r\\nde\\r\\n0\\r\\nX: y\\r\\n\\r\\nGET /")
    ((b'abc', None), (b'de', b'GET /'))
    """

    __slots__ = ("_data_left", "_in_trailers", "_line", "_meta", "_size", "_trailers", "_wants_crlf")

    def __init__(self) -> None:
        self._data_left = 0
        """Bytes of the chunk that has begun."""
        self._wants_crlf = False
        """True if a chunk's bytes have come, but not the line end behind them."""
        self._in_trailers = False
        self._line = b""
        """Bytes that have come of a line."""
        self._trailers = 0
        self._meta = self._size = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """(body bytes decoded, None while the body goes on or the bytes that follow its end). Raises BadChunks."""
        if self._line:
            data = self._line + data
            self._line = b""
        pieces: list[bytes] = []
        at, rest = 0, None
        if not (self._data_left or self._wants_crlf or self._in_trailers):
            at = self._whole_chunks(data, pieces)
        while at < len(data):
            if self._data_left:
                piece = data[at : at + self._data_left]
                pieces.append(piece)
                at += len(piece)
                self._data_left -= len(piece)
                self._wants_crlf = not self._data_left
                continue
            if self._wants_crlf:
                end = self._after_data(data, at)
            elif self._in_trailers:
                if data.startswith(_CRLF, at):
                    rest = data[at + 2 :]
                    break
                end = self._after_trailer(data, at)
            else:
                end = self._after_size(data, at)
            if end < 0:
                self._line = data[at:]
                break
            at = end
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._size += len(body)
        if self._meta > META_FREE + self._size or self._trailers > MAX_TRAILERS:
            raise BadChunks("more chunk extensions and trailers than body")
        return body, rest

    @staticmethod
    def _whole_chunks(data: bytes, pieces: list[bytes]) -> int:
        """Takes those that `data` begins with, as far as they are whole and plain; how many bytes those are."""
        at, length, whole = 0, len(data), _PLAIN_SIZE.match
        while at < length and (match := whole(data, at)) is not None:
            begin = match.end()
            end = begin + int(match[1], 16)
            if data[end : end + 2] != _CRLF:
                break
            pieces.append(data[begin:end])
            at = end + 2
        return at

    def _after_data(self, data: bytes, at: int) -> int:
        """Finds where it goes on behind the line end of a chunk; -1 where more must come."""
        if data.startswith(_CRLF, at):
            self._wants_crlf = False
            return at + 2
        if data[at:] == b"\r":
            return -1
        raise BadChunks("malformed chunk: its bytes do not end where its size says")

    def _after_size(self, data: bytes, at: int) -> int:
        """Finds where a chunk's bytes begin; -1 where more must come."""
        match = _SIZE.match(data, at) or _SIZE_EXTENDED.match(data, at)
        if match is None:
            _check_so_far(_SIZE_SO_FAR, data[at : at + MAX_LINE + 1], "size or extension")
            return -1
        end = match.end()
        if end - at > MAX_LINE:
            raise BadChunks("malformed chunk: an extension that is too long")
        self._meta += end - at - LEAST_A_SIZE
        self._data_left = int(match[1], 16)
        self._in_trailers = not self._data_left
        return end

    def _after_trailer(self, data: bytes, at: int) -> int:
        """Finds where the next line begins; -1 where more must come."""
        match = _TRAILER.match(data, at)
        if match is None:
            _check_so_far(_TRAILER_SO_FAR, data[at : at + MAX_LINE + 1], "trailer")
            return -1
        if match.end() - at > MAX_LINE:
            raise BadChunks("malformed chunk: a trailer that is too long")
        if _FRAMES.match(data, at) is not None:
            raise BadChunks("a trailer that would frame the message")
        self._trailers += 1
        self._meta += match.end() - at
        return match.end()


def _check_so_far(allowed: re.Pattern[bytes], line: bytes, what: str) -> None:
    """Refuses the beginning of a line that cannot become a valid one."""
    if len(line) > MAX_LINE or allowed.fullmatch(line) is None:
        raise BadChunks(f"malformed chunk: its {what}")
