"""Form of a call (multipart/form-data): text fields, then one file, as Hive's proxy writes it. Standard library only.

The proxy has judged the client's form and written another one in its place, so that this reader is small and strict:
what it does not expect is refused.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import BinaryIO, Protocol

from hive.runner.faults import EngineFault

MOST_FIELDS = 64
MOST_FIELD_BYTES = 64 << 10
MOST_PART_HEAD_BYTES = 4 << 10
PIECE_BYTES = 256 << 10

_BOUNDARY = re.compile(r'boundary="?([0-9A-Za-z\'()+_,./:=?-]{1,70})"?\s*(?:;|$)')
_NAME = re.compile(r'[;\s]name="([^"\r\n]{1,128})"', re.IGNORECASE)
_FILE_NAME = re.compile(r"[;\s]filename\*?=", re.IGNORECASE)


class BodyReader(Protocol):
    """The body of a call, that is read once and in order; no read goes beyond its end."""

    def line(self, most: int) -> bytes:
        """The next line with its end, at most `most` bytes of it; empty at the end of the body."""
        ...

    def some(self, most: int) -> bytes:
        """Some of what comes next; empty at the end of the body."""
        ...


class SentForm:
    """The fields of a form, in their order, and its file: an open one without a name, None where there is none."""

    def __init__(self, fields: list[tuple[str, str]], file: BinaryIO | None, file_bytes: int) -> None:
        self.fields, self.file, self.file_bytes = fields, file, file_bytes

    def __repr__(self) -> str:
        return f"<SentForm {[name for name, _ in self.fields]}, file of {self.file_bytes} bytes>"

    def one(self, name: str) -> str | None:
        """The value of a field; None where it is not there. Raises EngineFault where it is there twice."""
        values = self.all(name)
        if len(values) > 1:
            raise EngineFault(
                400, f"{name} is there {len(values)} times, and may be there once", "bad_request", param=name
            )
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        """All the values of a field, by its name or by that with brackets (`name[]`)."""
        return [value for each, value in self.fields if each in (name, f"{name}[]")]

    def close(self) -> None:
        """Lets the file go."""
        if self.file is not None:
            self.file.close()


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content type names. Raises EngineFault where it names none.

    >>> boundary_of('multipart/form-data; boundary="x-1"')
    b'x-1'
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise EngineFault(415, "the body has to be multipart/form-data with a boundary", "unsupported_media_type")
    return found[1].encode("ascii")


def read_form(body: BodyReader, content_type: str, directory: str | None = None) -> SentForm:
    """Reads a form. Its file goes to an unlinked one in `directory` (the system's for temporary files if None).

    Raises EngineFault for what is no such form: 400, 413 for too many or too large fields, 415 for another type.
    """
    mark = b"--" + boundary_of(content_type)
    if body.line(len(mark) + 2) != mark + b"\r\n":
        raise _broken("it does not begin with its boundary")
    fields: list[tuple[str, str]] = []
    while True:
        name, is_file = _part_head(body)
        if is_file:
            if name != "file":
                raise EngineFault(400, f"the file's field is named `file`, not {name!r}", "bad_request", param=name)
            return _with_file(body, mark, fields, directory)
        value, is_last = _text(body, mark, name)
        fields.append((name, value))
        if len(fields) > MOST_FIELDS:
            raise EngineFault(413, f"the form has more than {MOST_FIELDS} fields", "too_large")
        if is_last:
            return SentForm(fields, None, 0)


def _part_head(body: BodyReader) -> tuple[str, bool]:
    """Name of a part, and whether it is a file."""
    name, is_file, size = "", False, 0
    while (line := body.line(MOST_PART_HEAD_BYTES)) != b"\r\n":
        size += len(line)
        if not line.endswith(b"\r\n") or size > MOST_PART_HEAD_BYTES:
            raise _broken("a part's head does not end")
        key, _, value = line.decode("utf-8", "replace").partition(":")
        if key.strip().lower() == "content-disposition":
            found = _NAME.search(value)
            name, is_file = found[1] if found else "", _FILE_NAME.search(value) is not None
    if not name:
        raise _broken("a part has no name")
    return name, is_file


def _text(body: BodyReader, mark: bytes, name: str) -> tuple[str, bool]:
    """Value of a text field, and whether the form ends behind it."""
    value = bytearray()
    while True:
        line = body.line(MOST_FIELD_BYTES)
        if not line:
            raise _broken("it ends within a field")
        if value.endswith(b"\r\n") and line.startswith(mark):
            ends = line[len(mark) :]
            if ends in (b"\r\n", b"--\r\n", b"--"):
                return _decoded(bytes(value.removesuffix(b"\r\n")), name), ends != b"\r\n"
        value += line
        if len(value) > MOST_FIELD_BYTES:
            raise EngineFault(413, f"{name} has more than {MOST_FIELD_BYTES} bytes", "too_large", param=name)


def _decoded(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise EngineFault(400, f"{name} is not UTF-8", "bad_request", param=name) from None


def _with_file(body: BodyReader, mark: bytes, fields: list[tuple[str, str]], directory: str | None) -> SentForm:
    """The form with what is left of its body as its file, which is the last part."""
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - the form's owner closes it
    try:
        size = 0
        while piece := body.some(PIECE_BYTES):
            file.write(piece)
            size += len(piece)
        end = b"\r\n" + mark + b"--"
        file.seek(max(0, size - len(end) - 2))
        tail = file.read()
        if not tail.removesuffix(b"\r\n").endswith(end):
            raise _broken("it does not end with its boundary behind the file, which is its last part")
        size -= len(end) + (2 if tail.endswith(b"\r\n") else 0)
        os.truncate(file.fileno(), size)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return SentForm(fields, file, size)


def _broken(why: str) -> EngineFault:
    return EngineFault(400, f"the form cannot be read: {why}", "bad_request")
