"""One HTTP/1.1 request and its answer as bytes, without a connection: llhttp. Pure.

A command of a person begins with it (client/client.py), so it imports little: http.client was a seventh of that.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

HEAD_MAX_BYTES = 64 * 1024


class CallFailed(Exception):
    """No whole answer came, although there was a connection."""


class HungUp(CallFailed):
    """The connection ended before the answer did."""


class NotHttp(CallFailed):
    """The bytes that came are no HTTP. `begin`: the first of the last ones."""

    def __init__(self, why: str, begin: bytes) -> None:
        super().__init__(why)
        self.begin = begin


class AnswerTooLarge(CallFailed):
    """The answer has more bytes than the caller takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer is larger than {limit} bytes")


def encode_request(method: str, target: str, fields: Mapping[str, str], body: bytes | None = None) -> bytes:
    """The bytes of a request: `fields` as they are, and the length of `body`, where it has one. Never chunked.

    >>> encode_request("GET", "/", {"Host": "localhost"})
    b'GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'
    >>> encode_request("PUT", "/vm", {"Host": "localhost"}, b"{}")
    b'PUT /vm HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 2\\r\\n\\r\\n{}'
    """
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "\r\n"]).encode() + (body or b"")


class HttpAnswer:
    """One answer, as it comes. `headed`: its head is whole; `complete`: its body is, too.

    >>> answer = HttpAnswer()
    >>> answer.feed(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\n\\r\\nab")
    >>> answer.status, answer.complete, answer.take()
    (200, False, b'ab')
    >>> answer.feed(b"cd")
    >>> answer.complete, answer.take()
    (True, b'cd')
    """

    def __init__(self) -> None:
        self.headed = False
        self.complete = False
        self.declared: int | None = None
        """Bytes of its body, as its head says."""
        self.fields: dict[str, str] = {}
        """The fields of its head, with their names in lower case; of one that is repeated all its values."""
        self._is_chunked = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection, or none at its end. Raises HungUp, NotHttp, AnswerTooLarge.

        A body without a length goes to the end of the connection. Bytes behind the answer are ignored.
        """
        if self.complete:
            return
        if not data:
            if not self.headed or self.declared is not None or self._is_chunked:
                raise HungUp("the connection ended before the answer did")
            self.complete = True
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.complete = True
        except httptools.HttpParserError as error:
            if not self.complete:
                raise NotHttp(str(error), data[:40]) from None
        if not self.headed:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                raise AnswerTooLarge(HEAD_MAX_BYTES)

    def take(self) -> bytes:
        """The part of the body that came since the last time."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.headed:
            return  # a trailer: nobody asks for one, and there is no bound on them
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.fields[key] = f"{self.fields[key]}, {text}" if key in self.fields else text

    def on_headers_complete(self) -> None:
        self.headed = True
        self.declared = int(self.fields["content-length"]) if "content-length" in self.fields else None
        self._is_chunked = "transfer-encoding" in self.fields

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
