"""Rules for heads beyond llhttp's syntax: request line, status line, framing, Host, Connection. Pure.

Any doubt about syntax or about where a message ends is an error that ends the connection; nothing is repaired
(RFC 9112 §6.3, §11.2 on request smuggling). Names of fields are in lower case here, values stripped.
"""

from __future__ import annotations

import contextlib
import re

import httptools
import msgspec

from hive.errors import (
    BadRequest,
    ExpectationFailed,
    HeadTooLarge,
    MethodNotAllowed,
    NotSupported,
    TargetTooLong,
    VersionNotSupported,
)

MAX_HEAD = 16 * 1024
"""Bytes of request line and fields together; nginx and HAProxy default to 8–16 KiB."""
MAX_ANSWER_HEAD = 64 * 1024
"""Bytes of an answer's head."""
MAX_FIELDS = 100
MAX_TARGET = 8 * 1024
MAX_METHOD = 24
MAX_INTERIM = 8
"""1xx answers that may come before the answer itself."""
METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
ALLOW = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
WITHOUT_BODY = frozenset({b"GET", b"HEAD"})

Fields = list[tuple[bytes, bytes]]

_UNDERSCORE = ord("_")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,24}) ([!-~]+) HTTP/([0-9])\.([0-9])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [\t -~\x80-\xff]*)?")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_DOUBT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r[^\n]")
"""Bytes that no head contains: control characters, and line ends that are not CR LF."""
_FRAMES = frozenset({b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"})
_PROTECTED = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization"})
"""Fields a Connection field cannot name away."""


class BadResponse(Exception):
    """The backend's bytes are no HTTP answer."""


class Framing(msgspec.Struct, frozen=True):
    """The end of a message, and the further use of its connection.

    `length`: bytes of the body; None if it is chunked, and for an answer also if it ends with the connection.
    """

    length: int | None
    chunked: bool
    keep_alive: bool
    expects: bool = False


def read_request_line(line: bytes) -> tuple[bytes, bytes, bool]:
    """(method, target, whether it is HTTP/1.1). Raises what answers a bad one: 400, 405, 414, 501 or 505.

    >>> read_request_line(b"GET /api/tags HTTP/1.0")
    (b'GET', b'/api/tags', False)
    >>> read_request_line(b"GET  /api/tags HTTP/1.1")
    Traceback (most recent call last):
    hive.errors.BadRequest: malformed request line
    """
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequest("malformed request line")
    method, target, major, minor = match.groups()
    if major != b"1":
        raise VersionNotSupported
    if minor not in (b"0", b"1"):
        raise BadRequest("only HTTP/1.1 and HTTP/1.0 are spoken here")
    if len(target) > MAX_TARGET:
        raise TargetTooLong(f"the request target exceeds {MAX_TARGET} bytes")
    if method not in METHODS:
        if method in (b"CONNECT", b"TRACE"):
            raise MethodNotAllowed(f"{method.decode()} is not offered here", allow=ALLOW)
        raise NotSupported("a method that is not known here")
    if method == b"OPTIONS" and target == b"*":
        raise MethodNotAllowed("OPTIONS * is not offered here", allow=ALLOW)
    if target[:1] != b"/" or b"#" in target:
        raise BadRequest("the request target must be a path")
    return method, target, minor == b"1"


def check_unfinished(head: bytes | bytearray, checked: int) -> None:
    """Refuses what can be refused before a request head has ended; `checked` bytes of it were looked at before.

    Raises BadRequest and its kin, HeadTooLarge.
    """
    if _DOUBT.search(head, max(0, checked - 1)):
        raise BadRequest("a control character or a bare line end in the head")
    end = head.find(b"\r\n")
    if end < 0:
        if b" " not in head[: MAX_METHOD + 1] and len(head) > MAX_METHOD:
            raise BadRequest("malformed request line")
        if len(head) > MAX_METHOD + MAX_TARGET + len(b"  HTTP/1.1\r"):
            raise TargetTooLong(f"the request target exceeds {MAX_TARGET} bytes")
    elif checked < end + 2:
        read_request_line(bytes(head[:end]))
    if len(head) > MAX_HEAD:
        raise HeadTooLarge(f"the request head exceeds {MAX_HEAD} bytes")


def check_unfinished_answer(head: bytes | bytearray, checked: int, *, may_switch: bool = False) -> None:
    """The same for an answer. Raises BadResponse."""
    if _DOUBT.search(head, max(0, checked - 1)):
        raise BadResponse("a control character or a bare line end in the head")
    if not b"HTTP/1.".startswith(bytes(head[:7])):
        raise BadResponse("no HTTP/1.x answer")
    end = head.find(b"\r\n")
    if end >= 0 and checked < end + 2:
        read_status_line(bytes(head[:end]), may_switch=may_switch)
    if len(head) > MAX_ANSWER_HEAD:
        raise BadResponse(f"the head exceeds {MAX_ANSWER_HEAD} bytes")


def read_status_line(line: bytes, *, may_switch: bool = False) -> tuple[int, bool]:
    """(status, whether it is HTTP/1.1). Raises BadResponse; also for 101, unless it was asked for.

    >>> read_status_line(b"HTTP/1.1 200 OK"), read_status_line(b"HTTP/1.0 404")
    ((200, True), (404, False))
    """
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise BadResponse("malformed status line")
    status = int(match[2])
    if not 100 <= status <= 599:
        raise BadResponse(f"status {status} is out of range")
    if status == 101 and not may_switch:
        raise BadResponse("the backend wants to switch protocols")
    return status, match[1] == b"1"


class _Lines:
    """Collects the fields of one head; it knows of no parser, so the two make no reference cycle."""

    __slots__ = ("done", "fields")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.done = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.rstrip(b" \t")))  # llhttp strips the left side only

    def on_headers_complete(self) -> None:
        self.done = True


def read_fields(head: bytes, parser: type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser]) -> Fields:
    """The fields of a whole head, as llhttp (strict) reads them. Raises httptools.HttpParserError.

    An Upgrade field changes nothing: what llhttp would then leave to another protocol is never fed to it.
    """
    lines = _Lines()
    with contextlib.suppress(httptools.HttpParserUpgrade):
        parser(lines).feed_data(head)
    if not lines.done:
        raise httptools.HttpParserError("the head does not end where it seems to")
    return lines.fields


def check_fields(fields: Fields, *, method: bytes, v11: bool) -> Framing:
    """The framing of a request. Raises BadRequest for any ambiguity, HeadTooLarge, ExpectationFailed.

    >>> check_fields([(b"host", b"h"), (b"content-length", b"2")], method=b"POST", v11=True).length
    2
    >>> both = [(b"host", b"h"), (b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    >>> check_fields(both, method=b"POST", v11=True)
    Traceback (most recent call last):
    hive.errors.BadRequest: both Content-Length and Transfer-Encoding
    """
    if len(fields) > MAX_FIELDS:
        raise HeadTooLarge(f"more than {MAX_FIELDS} fields")
    length: bytes | None = None
    coding: bytes | None = None
    host: bytes | None = None
    connection: list[bytes] = []
    expects = False
    for name, value in fields:
        if _UNDERSCORE in name:
            raise BadRequest("a field name with an underscore")
        if name not in _FRAMES:
            continue
        if name == b"content-length":
            if length is not None:
                raise BadRequest("more than one Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if coding is not None:
                raise BadRequest("more than one Transfer-Encoding")
            coding = value
        elif name == b"host":
            if host is not None:
                raise BadRequest("more than one Host field")
            host = value
        elif name == b"connection":
            connection += tokens_of(value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise ExpectationFailed
            expects = v11
    if host is None:
        if v11:
            raise BadRequest("a Host field is needed")
    elif _HOST.fullmatch(host) is None:
        raise BadRequest("Host is not a name and port")
    keep_alive = _keeps(connection, v11=v11)
    if coding is not None:
        if length is not None:
            raise BadRequest("both Content-Length and Transfer-Encoding")
        if not v11 or coding.lower() != b"chunked":
            raise BadRequest("the only transfer coding is chunked, in HTTP/1.1")
        if method in WITHOUT_BODY:
            raise BadRequest(f"{method.decode()} takes no body")
        return Framing(None, True, keep_alive, expects)
    return Framing(plain_number(length) if length is not None else 0, False, keep_alive, expects)


def check_answer_fields(fields: Fields, *, status: int, v11: bool, bodiless: bool) -> Framing:
    """The framing of an answer; `bodiless` if it answers HEAD. Raises BadResponse for any ambiguity.

    >>> check_answer_fields([], status=200, v11=True, bodiless=False)    # ends with the connection
    Framing(length=None, chunked=False, keep_alive=False, expects=False)
    """
    if len(fields) > MAX_FIELDS:
        raise BadResponse(f"more than {MAX_FIELDS} fields")
    length: int | None = None
    chunked = False
    connection: list[bytes] = []
    for name, value in fields:
        if name == b"content-length":
            if length is not None:
                raise BadResponse("more than one Content-Length")
            try:
                length = plain_number(value)
            except BadRequest as error:
                raise BadResponse(error.message) from None
        elif name == b"transfer-encoding":
            if chunked:
                raise BadResponse("more than one Transfer-Encoding")
            chunked = True
            if value.lower() != b"chunked" or not v11:
                raise BadResponse("the only transfer coding is chunked, in HTTP/1.1")
        elif name == b"connection":
            connection += tokens_of(value)
    if chunked and length is not None:
        raise BadResponse("both Content-Length and Transfer-Encoding")
    keep_alive = _keeps(connection, v11=v11)
    if status == 204 and (chunked or length):
        raise BadResponse("an answer 204 with a body")
    if status in (204, 304):
        return Framing(0, False, keep_alive)
    ends_with_connection = length is None and not chunked and not bodiless
    return Framing(length, chunked, keep_alive and not ends_with_connection)


def plain_number(value: bytes) -> int:
    """A Content-Length: digits without sign, space or leading zero. Raises BadRequest.

    >>> plain_number(b"10")
    10
    """
    if not is_plain_number(value):
        raise BadRequest("Content-Length is not a plain number")
    return int(value)


def is_plain_number(value: bytes) -> bool:
    """Digits without sign, space or leading zero, at most 18.

    >>> [is_plain_number(value) for value in (b"10", b"0", b"010", b"+1", b"")]
    [True, True, False, False, False]
    """
    return value.isdigit() and len(value) <= 18 and (value[0] != 48 or len(value) == 1)


def without_length(fields: Fields) -> Fields:
    """The fields but Content-Length: what it says is in the framing.

    >>> without_length([(b"host", b"h"), (b"content-length", b"2")])
    [(b'host', b'h')]
    """
    return [field for field in fields if field[0] != b"content-length"]


def named_by_connection(fields: Fields) -> frozenset[bytes]:
    """The fields that Connection says end here (RFC 9110 §7.6.1), but never those that frame or authorise.

    >>> sorted(named_by_connection([(b"connection", b"close, X-Tenant-ID, Host"), (b"host", b"h")]))
    [b'close', b'x-tenant-id']
    """
    named = [token for name, value in fields if name == b"connection" for token in tokens_of(value)]
    return frozenset(named) - _PROTECTED


def tokens_of(value: bytes) -> list[bytes]:
    """The words of a list field, in lower case.

    >>> tokens_of(b"keep-alive, Upgrade")
    [b'keep-alive', b'upgrade']
    """
    return [token.strip(b" \t") for token in value.lower().split(b",")]


def _keeps(connection: list[bytes], *, v11: bool) -> bool:
    return b"close" not in connection and (v11 or b"keep-alive" in connection)
