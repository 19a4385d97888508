"""The way back: the backend's answer to the client, with its head rebuilt, its body as it comes, and its end checked.

A copy of every byte is metered, in the backend's dialect. If the client's dialect is another, the answer is translated.
If Hive asked for the usage in the client's stead, that is taken out again. Of a stream only the head is held back,
until the first byte of the body; Hive frames it, so that only Hive ends it. An answer in one piece is held until it is
whole, up to 1 MiB (16 MiB if it is translated). An answer that has begun and cannot end well ends with an error in the
stream's own dialect and without the end its framing demands, so that no client takes it for whole. One that has not
begun becomes an error with the backend's own words and status.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from hive.bodies.body import Asked
from hive.dialects.errors import GaveUp, as_event, as_response_error, heartbeat, render, without_host_paths
from hive.dialects.foreign_errors import is_in_a_dialect, told_of
from hive.dialects.ollama_lists import without_paths
from hive.dialects.renaming import Renamer
from hive.dialects.sse import UsageStripper
from hive.dialects.translation import WayBack
from hive.dialects.translators import RESPONSES, way_of
from hive.domain import Caller, Dialect
from hive.endpoints import lists
from hive.endpoints.endpoints import Endpoint, Meter, find
from hive.errors import BackendDown, BackendGaveUp, HiveError, StreamIncomplete
from hive.metering.metering import MAX_WHOLE, AnswerReading, SseReading, WholeReading, reading_for
from hive.metering.runner_answers import COST_FIELD, ToldWork, reading_of_runner, told_work
from hive.wire.connection import Connection
from hive.wire.http1 import LAST_CHUNK, Request, Response, as_chunk, head_start

if TYPE_CHECKING:
    from hive.dialects.openai_responses_answers import ResponseBack

RELAYED = frozenset(
    {b"content-type", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry", b"request-id"}
)
"""Fields of the backend's answer that reach the client; the head is rebuilt from these."""
NO_REUSE = b"x-cache-hit: false\r\nx-cache-tokens-reused: 0\r\n"
MAX_TRANSLATED = 16 * 1024 * 1024
"""Bytes of a one-piece answer that is held to be translated: 600 vectors of 2,000 numbers."""
_END_MARKER = re.compile(
    rb"(?:\A|(?<=[\r\n]))"
    rb"(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))"
    rb"|data:[^\r\n]*\"(?:message_stop|response\.(?:completed|incomplete|failed))\"|\{[^\r\n]*\"done\" ?: ?true)"
)
_ANTHROPIC, _RUNNER = Dialect.ANTHROPIC, Meter.RUNNER
_STREAM_TYPE = {Dialect.OLLAMA: b"application/x-ndjson"}


class Answer:
    """One answer. `begun`: bytes of it have gone out, so its status stands and errors can only follow in the stream.
    `broken`: the backend has said, in the middle of a stream, that it gave up, or cannot be understood any more.

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
        "_held_bytes",
        "_hidden",
        "_is_framed",
        "_late_error",
        "_renamer",
        "_request",
        "_request_id",
        "_retry_after",
        "_streams",
        "_stripper",
        "asked",
        "begun",
        "broken",
        "reading",
        "status",
        "told_work",
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
        self._head = self._retry_after = b""
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._stripper: UsageStripper | None = None
        self._back: WayBack | None = None
        self._renamer: Renamer | None = None
        self._streams = False
        self.begun = False
        self.broken = False
        self.reading: AnswerReading | None = None
        self.status = 0
        self.told_work: ToldWork | None = None
        """The work that a runner has told in its head."""

    def __repr__(self) -> str:
        return f"<Answer {self.status} {'begun' if self.begun else 'not begun'}>"

    def take_head(self, head: Response, own_fields: bytes) -> None:
        """Rebuilds the head; it goes out together with the first bytes of the body. Raises BackendDown for one that no
        answer to this request can have."""
        request, asked, status = self._request, self.asked, head.status
        content_type = b""
        fields = [head_start(status)]
        is_translated = asked is not None and bool(asked.target)
        tells_own_id = self._endpoint.dialect is _ANTHROPIC
        for name, value in head.fields:
            if name == b"content-type":
                content_type = value
                if is_translated:
                    continue
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                raise BackendDown(
                    f"the backend's answer is encoded ({value.decode('latin-1')[:40]}); nobody asked for it"
                )
            elif name == b"retry-after":
                self._retry_after = value.strip()
            if name in RELAYED and (name != b"request-id" or not tells_own_id):
                fields.append(b"%b: %b\r\n" % (name, value))
        stream = asked is not None and asked.stream
        answering = find(b"POST", asked.target.encode()) if asked is not None and is_translated else self._endpoint
        if answering.meter is _RUNNER:
            told = next((value for name, value in head.fields if name == COST_FIELD), b"")
            self.told_work = told_work(told) if told else None
            reading = reading_of_runner(status=status, stream=stream, content_type=content_type)
        else:
            reading = reading_for(answering, status=status, stream=stream, content_type=content_type)
        self._streams = streams = not isinstance(reading, WholeReading)
        self.reading, self.status = reading, status
        if asked is not None and is_translated:
            self._back = way_of(self._endpoint.name).back(asked.kept, stream=streams, request_id=self._request_id)
            kind = self._back.content_type if streams else b"application/json"
            fields.append(b"content-type: %b\r\n" % kind)
        if asked is not None and asked.usage_added and isinstance(reading, SseReading):
            self._stripper = UsageStripper()
        if asked is not None and asked.sent and self._back is None:  # a translation knows the name that was asked for
            self._renamer = Renamer(asked.sent, asked.model)
        if self.begun:  # a heartbeat opened it with 200: an error can only be an event of that stream
            self._late_error = not streams
            self._held = [] if self._late_error else None
            return
        fields.append(own_fields)
        self._filtered = status == 200 and not self._endpoint.needs_place and self._is_of_models
        if streams:
            self._frame(fields, stream=True)
        elif head.content_length is not None and head.content_length > MAX_WHOLE and not self._may_be_long:
            fields.append(b"content-length: %d\r\n" % head.content_length)
        else:
            self._held = []
        if not request.keep_alive:
            fields.append(b"connection: close\r\n")
        self._head = b"".join(fields)

    @property
    def _may_be_long(self) -> bool:
        """Whether all of an answer in one piece is held, however long it is: it is not sent as it came, since it is
        filtered, translated or names another model."""
        return self._filtered or self._back is not None or self._renamer is not None

    def _frame(self, fields: list[bytes], *, stream: bool) -> None:
        """Frames an answer that has no length for the client: chunked, or ended by the close of the connection."""
        if self._request.chunks:
            self._chunked = True
            fields.append(b"transfer-encoding: chunked\r\n")
            if stream:
                fields.append(b"x-accel-buffering: no\r\n")
        else:
            self._is_framed = self._request.keep_alive = False

    def meter(self, data: bytes) -> bytes:
        """Reads a copy; gives what of it is the client's."""
        reading, back = self.reading, self._back
        assert reading is not None
        reading.feed(data)
        self.broken = reading.gave_up is not None
        if back is not None and self._streams:
            data = back.feed(data)
            self.broken = self.broken or back.gave_up is not None
            return data
        if self._stripper is not None:
            data = self._stripper.feed(data)
        return data if self._renamer is None else self._renamer.feed(data)

    @property
    def has_content(self) -> bool:
        """Whether the first byte of the answer's content has come."""
        return self.reading is not None and self.reading.begun

    def end(self) -> bytes:
        """The backend's bytes have ended, well or not: the reading is closed, what was held back is the client's."""
        if self.reading is not None:
            self.reading.end()
        if self._back is not None and self._streams:
            return self._back.end()
        rest = b"" if self._stripper is None else self._stripper.end()
        return rest if self._renamer is None else self._renamer.feed(rest) + self._renamer.end()

    @property
    def response(self) -> bytes:
        """The whole answer's object, once an answer to `/v1/responses` is complete; else empty."""
        back = self._back
        return b"" if back is None or self._endpoint.name != RESPONSES else cast("ResponseBack", back).kept_response()

    @property
    def whole(self) -> bool:
        """Whether what came is a complete answer (asked after `end`)."""
        reading, back = self.reading, self._back
        if reading is None or self._late_error:
            return False
        return self.status >= 400 or (reading.whole and (back is None or back.gave_up is None))

    def told(self, data: bytes) -> bytes:
        """All that an answer in one piece has said; `data` are its last bytes."""
        return b"".join((*(self._held or ()), data))

    def failure(self, data: bytes, rest: bytes = b"") -> HiveError:
        """The error of an answer that is not whole. If the answer has begun, its last bytes go out first, as far as
        they may be seen; what `end` gave goes out only as whole events."""
        if self._late_error and not is_in_a_dialect(late := self.told(data)):
            self._held = []
            return told_of(self.status, late, self._retry_after)
        why, told = self._why_given_up(), b""
        if self.begun and (self._streams or self._late_error):
            self.relay(data + rest if self._back is not None else without_host_paths(without_end_marker(data)))
        if why is None:
            early = "the backend ended its answer early"
            return StreamIncomplete(early if self._streams else "the backend's answer is not what was asked for")
        if self._back is not None or not self.begun:  # else the backend's own words have just gone out
            told = _one_line(without_host_paths(why.body)) if why.body else b""
        return BackendGaveUp(told, why.status)

    def _why_given_up(self) -> GaveUp | None:
        reading, back = self.reading, self._back
        why = reading.gave_up if reading is not None else None
        if back is None:
            return why
        if self._streams:
            return back.gave_up or (None if why is None else GaveUp())
        if why is None or not why.body:
            return why
        return GaveUp(back.error(why.status, why.body), why.status)

    def relay(self, data: bytes) -> None:
        """Bytes that are not the last ones."""
        held = self._held
        if held is None:
            if data or self._head:
                self._write(data)
            return
        held.append(data)
        self._held_bytes += len(data)
        most = MAX_TRANSLATED if self._may_be_long else MAX_WHOLE
        if self._held_bytes > most:
            whole = b"".join(held)
            held.clear()
            if self._may_be_long or self._late_error:
                raise BackendDown(f"the backend's answer is longer than {most} bytes")
            self._let_go(whole)

    def _let_go(self, data: bytes) -> None:
        """Sends an answer in one piece of unknown length that has become too long to be held."""
        self._held = None
        fields = [self._head]
        was_kept = self._request.keep_alive
        self._frame(fields, stream=False)
        if was_kept and not self._request.keep_alive:
            fields.append(b"connection: close\r\n")
        self._head = b"".join(fields)
        self._write(data)

    def prepare(self, data: bytes, at_server_s: float = 0.0) -> bytes:
        """The last bytes, with what was held before them. `at_server_s`: since it was sent there. Raises BackendDown
        for a list or an answer that is none, and the error for one of the backend's that is in no dialect."""
        if self._held is None:
            return data
        if self._held:
            self._held.append(data)
            data = b"".join(self._held)
        if self._filtered:
            data = self._told_of_models(data)
        elif self.status >= 400:
            self._check_dialect(data)
            data = without_host_paths(data)
            data = data if self._back is None else self._back.error(self.status, data)
        elif self._back is not None:
            data = self._back.whole(data)
        self._head += b"content-length: %d\r\n" % len(data)
        if self._endpoint.needs_place:
            self._head += self._cost_fields(at_server_s)
        return data

    def _check_dialect(self, told: bytes) -> None:
        """Raises the error for one of the backend's that is in no dialect."""
        if not is_in_a_dialect(told):
            raise told_of(self.status, told, self._retry_after)

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
        """Sends a sign of life to a client that waits for a stream; the first one commits the answer to status 200."""
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
        """The last bytes of a begun stream before it is cut: the error, if it would be an event of its own.

        Empty if only the cut can show the error: in an answer of known length, or after bytes that stop inside an
        event.
        """
        dialect = self._endpoint.dialect
        if (self._is_framed and not self._chunked) or self._request.method == b"HEAD" or not self._is_between_events():
            return b""
        told = without_host_paths(b"".join(self._held or [])) if self._late_error else b""
        told = _one_line(told if self._back is None else self._back.error(self.status, told)) if told else b""
        told = told or render(error, dialect, self._request_id)
        if self._back is not None:
            event = self._back.as_event(told)
        elif self._endpoint.name == RESPONSES:
            event = as_response_error(told, 0)
        else:
            event = as_event(told, dialect)
        return as_chunk(event) if self._chunked else event

    def _is_between_events(self) -> bool:
        """Whether the client has whole events only. Bytes that a stripper or a translation holds back do not count."""
        if self._back is not None:
            return self._streams or self._late_error
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

    def _cost_fields(self, at_server_s: float) -> bytes:
        """The use of a cache, false and 0 where its server tells nothing of one; and the time at the server."""
        reading = self.reading
        cached = 0 if reading is None else reading.usage.cached_tokens or 0
        if not cached:
            return NO_REUSE + b"x-gpu-time-ms: %d\r\n" % int(at_server_s * 1000)
        return b"x-cache-hit: true\r\nx-cache-tokens-reused: %d\r\nx-gpu-time-ms: %d\r\n" % (
            cached,
            int(at_server_s * 1000),
        )


def without_end_marker(data: bytes) -> bytes:
    """Bytes of a stream up to the end of it in any dialect: an answer that gave up must not be taken for one that
    ended.

    >>> without_end_marker(b'data: {"error":{}}\\r\\rdata: [DONE]\\r\\r')
    b'data: {"error":{}}\\r\\r'
    >>> without_end_marker(b'{"error":"no"}\\n{"model":"m","done":true}\\n')
    b'{"error":"no"}\\n'
    """
    end = _END_MARKER.search(data)
    return data if end is None else data[: end.start()]


def _one_line(body: bytes) -> bytes:
    """A JSON body as one line; empty where it is no JSON."""
    try:
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return b""
