"""Reads a form with a file while it comes in: text is kept here, bounded, and the file handed on. Pure.

The `multipart` package finds the parts. It holds no more than a piece of what it was fed; what is counted here is what
a client can make it do: parts, headers, names, text.
"""

from __future__ import annotations

from collections.abc import Callable

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser
from multipart import parse_options_header as options_of

from hive.bodies.form import FILE
from hive.bodies.json_object import shown
from hive.errors import BadRequest, TooLarge, WrongMediaType

TYPE = b"multipart/form-data"
MOST_BOUNDARY = 200
"""Bytes; RFC 2046 has 70, and clients have been longer."""
MOST_PARTS = 64
"""OpenAI's own form has 14 fields, some of them lists."""
MOST_HEADERS = 8
MOST_HEADER = 2048
"""Bytes of one header line of a part."""
MOST_NAME = 200
"""Characters of a field's name."""
MOST_TEXT = 64 * 1024
"""Bytes of all text fields together."""
_HINT = "send it as a form: curl -F model=NAME -F file=@speech.wav …, or client.audio.transcriptions.create(…)"


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a Content-Type names. Raises WrongMediaType, BadRequest.

    >>> boundary_of(b'multipart/form-data; charset=x; boundary="a b"')
    b'a b'
    >>> boundary_of(b"application/json")
    Traceback (most recent call last):
    hive.errors.WrongMediaType: the body must be multipart/form-data with a file; this one is application/json
    """
    kind, options = options_of(content_type.decode("latin-1"))
    if kind != TYPE.decode():
        told = f"this one is {shown(kind)}" if kind else "this one names no type"
        raise WrongMediaType(f"the body must be multipart/form-data with a file; {told}", hint=_HINT)
    boundary: bytes = options.get("boundary", "").encode("latin-1")
    if not boundary or len(boundary) > MOST_BOUNDARY or boundary.strip(b" ") != boundary or not _is_plain(boundary):
        raise BadRequest("the Content-Type of a form needs a boundary of at most 200 printable characters")
    return boundary


def _is_plain(boundary: bytes) -> bool:
    return all(0x20 <= byte < 0x7F for byte in boundary)


class _PartsParser(PushMultipartParser):  # type: ignore[misc] # the package has no types
    """Refuses a line feed within the head of a part, wherever the form was cut.

    The package (2.0.1) does where no CRLF has come behind it yet; else it takes it for a space around a header's name.
    """

    def _on_segment_headerline(self, line: bytes) -> None:
        if b"\n" in line:
            raise MultipartError("Invalid line break in segment header")
        super()._on_segment_headerline(line)


class FormReader:
    """One form. `feed` takes it in pieces, and gives the file's bytes to `write` as they come; `end` says it is over.

    >>> got = []
    >>> reader = FormReader(b"x", got.append)
    >>> reader.feed(b'--x\\r\\nContent-Disposition: form-data; name="model"\\r\\n\\r\\ntiny\\r\\n--x\\r\\n')
    >>> reader.feed(b'Content-Disposition: form-data; name="file"; filename="a"\\r\\n\\r\\nRIFF\\r\\n--x--\\r\\n')
    >>> reader.end(); reader.fields, b"".join(got)
    ([('model', b'tiny')], b'RIFF')
    """

    __slots__ = (
        "_begins",
        "_has_file",
        "_head",
        "_is_file",
        "_name",
        "_parser",
        "_text",
        "_text_bytes",
        "_write",
        "fields",
    )

    def __init__(self, boundary: bytes, write: Callable[[bytes], None]) -> None:
        self._parser = _PartsParser(
            boundary,
            max_header_size=MOST_HEADER,
            max_header_count=MOST_HEADERS,
            max_segment_count=MOST_PARTS,
        )
        self._begins = b"--" + boundary
        self._head: bytes | None = b""
        """Its first bytes, until they are as many as its beginning has."""
        self._write = write
        self.fields: list[tuple[str, bytes]] = []
        """The text fields, in the order in which they came."""
        self._name: str | None = None
        """Of the part that is coming in; None between two of them."""
        self._is_file = self._has_file = False
        self._text: list[bytes] = []
        self._text_bytes = 0

    def __repr__(self) -> str:
        return f"<FormReader {len(self.fields)} fields, {'a' if self._has_file else 'no'} file>"

    def feed(self, data: bytes) -> None:
        """Reads on. Raises BadRequest, TooLarge, and what `write` raises."""
        if self._head is not None:
            data = self._head + data
            self._head = data if len(data) < len(self._begins) else None
            if not data.startswith(self._begins[: len(data)]):  # RFC 2046 lets a text come first; no client sends one
                raise BadRequest("the form does not begin with the boundary that its Content-Type names")
            if self._head is not None:
                return
        try:
            for event in self._parser.parse(data):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event:
                    self._go_on(bytes(event))
                else:
                    self._end_part()
        except ParserLimitReached as error:
            raise TooLarge(f"the form has too much in it: {error}") from None
        except MultipartError as error:
            raise BadRequest(f"the form cannot be read: {error}") from None

    def _begin(self, part: MultipartSegment) -> None:
        name = self._name = part.name or ""
        if not name or len(name) > MOST_NAME:
            raise BadRequest(f"a part of the form has no name, or one of more than {MOST_NAME} characters")
        if any("\n" in value or "\r" in value for _, value in part.headerlist):
            raise BadRequest(f'"{shown(name)}" has a line end within a header')
        if part.content_type is not None and part.content_type.startswith("multipart/"):
            raise BadRequest(f'"{shown(name)}" is a form within the form')
        if part.header("Content-Transfer-Encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
            raise BadRequest(f'"{shown(name)}" is encoded; send it as it is')
        self._is_file = name.casefold() == FILE
        if not self._is_file:
            if part.filename is not None:
                raise BadRequest(f'"{shown(name)}" is a file: one is taken, as "{FILE}"')
            return
        if self._has_file:
            raise BadRequest(f'the form has "{FILE}" more than once; one is taken')
        if part.filename is None:  # `filename*` alone says nothing in a form (RFC 7578 4.2)
            raise BadRequest(f'"{FILE}" is a text: send a file, with a filename; filename* is not read', hint=_HINT)
        self._has_file = True

    def _go_on(self, data: bytes) -> None:
        if self._is_file:
            self._write(data)
            return
        self._text_bytes += len(data)
        if self._text_bytes > MOST_TEXT:
            raise TooLarge(f"the text fields of the form are longer than {MOST_TEXT} bytes together")
        self._text.append(data)

    def _end_part(self) -> None:
        if not self._is_file:
            assert self._name is not None
            self.fields.append((self._name, b"".join(self._text)))
            self._text = []
        self._name, self._is_file = None, False

    def end(self) -> None:
        """Checks that the form is whole. Raises BadRequest."""
        try:
            self._parser.close()
        except MultipartError:
            raise BadRequest("the form ends before its last boundary") from None
        if not self._has_file:
            raise BadRequest(f'"{FILE}" is missing', hint=_HINT)
