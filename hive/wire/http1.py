"""HTTP/1.1 as Hive admits it: httptools (llhttp, strict) plus the rules it leaves out. Bytes only, no policy.

Any doubt about framing or syntax is an error that ends the connection; nothing is repaired
(RFC 9112 §6.3, §11.2 on request smuggling).
"""

from __future__ import annotations

from typing import Protocol

import httptools

from hive.errors import BadRequest, ExpectationFailed, HeadTooLarge, HiveError, TooLarge

MAX_HEAD = 16 * 1024
"""Bytes of request line and fields together; nginx and HAProxy default to 8–16 KiB."""
MAX_FIELDS = 100

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
    415: b"Unsupported Media Type",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}

Fields = list[tuple[bytes, bytes]]


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` with its line end; an unknown status gets an empty reason.

    >>> status_line(502)
    b'HTTP/1.1 502 Bad Gateway\\r\\n'
    """
    return b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b""))


def answer_head(status: int, length: int, fields: bytes, *, keep: bool) -> bytes:
    """The head of an answer of Hive's own: JSON of this length, and `fields` (each with its line end) as they are.

    >>> answer_head(200, 2, b"", keep=True)
    b'HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 2\\r\\n\\r\\n'
    """
    closing = b"" if keep else b"connection: close\r\n"
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n" % (
        status_line(status),
        length,
        fields,
        closing,
    )


class Request:
    """One request as parsed. `fields`: names in lower case, values stripped, in order."""

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
        "target",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.fields: Fields = []
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.content_length: int | None = 0
        """None where the body is chunked."""
        self.keep_alive = True
        self.chunks = True
        """Whether the client understands a chunked answer (HTTP/1.1)."""
        self.expects = False
        self.complete = False

    def field(self, name: bytes) -> bytes | None:
        """The first value of a field, None where it is absent."""
        for key, value in self.fields:
            if key == name:
                return value
        return None


def check_fields(fields: Fields, version: str) -> tuple[int | None, bool]:
    """(content length or None for chunked, whether the client expects 100-continue).

    Raises BadRequest for any ambiguity about who the body belongs to, HeadTooLarge, ExpectationFailed.

    >>> check_fields([(b"host", b"h"), (b"content-length", b"2")], "1.1")
    (2, False)
    >>> check_fields([(b"host", b"h"), (b"content-length", b"2"), (b"transfer-encoding", b"chunked")], "1.1")
    Traceback (most recent call last):
    hive.errors.BadRequest: both Content-Length and Transfer-Encoding
    """
    if version not in ("1.1", "1.0"):
        raise BadRequest("only HTTP/1.1 and HTTP/1.0 are spoken here")
    length: bytes | None = None
    coding: bytes | None = None
    hosts = 0
    expects = False
    for name, value in fields:
        if b"_" in name:
            raise BadRequest("a field name with an underscore")
        if name == b"content-length":
            if length is not None:
                raise BadRequest("more than one Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if coding is not None:
                raise BadRequest("more than one Transfer-Encoding")
            coding = value
        elif name == b"host":
            hosts += 1
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise ExpectationFailed
            expects = True
    if hosts != 1 and (version == "1.1" or hosts > 1):
        raise BadRequest("exactly one Host field is needed")
    if coding is not None:
        if length is not None:
            raise BadRequest("both Content-Length and Transfer-Encoding")
        if version == "1.0" or coding.lower() != b"chunked":
            raise BadRequest("the only transfer coding is chunked, in HTTP/1.1")
        return None, expects
    if length is None:
        return 0, expects
    if not length.isdigit() or len(length) > 18 or (len(length) > 1 and length[:1] == b"0"):
        raise BadRequest("Content-Length is not a plain number")
    return int(length), expects


MAX_ANSWERED_LATER = 64 * 1024
"""Bytes of a refused request's body that are still read, so that its connection can be kept."""


def answered_later(request: Request) -> bool:
    """Whether a refusal waits for the request's end; else it is answered at once and the connection closed."""
    length = request.content_length
    return not request.expects and length is not None and length <= MAX_ANSWERED_LATER


class RequestEvents(Protocol):
    """What a RequestParser calls, in this order, for each request."""

    def on_head(self, request: Request) -> None:
        """The head is complete and framed without doubt."""
        ...

    def on_body(self, request: Request, size: int) -> None:
        """`size` more bytes were added to `request.body`."""
        ...

    def on_request(self, request: Request) -> None:
        """The request is complete."""
        ...


class RequestParser:
    """Bytes of one connection, split anywhere, into requests.

    `feed` raises the HiveError that answers what is wrong; the connection is of no use after that.
    `max_body` bounds each decoded body in bytes.
    """

    __slots__ = ("_error", "_events", "_fields", "_head_bytes", "_known", "_parser", "_request", "begun", "max_body")

    def __init__(self, events: RequestEvents, *, max_body: int) -> None:
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._events = events
        self._request = Request()
        self._fields: Fields = self._request.fields
        self._known = self._request
        """The last request whose head passed the checks."""
        self._head_bytes = 0
        self._error: HiveError | None = None
        self.begun: Request | None = None
        """The request whose first byte but not whose last was parsed."""
        self.max_body = max_body

    def close(self) -> None:
        """No more is fed: breaks the reference cycle with the C parser."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        """Parses on. Raises Refusal subclasses (status 4xx)."""
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadRequest("upgrades are not spoken here") from None
        except httptools.HttpParserError as error:
            if self._error is not None:
                raise self._error from None
            raise BadRequest(f"malformed HTTP: {str(error)[:80]}") from None
        if self.begun is not None and not self.begun.method:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                raise HeadTooLarge(f"the request head exceeds {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        request = self._request = self.begun = Request()
        self._fields = request.fields
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))
        if len(self._fields) > MAX_FIELDS:
            self._stop(HeadTooLarge(f"more than {MAX_FIELDS} fields"))

    def on_headers_complete(self) -> None:
        request, parser = self._request, self._parser
        assert parser is not None
        try:
            version = parser.get_http_version()
            request.chunks = version == "1.1"
            known = self._known
            if known.fields == self._fields and known.target == request.target and known.chunks is request.chunks:
                # the heads of one connection repeat: 17 fields are compared in 1 µs and checked in 4
                request.content_length, request.expects = known.content_length, known.expects
            else:
                request.content_length, request.expects = check_fields(self._fields, version)
                if sum(len(name) + len(value) + 4 for name, value in self._fields) + len(request.target) > MAX_HEAD:
                    raise HeadTooLarge(f"the request head exceeds {MAX_HEAD} bytes")
                self._known = request
            if request.content_length is not None and request.content_length > self.max_body:
                raise TooLarge(f"a body of {request.content_length} bytes exceeds {self.max_body}")
            request.method = parser.get_method()
            request.keep_alive = parser.should_keep_alive()
            self._events.on_head(request)
        except HiveError as error:
            self._stop(error)

    def on_body(self, data: bytes) -> None:
        request = self._request
        request.body_bytes += len(data)
        if request.body_bytes > self.max_body:
            self._stop(TooLarge(f"the body exceeds {self.max_body} bytes"))
        request.body.append(data)
        try:
            self._events.on_body(request, len(data))
        except HiveError as error:
            self._stop(error)

    def on_message_complete(self) -> None:
        self._request.complete = True
        self.begun = None
        self._events.on_request(self._request)

    def _stop(self, error: HiveError) -> None:
        """httptools wraps whatever a callback raises; keep the real reason aside."""
        self._error = error
        raise error


class Response:
    """The head of one answer. `content_length` is None where the body is chunked or ends with the connection."""

    __slots__ = ("chunked", "content_length", "fields", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.fields: Fields = []
        self.content_length: int | None = None
        self.chunked = False
        self.keep_alive = True


class ResponseParser:
    """The bytes of one answer into its head, body pieces and end. One parser per answer: llhttp waits for the body of
    an answer to HEAD, and eats the next one.

    After each `feed`: `head` is set once it is complete, `take()` gives the body bytes decoded since, `complete`
    tells the end. An answer without length ends with the connection and never completes here. Raises BadResponse.
    """

    __slots__ = ("_parser", "_pieces", "_response", "complete", "head")

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._response = Response()
        self._pieces: list[bytes] = []
        self.head: Response | None = None
        self.complete = False

    def close(self) -> None:
        """No more is fed. The two parsers refer to each other: left to the garbage collector they cost 18 % CPU."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise BadResponse("the backend wants to switch protocols") from error
        except httptools.HttpParserError as error:
            raise BadResponse(f"malformed answer: {str(error.__context__ or error)[:80]}") from error

    def take(self) -> bytes:
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return data

    def on_message_begin(self) -> None:
        if self.complete:
            raise BadResponse("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.fields.append((name.lower(), value))
        if len(self._response.fields) > MAX_FIELDS:
            raise BadResponse(f"more than {MAX_FIELDS} fields")

    def on_headers_complete(self) -> None:
        response = self._response
        assert self._parser is not None
        response.status = self._parser.get_status_code()
        if response.status < 200:
            self._response = Response()
            return
        for name, value in response.fields:
            if name == b"content-length":
                if response.content_length is not None:
                    raise BadResponse("more than one Content-Length")
                response.content_length = int(value)
            elif name == b"transfer-encoding":
                response.chunked = True
                if value.lower() != b"chunked":
                    raise BadResponse("a transfer coding other than chunked")
        if response.chunked and response.content_length is not None:
            raise BadResponse("both Content-Length and Transfer-Encoding")
        response.keep_alive = self._parser.should_keep_alive()
        self.head = response

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self.head is not None:
            self.complete = True


class BadResponse(Exception):
    """What the backend sent is no HTTP answer."""


def as_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body.

    >>> as_chunk(b"hello")
    b'5\\r\\nhello\\r\\n'
    """
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
