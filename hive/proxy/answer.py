"""The way back: the backend's answer to the client, its head rebuilt, its body as it comes, its end made sure of.

A copy of every byte is metered, in the backend's dialect; where that is not the client's it is translated, and where
Hive asked for the usage in the client's stead, that is taken out again. Nothing is held back but the head (until the
first byte of the body), answers small enough to be described in their head, lists that are filtered, and one-piece
answers that are translated. What began as a stream and cannot end well ends with an error in the stream's own dialect
and without the end its framing demands, so that no client takes it for whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from hive.dialects.errors import as_event, heartbeat, render_in_stream
from hive.dialects.ollama_lists import without_paths
from hive.dialects.renaming import Renamer
from hive.dialects.sse import UsageStripper
from hive.dialects.translation import WayBack
from hive.dialects.ways import way_of
from hive.domain import Caller, Dialect
from hive.errors import BackendDown, HiveError
from hive.proxy import lists
from hive.proxy.body import Asked
from hive.proxy.endpoints import Endpoint, find
from hive.proxy.metering import MAX_WHOLE, Reading, SseReading, WholeReading, reading_for
from hive.wire.connection import Connection
from hive.wire.http1 import LAST_CHUNK, Request, Response, as_chunk, head_start

RELAYED = frozenset(
    {b"content-type", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry", b"request-id"}
)
"""Fields of the backend's answer that reach the client; the head is rebuilt from these."""
MAX_TRANSLATED = 16 * 1024 * 1024
"""Bytes of a one-piece answer that is held to be translated: 600 vectors of 2,000 numbers."""
_END_MARKER = re.compile(rb"^(?:data: ?\[DONE\]|event: ?message_stop)", re.MULTILINE)
_STREAM_TYPE = {Dialect.OLLAMA: b"application/x-ndjson"}


class Answer:
    """One answer. `begun`: bytes of it have gone out, so its status stands and errors can only follow in the stream.

    `reading` meters it; None until the backend's head is there. `status` is the backend's, 0 before. `asked`: the body
    that is answered; it may still change before that head, where another backend takes over.
    """

    __slots__ = (
        "_aliases",
        "_back",
        "_caller",
        "_chunked",
        "_connection",
        "_endpoint",
        "_filtered",
        "_head",
        "_held",
        "_hidden",
        "_is_framed",
        "_late_error",
        "_renamer",
        "_request",
        "_request_id",
        "_streams",
        "_stripper",
        "asked",
        "begun",
        "reading",
        "status",
    )

    def __init__(
        self,
        connection: Connection,
        request: Request,
        endpoint: Endpoint,
        asked: Asked | None,
        caller: Caller,
        request_id: str,
        aliases: Sequence[tuple[str, str]] = (),
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """`aliases`: put into the backend's list of models, each with the one it stands for; `hidden`: left out."""
        self._connection = connection
        self._request = request
        self._endpoint = endpoint
        self.asked = asked
        self._caller = caller
        self._request_id = request_id
        self._aliases = aliases
        self._hidden = hidden
        self._chunked = self._late_error = self._filtered = False
        self._is_framed = True
        self._head = b""
        self._held: list[bytes] | None = None
        self._stripper: UsageStripper | None = None
        self._back: WayBack | None = None
        self._renamer: Renamer | None = None
        self._streams = False
        self.begun = False
        self.reading: Reading | None = None
        self.status = 0

    def __repr__(self) -> str:
        return f"<Answer {self.status} {'begun' if self.begun else 'not begun'}>"

    def take_head(self, head: Response, own_fields: bytes) -> None:
        """Rebuilds the head; it goes out together with the first bytes of the body."""
        request = self._request
        self.status = status = head.status
        content_type = b""
        fields = [head_start(status)]
        asked = self.asked
        is_translated = asked is not None and bool(asked.target)
        for name, value in head.fields:
            if name == b"content-type":
                content_type = value
                if is_translated:
                    continue
            if name in RELAYED:
                fields.append(b"%b: %b\r\n" % (name, value))
        stream = asked is not None and asked.stream
        answering = find(b"POST", asked.target.encode()) if asked is not None and is_translated else self._endpoint
        reading = self.reading = reading_for(answering, stream=stream, content_type=content_type)
        self._streams = not isinstance(reading, WholeReading)
        if asked is not None and is_translated:
            self._back = way_of(self._endpoint.name).back(asked.kept, stream=self._streams)
            kind = self._back.content_type if self._streams else b"application/json"
            fields.append(b"content-type: %b\r\n" % kind)
        if asked is not None and asked.usage_added and isinstance(reading, SseReading):
            self._stripper = UsageStripper()
        if asked is not None and asked.served and self._back is None:  # a translation knows the name that was asked for
            self._renamer = Renamer(asked.served, asked.model)
        if self.begun:  # a heartbeat opened it with 200: an error can only be an event of that stream
            self._late_error = isinstance(reading, WholeReading)
            self._held = [] if self._late_error else None
            return
        fields.append(own_fields)
        if status == 200 and self._is_of_models:
            self._held = []
            self._filtered = True
        elif not self._streams and self._is_remade:
            self._held = []
        elif head.content_length is not None and self._stripper is None and not self._is_remade:  # its own length
            fields.append(b"content-length: %d\r\n" % head.content_length)
            if not stream and head.content_length <= MAX_WHOLE:
                self._held = []  # small enough to say in the head what the end tells
        elif request.method == b"HEAD":
            pass
        elif request.chunks:
            self._chunked = True
            fields.append(b"transfer-encoding: chunked\r\n")
            if stream:
                fields.append(b"x-accel-buffering: no\r\n")
        else:
            self._is_framed = request.keep_alive = False
        if not request.keep_alive:
            fields.append(b"connection: close\r\n")
        self._head = b"".join(fields)

    def meter(self, data: bytes) -> bytes:
        """Reads a copy; gives what of it is the client's."""
        assert self.reading is not None
        self.reading.feed(data)
        if self._back is not None and self._streams:
            return self._back.feed(data)
        if self._stripper is not None:
            data = self._stripper.feed(data)
        return data if self._renamer is None else self._renamer.feed(data)

    def end(self) -> bytes:
        """The backend's bytes have ended, well or not: the reading is closed, what was held back is the client's."""
        if self.reading is not None:
            self.reading.end()
        if self._back is not None and self._streams:
            return self._back.end()
        rest = b"" if self._stripper is None else self._stripper.end()
        return rest if self._renamer is None else self._renamer.feed(rest) + self._renamer.end()

    @property
    def _is_remade(self) -> bool:
        """Whether the body is translated or names another model, so that its length is not the backend's."""
        return self._back is not None or self._renamer is not None

    @property
    def whole(self) -> bool:
        """Whether what came is a complete answer (asked after `end`)."""
        return self.reading is not None and not self._late_error and (self.reading.whole or self.status >= 400)

    def relay(self, data: bytes) -> None:
        """Bytes that are not the last ones."""
        held = self._held
        if held is None:
            if data or self._head:
                self._write(data)
            return
        held.append(data)
        is_large = self._is_remade or self._endpoint.target == lists.SHOW
        most = MAX_TRANSLATED if is_large else MAX_WHOLE
        if sum(map(len, held)) > most:  # only where the length was not told
            held.clear()
            raise BackendDown(f"the backend's answer is longer than {most} bytes")

    def prepare(self, data: bytes) -> bytes:
        """The last bytes, with what was held before them. Raises BackendDown for a list or an answer that is none."""
        if self._held is None:
            return data
        if self._held:
            self._held.append(data)
            data = b"".join(self._held)
        if self._filtered:
            data = self._told_of_models(data)
        elif self._back is not None:
            data = self._back.whole(data) if self.status < 400 else self._back.error(self.status, data)
        if self._filtered or self._is_remade:
            self._head += b"content-length: %d\r\n" % len(data)
        self._head += self._cache_fields()
        return data

    @property
    def _is_of_models(self) -> bool:
        """Whether it tells of models, and not all of that is this caller's to know."""
        target = self._endpoint.target
        is_partial = self._aliases or self._hidden or lists.is_filtered(target, self._caller)
        return target == lists.SHOW or bool(is_partial)

    def _told_of_models(self, data: bytes) -> bytes:
        if self._endpoint.target == lists.SHOW:
            return without_paths(data)
        return lists.filtered(data, self._caller, self._aliases, self._hidden)

    def finish(self, data: bytes) -> None:
        """Writes what `prepare` gave, and the end of the framing."""
        if self._chunked:
            data = (as_chunk(data) if data else b"") + LAST_CHUNK
            self._chunked = False
        self._write(data)

    @property
    def can_beat(self) -> bool:
        """Whether a sign of life may go out now: before the backend's head, then between events of its stream."""
        return self.reading is None or (self._chunked and self._held is None and self._is_between_events())

    def beat(self, own_fields: bytes) -> None:
        """A sign of life for who waits for a stream; the first one commits the answer to status 200."""
        assert self.asked is not None
        sign = heartbeat(self._endpoint.dialect, self._endpoint.target, self.asked.model)
        if not self.begun and self.reading is None:
            kind = _STREAM_TYPE.get(self._endpoint.dialect, b"text/event-stream")
            closing = b"" if self._request.keep_alive else b"connection: close\r\n"
            self._head = b"%bcontent-type: %b\r\n%btransfer-encoding: chunked\r\nx-accel-buffering: no\r\n%b" % (
                head_start(200),
                kind,
                own_fields,
                closing,
            )
            self._chunked = True
        self._write(sign)

    def last_words(self, error: HiveError) -> bytes:
        """What a begun stream still says before it is cut: the error, where it would be an event of its own.

        Empty where only the cut can tell: an answer of known length, or bytes that stop inside an event.
        """
        dialect = self._endpoint.dialect
        if (self._is_framed and not self._chunked) or self._request.method == b"HEAD" or not self._is_between_events():
            return b""
        told = b"".join(self._held or []) if self._late_error else b""
        told = _one_line(told if self._back is None else self._back.error(self.status, told)) if told else b""
        event = as_event(told, dialect) if told else render_in_stream(error, dialect, self._request_id)
        return as_chunk(event) if self._chunked else event

    def _is_between_events(self) -> bool:
        """Whether the client has whole events only. What a stripper or a translation holds back it has not."""
        if self._back is not None:
            return self._streams
        if self._renamer is not None and not self._renamer.at_boundary:
            return False
        if self._stripper is not None:
            return self._stripper.at_boundary
        return self.reading is None or self._late_error or self.reading.at_boundary

    def _write(self, data: bytes) -> None:
        if data:
            if self._request.method == b"HEAD":
                data = b""
            elif self._chunked:
                data = as_chunk(data)
        if self._head:
            data = self._head + b"\r\n" + data
            self._head = b""
        if data:
            self.begun = True
            self._connection.write(data)

    def _cache_fields(self) -> bytes:
        cached = self.reading.usage.cached_tokens if self.reading is not None else None
        if cached is None:
            return b""
        hit = b"true" if cached else b"false"
        return b"x-cache-hit: %b\r\nx-cache-tokens-reused: %d\r\n" % (hit, cached)


def without_end_marker(data: bytes) -> bytes:
    """Bytes of a stream up to OpenAI's or Anthropic's end of it: what gave up must not be taken for what ended.

    >>> without_end_marker(b'data: {"error":{}}\\n\\ndata: [DONE]\\n\\n')
    b'data: {"error":{}}\\n\\n'
    """
    end = _END_MARKER.search(data)
    return data if end is None else data[: end.start()]


def _one_line(body: bytes) -> bytes:
    """A JSON body as one line; empty where it is no JSON."""
    try:
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return b""
