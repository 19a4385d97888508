"""HTTP/1.1 as Hive admits it: bytes into requests and answers, and the few heads Hive writes itself.

A head is found by its empty line; its syntax is judged by httptools (llhttp, strict) and by the rules of `heads`. Only
the head's length of the body frames the body. Bytes only, no policy.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import httptools

from hive.errors import BadRequest, HeadTooLarge, TooLarge
from hive.wire.body_sizes import BODY_SETTING, FORM_SETTING, too_large
from hive.wire.chunks import BadChunks, ChunkDecoder
from hive.wire.dates import Dated
from hive.wire.heads import (
    MAX_ANSWER_HEAD,
    MAX_HEAD,
    MAX_INTERIM,
    WITHOUT_BODY,
    BadResponse,
    Fields,
    check_answer_fields,
    check_fields,
    check_unfinished,
    check_unfinished_answer,
    is_plain_number,
    read_fields,
    read_request_line,
    read_status_line,
    without_length,
)

REASONS = {
    200: b"OK",
    201: b"Created",
    202: b"Accepted",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    414: b"URI Too Long",
    415: b"Unsupported Media Type",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
    507: b"Insufficient Storage",
}


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` with its line end; an unknown status gets an empty reason.

    >>> status_line(502)
    b'HTTP/1.1 502 Bad Gateway\\r\\n'
    """
    return b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b""))


_STARTS = Dated(lambda status, date: status_line(status) + date)


def head_start(status: int) -> bytes:
    """Begins a head that Hive writes itself: the status line and the Date of this moment."""
    return _STARTS.at(status, time.time())


def answer_head(
    status: int, length: int, fields: bytes, *, keep: bool, content_type: bytes = b"application/json"
) -> bytes:
    """The head of an answer of Hive's own of this length, and `fields` (each with its line end) as they are.

    >>> answer_head(200, 2, b"", keep=True).partition(b"GMT\\r\\n")[2]
    b'content-type: application/json\\r\\ncontent-length: 2\\r\\n\\r\\n'
    """
    closing = b"" if keep else b"connection: close\r\n"
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        head_start(status),
        content_type,
        length,
        fields,
        closing,
    )


def as_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body.

    >>> as_chunk(b"hello")
    b'5\\r\\nhello\\r\\n'
    """
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)


Message = TypeVar("Message")


class KnownHead(Generic[Message]):
    """The bytes of the last head that passed every check; only the digits of its Content-Length may differ.

    Heads of one connection repeat: recognising one costs 0.4 µs, reading openai-python's 17 fields anew 11.

    >>> known = KnownHead("what it means")
    >>> known.keep(b"POST / HTTP/1.1\\r\\nContent-Length: 2\\r\\n\\r\\n", "something else")
    >>> known.match(b"POST / HTTP/1.1\\r\\nContent-Length: 13\\r\\n\\r\\n{..."), known.match(b"POST /")
    ((39, 13), None)
    """

    __slots__ = ("_after", "_before", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        """The parsed head; shared by all that match, so not to be changed."""
        self._before: bytes | None = None
        self._after: bytes | None = None

    def keep(self, head: bytes, message: Message) -> None:
        """Remembers a whole head. Only for one whose fields were checked: one Content-Length, a plain number."""
        self.message = message
        length = _LENGTH.search(head)
        if length is None:
            self._before, self._after = head, None
        else:
            self._before, self._after = head[: length.start(1)], head[length.end(1) :]

    def match(self, data: bytes) -> tuple[int, int | None] | None:
        """(bytes of the head, its Content-Length if it has one), or None where `data` begins otherwise."""
        before, after = self._before, self._after
        if before is None or not data.startswith(before):
            return None
        at = len(before)
        if after is None:
            return at, None
        end = data.find(b"\r", at)
        if end < 0:
            return None
        digits = data[at:end]
        if not is_plain_number(digits) or not data.startswith(after, end):
            return None
        return end + len(after), int(digits)


class Request:
    """One request as parsed. `fields`: names in lower case, values stripped, in order, without Content-Length.

    `fields` is the very list of the request before it on this connection where both heads are the same but for the
    number in Content-Length: what was made of it then still holds. So it is not to be changed.
    """

    __slots__ = (
        "body",
        "body_bytes",
        "chunks",
        "complete",
        "content_length",
        "expects",
        "fields",
        "keep_alive",
        "method",
        "sized",
        "target",
    )

    def __init__(
        self,
        method: bytes = b"",
        target: bytes = b"",
        fields: Fields | None = None,
        content_length: int | None = 0,
        sized: bool = False,
        keep_alive: bool = True,
        chunks: bool = True,
        expects: bool = False,
    ) -> None:
        self.method = method
        self.target = target
        self.fields: Fields = [] if fields is None else fields
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.content_length = content_length
        """The length of the body, None if it is chunked."""
        self.sized = sized
        """True if there is a Content-Length."""
        self.keep_alive = keep_alive
        self.chunks = chunks
        """True if the client understands a chunked answer (HTTP/1.1)."""
        self.expects = expects
        self.complete = False

    def like(self, length: int | None) -> Request:
        """A new request with this head, but for the number in its Content-Length."""
        return Request(
            self.method,
            self.target,
            self.fields,
            self.content_length if length is None else length,
            self.sized,
            self.keep_alive,
            self.chunks,
            self.expects,
        )

    def field(self, name: bytes) -> bytes | None:
        """The first value of a field, None where it is absent."""
        for key, value in self.fields:
            if key == name:
                return value
        return b"%d" % (self.content_length or 0) if self.sized and name == b"content-length" else None


MAX_ANSWERED_LATER = 64 * 1024
"""Bytes of a refused request's body that are still read, so that its connection can be kept."""


def answered_later(request: Request) -> bool:
    """Whether a refusal waits for the request's end; else it is answered at once and the connection closed."""
    length = request.content_length
    return not request.expects and length is not None and length <= MAX_ANSWERED_LATER


class RequestEvents(Protocol):
    """The methods that a RequestParser calls, in this order, for each request."""

    def on_head(self, request: Request) -> None:
        """The head is complete and framed without doubt."""
        ...

    def on_body(self, request: Request, size: int) -> None:
        """`size` more bytes were added to `request.body`."""
        ...

    def on_request(self, request: Request) -> None:
        """The request is complete."""
        ...


class _Nobody:
    """Takes the place of the connection in a closed parser."""

    def on_head(self, request: Request) -> None: ...

    def on_body(self, request: Request, size: int) -> None: ...

    def on_request(self, request: Request) -> None: ...


_NOBODY = _Nobody()
NO_LONGER: Mapping[bytes, int] = {}


class RequestParser:
    """Bytes of one connection, split anywhere, into one request after the other.

    `feed` raises the HiveError that answers a fault; the connection is of no use after that. `max_body` bounds each
    decoded body in bytes, but for those of paths that end as `longer` says.
    """

    __slots__ = ("_checked", "_chunks", "_events", "_head", "_known", "_request", "asks_head", "longer", "max_body")

    def __init__(self, events: RequestEvents, *, max_body: int, longer: Mapping[bytes, int] = NO_LONGER) -> None:
        self._events = events
        self._known = KnownHead(Request())
        self._request: Request | None = None
        """The request that has its head but not its end."""
        self._head = bytearray()
        """The bytes of a head that is not complete; the first `_checked` of them were looked at."""
        self._checked = 0
        self._chunks: ChunkDecoder | None = None
        self.asks_head = False
        """True if the bytes begin with HEAD and became no request: the answer has no body."""
        self.max_body = max_body
        self.longer = longer

    def close(self) -> None:
        """Ends the parsing, and breaks the reference cycle with the connection."""
        self._events = _NOBODY

    def feed(self, data: bytes) -> bytes:
        """Parses on, to the end of one request at most; returns what follows it, unseen. Raises 4xx, 501 and 505."""
        request = self._request
        if request is None:
            known = None if self._head else self._known.match(data)
            if known is not None:
                request = self._known.message.like(known[1])
                data = data[known[0] :]
            else:
                request, data = self._take_head(data)
                if request is None:
                    return b""
            length = request.content_length
            if length and (length > self.max_body or request.method in WITHOUT_BODY):
                self._check_length(request, length)
            self._request = request
            self._events.on_head(request)
        length = request.content_length
        if length is None:
            return self._feed_chunks(request, data)
        wanted = length - request.body_bytes
        rest = b""
        if len(data) > wanted:
            data, rest = data[:wanted], data[wanted:]
        if data:
            self._add(request, data)
        if request.body_bytes == length:
            self._end(request)
        return rest

    def _take_head(self, data: bytes) -> tuple[Request | None, bytes]:
        """(the request, what follows its head); None while the head is not complete."""
        whole: bytes | bytearray = data
        if self._head:
            self._head += data
            whole = self._head
        start = 2 if whole[:2] == b"\r\n" else 0  # RFC 9112 §2.2: an empty line before a request is ignored
        self.asks_head = whole.startswith(b"HEAD ", start)
        end = whole.find(_END, max(start, self._checked - 3))
        if end < 0:
            check_unfinished(whole[start:] if start else whole, max(0, self._checked - start))
            if not self._head:
                self._head += data
            self._checked = len(whole)
            return None, b""
        head, rest = bytes(whole[start : end + 4]), bytes(whole[end + 4 :])
        self._head = bytearray()
        self._checked = 0
        request = _read_request(head)
        self._known.keep(head, request)
        return request.like(None), rest

    def _check_length(self, request: Request, length: int) -> None:
        """Refuses a body where there is to be none; a long one, unless its path takes that."""
        self.asks_head = request.method == b"HEAD"
        if length > (most := self._most(request)):
            raise self._too_large(most, length)
        if request.method in WITHOUT_BODY:
            raise BadRequest(f"{request.method.decode()} takes no body")

    def _most(self, request: Request) -> int:
        """Bytes of the longest body that this request may have."""
        path = request.target.partition(b"?")[0]
        return next((most for end, most in self.longer.items() if path.endswith(end)), self.max_body)

    def _too_large(self, most: int, length: int | None = None) -> TooLarge:
        return too_large("body", most, BODY_SETTING if most == self.max_body else FORM_SETTING, length=length)

    def _feed_chunks(self, request: Request, data: bytes) -> bytes:
        if not data:
            return b""
        if self._chunks is None:
            self._chunks = ChunkDecoder()
        try:
            body, rest = self._chunks.feed(data)
        except BadChunks as error:
            raise BadRequest(str(error)) from None
        whole = request.body_bytes + len(body)
        if whole > self.max_body and whole > (most := self._most(request)):
            raise self._too_large(most)
        if body:
            self._add(request, body)
        if rest is None:
            return b""
        self._chunks = None
        self._end(request)
        return rest

    def _add(self, request: Request, data: bytes) -> None:
        request.body_bytes += len(data)
        request.body.append(data)
        self._events.on_body(request, len(data))

    def _end(self, request: Request) -> None:
        self._request = None
        request.complete = True
        self._events.on_request(request)


def _read_request(head: bytes) -> Request:
    """A whole head into a request without body. Raises what answers a bad one."""
    method, target, v11 = read_request_line(head[: head.find(b"\r\n")])
    if len(head) > MAX_HEAD:
        raise HeadTooLarge(f"the request head exceeds {MAX_HEAD} bytes")
    try:
        fields = read_fields(head, httptools.HttpRequestParser)
    except httptools.HttpParserError as error:
        raise BadRequest(f"malformed HTTP: {str(error)[:80]}") from None
    framing = check_fields(fields, method=method, v11=v11)
    rest = without_length(fields)
    sized = len(rest) < len(fields)
    return Request(method, target, rest, framing.length, sized, framing.keep_alive, v11, framing.expects)


class Response:
    """The head of one answer; never changed, and the same for answers that begin with the same bytes.

    `fields` is without Content-Length, and the very list of the answer before where only that number differs.
    `content_length` is None where the body is chunked or ends with the connection.
    """

    __slots__ = ("chunked", "content_length", "fields", "keep_alive", "status")

    def __init__(
        self,
        status: int = 0,
        fields: Fields | None = None,
        content_length: int | None = None,
        chunked: bool = False,
        keep_alive: bool = True,
    ) -> None:
        self.status = status
        self.fields: Fields = [] if fields is None else fields
        self.content_length = content_length
        self.chunked = chunked
        self.keep_alive = keep_alive

    def like(self, length: int | None) -> Response:
        """The answer with this head, but for the number in its Content-Length."""
        if length is None or length == self.content_length:
            return self
        return Response(self.status, self.fields, length, self.chunked, self.keep_alive)


class ResponseParser:
    """The bytes of one answer into its head, its body and its end. One parser per answer.

    After each `feed`, which gives the body bytes in it: `head` is set once it is complete, `complete` tells the end. An
    answer without length ends with the connection and never completes here. Raises BadResponse.
    `known` remembers heads from answer to answer; `bodiless` for the answer to HEAD, which has a length but no body.
    """

    __slots__ = (
        "_bodiless",
        "_checked",
        "_chunks",
        "_head",
        "_interim",
        "_known",
        "_left",
        "complete",
        "head",
    )

    def __init__(self, known: KnownHead[Response] | None = None, *, bodiless: bool = False) -> None:
        self._known = known
        self._bodiless = bodiless
        self._head = b""
        self._checked = self._interim = self._left = 0
        self._chunks: ChunkDecoder | None = None
        self.head: Response | None = None
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        head = self.head
        if head is None:
            data = self._take_head(data)
            head = self.head
        if head is None or not data:
            return b""
        if self.complete:
            raise BadResponse("bytes after the end of the answer")
        if self._chunks is not None:
            return self._feed_chunks(self._chunks, data)
        if head.content_length is not None:
            self._left -= len(data)
            if self._left < 0:
                raise BadResponse("bytes after the end of the answer")
            self.complete = not self._left
        return data

    def _feed_chunks(self, chunks: ChunkDecoder, data: bytes) -> bytes:
        try:
            body, rest = chunks.feed(data)
        except BadChunks as error:
            raise BadResponse(str(error)) from None
        if rest:
            raise BadResponse("bytes after the end of the answer")
        self.complete = rest is not None
        return body

    def _take_head(self, data: bytes) -> bytes:
        """Reads a head and returns the bytes behind it; nothing while it is not complete."""
        known = self._known
        if known is not None and not self._head and not self._bodiless:
            match = known.match(data)
            if match is not None:
                self._begin(known.message.like(match[1]))
                return data[match[0] :]
        data = self._head + data
        while (end := data.find(_END, max(0, self._checked - 3))) >= 0:
            head, data = data[: end + 4], data[end + 4 :]
            self._checked = 0
            response = self._read(head)
            if response is not None:
                if known is not None and not self._bodiless:
                    known.keep(head, response)
                self._begin(response)
                return data
        check_unfinished_answer(data, self._checked)
        self._head = data
        self._checked = len(data)
        return b""

    def _read(self, head: bytes) -> Response | None:
        """A whole head; None for an interim answer (1xx), of which a few are passed over."""
        status, v11 = read_status_line(head[: head.find(b"\r\n")])
        if len(head) > MAX_ANSWER_HEAD:
            raise BadResponse(f"the head exceeds {MAX_ANSWER_HEAD} bytes")
        try:
            fields = read_fields(head, httptools.HttpResponseParser)
        except httptools.HttpParserError as error:
            raise BadResponse(f"malformed answer: {str(error)[:80]}") from None
        framing = check_answer_fields(fields, status=status, v11=v11, bodiless=self._bodiless)
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM or framing.chunked or framing.length:
                raise BadResponse(f"more than {MAX_INTERIM} interim answers, or one with a body")
            return None
        return Response(status, without_length(fields), framing.length, framing.chunked, framing.keep_alive)

    def _begin(self, head: Response) -> None:
        self.head = head
        if self._bodiless or head.content_length == 0:
            self.complete = True
        elif head.chunked:
            self._chunks = ChunkDecoder()
        elif head.content_length is not None:
            self._left = head.content_length
