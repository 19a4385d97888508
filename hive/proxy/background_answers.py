"""Answers to requests about responses that are made in the background: begun, polled, streamed, cancelled, deleted."""

from __future__ import annotations

from hive.bodies.body import Asked
from hive.dialects.errors import as_response_error, render
from hive.dialects.openai_responses_background import queued_response
from hive.domain import Dialect
from hive.endpoints.endpoints import Keeps
from hive.endpoints.lists import OwnAnswer
from hive.errors import BadRequest, HiveError, Saturated
from hive.proxy.background_responses import BackgroundSource, BackgroundStream
from hive.proxy.datapath import DataPath, Decided
from hive.proxy.registry import AgentEntry
from hive.wire.connection import Connection
from hive.wire.http1 import LAST_CHUNK, Request, as_chunk, head_start

REQUEST_MOST_BYTES = 4 * 1024 * 1024
"""The order of a job has no room for more."""
ALL = -1
"""The number before that of the first event."""


async def said_at_begin(
    path: DataPath, entry: AgentEntry, asked: Asked | None, body: bytes, decided: Decided
) -> OwnAnswer | BackgroundStream:
    """Begins the job of a body that has been read. Raises BadRequest, TooManyRequests, Saturated."""
    assert asked is not None
    if len(body) > REQUEST_MOST_BYTES:
        raise BadRequest(f"a request with background has at most {REQUEST_MOST_BYTES} bytes")
    source = _source(path)
    begun = await source.begin(
        entry.row.id,
        model=asked.model,
        request=body,
        response=queued_response(asked.kept),
        is_local_only=decided.is_local_only,
    )
    if asked.stream:
        return _stream(path, source, entry, begun.id, ALL, decided.heartbeat_s)
    return OwnAnswer(begun.content)


async def said_of_background(
    path: DataPath, entry: AgentEntry, keeps: Keeps, name: str, query: dict[str, str], heartbeat_s: float
) -> OwnAnswer | BackgroundStream:
    """The answer about the response `name`. Raises NotFound, BadRequest, Saturated."""
    source, agent = _source(path), entry.row.id
    if keeps is Keeps.CANCEL:
        return OwnAnswer(await source.cancel(agent, name))
    if keeps is Keeps.DELETE:
        await source.delete(agent, name)
        return deleted(name)
    if asks_stream(query):
        return _stream(path, source, entry, name, after_in(query), heartbeat_s)
    return OwnAnswer(await source.get(agent, name))


def deleted(name: str) -> OwnAnswer:
    return OwnAnswer(b'{"id":"%b","object":"response","deleted":true}' % name.encode())


def asks_stream(query: dict[str, str]) -> bool:
    return query.get("stream", "").lower() in ("true", "1")


def after_in(query: dict[str, str]) -> int:
    """The number of the last event that a client has seen; `ALL` where it has seen none. Raises BadRequest.

    >>> after_in({"starting_after": "12"}), after_in({})
    (12, -1)
    """
    text = query.get("starting_after", "")
    if not text:
        return ALL
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise BadRequest("starting_after is the sequence_number of an event: a whole number from 0")
    return int(text)


def _stream(
    path: DataPath, source: BackgroundSource, entry: AgentEntry, name: str, after: int, heartbeat_s: float
) -> BackgroundStream:
    return BackgroundStream(
        source,
        entry.row.id,
        name,
        after=after,
        beat_s=heartbeat_s,
        blocked_s=path.settings.proxy.between_bytes_s,
        is_leaving=lambda: path.draining,
    )


def _source(path: DataPath) -> BackgroundSource:
    if path.background is None:
        raise Saturated("what is kept of responses cannot be read now", retry_after_s=5)
    return path.background


class StreamAnswer:
    """The answer of one exchange that relays a stream of events; its head goes out at once."""

    __slots__ = ("_connection", "_is_chunked", "stream")

    def __init__(self, connection: Connection, request: Request, own_fields: bytes, stream: BackgroundStream) -> None:
        self._connection = connection
        self._is_chunked = request.chunks
        self.stream = stream
        fields = b"transfer-encoding: chunked\r\nx-accel-buffering: no\r\n"
        if not request.chunks:
            request.keep_alive, fields = False, b""
        closing = b"" if request.keep_alive else b"connection: close\r\n"
        head = b"%bcontent-type: text/event-stream; charset=utf-8\r\n%b%b%b\r\n"
        connection.write(head % (head_start(200), own_fields, fields, closing))

    def __repr__(self) -> str:
        return f"<StreamAnswer {self.stream!r}>"

    def write(self, events: bytes) -> None:
        self._connection.write(as_chunk(events) if self._is_chunked else events)

    def finish(self) -> None:
        """Ends the framing: all events are out."""
        if self._is_chunked:
            self._connection.write(LAST_CHUNK)

    def last_words(self, error: HiveError) -> bytes:
        """The event that tells of an error, before the stream is cut."""
        event = as_response_error(render(error, Dialect.OPENAI), self.stream.number + 1)
        return as_chunk(event) if self._is_chunked else event
