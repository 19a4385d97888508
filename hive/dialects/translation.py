"""The parts of a translation between two dialects: the way there and the way back of one request, sans I/O.

Used if the backend does not speak the client's dialect. The way there is used once, with the whole body; the way back
piece by piece, as the backend's answer comes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from hive.dialects.errors import GaveUp


class Sent(msgspec.Struct, frozen=True):
    """A request as the backend takes it.

    `target`: the path it goes to. `dropped`: fields of the client's that have no place there and change no answer, to
    be told in X-Hive-Dropped; `clamped`: fields with a smaller value there, as `name=value`. `kept`: JSON, the facts
    about the request that the way back needs; it may cross a process.
    """

    target: str
    body: bytes
    dropped: tuple[str, ...] = ()
    kept: bytes = b"{}"
    clamped: tuple[str, ...] = ()


class FieldFate(StrEnum):
    """The fate of a field of the client's request: `MAPPED` to one of the backend's; `REFUSED`, as the answer would be
    another without it; `HARMLESS`, left out and told."""

    MAPPED = "mapped"
    REFUSED = "refused"
    HARMLESS = "harmless"


class FieldRow(msgspec.Struct, frozen=True):
    """`to`: the backend's field, with dots into objects. `why`: of one that is refused or left out."""

    fate: FieldFate
    to: str = ""
    why: str = ""


class WayBack(Protocol):
    """An answer of the backend as the client's dialect has it. `feed` and `end` for a stream, `whole` for one piece.

    Every result of `feed` and `end` is whole events (lines) of the client's dialect, however the bytes were split.
    """

    @property
    def content_type(self) -> bytes: ...

    @property
    def gave_up(self) -> GaveUp | None:
        """The reason why there will be no end: the backend said that it gave up, or its answer cannot be translated.
        Nothing follows what `feed` and `end` gave until then, and the error itself is not among it."""

    def feed(self, data: bytes) -> bytes:
        """Bytes of the backend's stream, split anywhere; nothing is held back longer than its event lasts."""

    def end(self) -> bytes:
        """The backend's stream has ended. Makes no end marker of its own: a stream without one stays without one."""

    def whole(self, body: bytes) -> bytes:
        """The one-piece answer to a request that wanted no stream. Raises BackendDown for what is none."""

    def error(self, status: int, body: bytes) -> bytes:
        """The backend's own error body, its words kept, as the client's dialect has errors."""

    def as_event(self, told: bytes) -> bytes:
        """An error's body of the client's dialect, which is one line, as the last of this stream."""


class TranslatedEndpoint(Protocol):
    """One endpoint of the client's dialect."""

    @property
    def rows(self) -> dict[str, FieldRow]:
        """Every field a body may have, by its name, with dots into objects."""

    def there(self, body: bytes) -> Sent:
        """The request in the backend's dialect. Raises BadRequest, NotSupported for what cannot be said there."""

    def back(self, kept: bytes, *, stream: bool, request_id: str = "") -> WayBack:
        """`request_id`: Hive's own, for dialects whose answers and errors name one."""
