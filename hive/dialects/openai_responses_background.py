"""Responses that are made in the background: their ids, their objects before they are whole, and their events. Pure.

A model job makes such a response with a request of its own, and records its events without what all of them repeat of
the request. Whoever asks gets them whole. The first two, created and queued, are told of each and recorded of none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hive.dialects.openai_responses_answers import ResponsesKept, response_id, response_object
from hive.errors import BadRequest

Raw = msgspec.Raw
Event = dict[str, Any]
FIRST_NUMBER = 2
"""The number of the first event that is recorded."""
ENDS: Mapping[str, str] = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
"""Events that are the last of their response, and its status by that."""
_ID = re.compile(r"resp_([0-9a-f]{12})")
_OWN = ("id", "created_at")
"""Fields of an answer's object that are its job's to say."""
_DELTAS: Mapping[str, tuple[str, str]] = {
    "response.output_text.delta": ("content", "output_text"),
    "response.refusal.delta": ("content", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text"),
    "response.function_call_arguments.delta": ("arguments", ""),
    "response.custom_tool_call_input.delta": ("input", ""),
}
"""Events with a piece of text: the field of the item that it belongs to, and the kind of the part in it."""


class BackgroundAsked(msgspec.Struct, frozen=True):
    """The wish in a body's `background`. `job`: the job whose own request it is, empty for a client's; `created_at`:
    when the client's came, in Unix seconds."""

    job: str = ""
    created_at: int = 0


def background_of(raw: Raw) -> BackgroundAsked | None:
    """The wish in the field; None for none. Raises BadRequest.

    >>> background_of(Raw(b"true")), background_of(Raw(b"null"))
    (BackgroundAsked(job='', created_at=0), None)
    >>> background_of(Raw(b'{"job":"ab","created_at":7}'))
    BackgroundAsked(job='ab', created_at=7)
    """
    if bytes(raw) in (b"true", b"false", b"null"):
        return BackgroundAsked() if bytes(raw) == b"true" else None
    try:
        asked = msgspec.json.decode(raw, type=BackgroundAsked)
    except msgspec.MsgspecError:
        asked = None
    if asked is None or not asked.job:
        raise BadRequest("background: Input should be true or false")
    return asked


def job_of(name: str) -> str:
    """The job that makes the response of this id; empty for one that was made while its client waited.

    >>> job_of("resp_0123456789ab"), job_of("resp_1f2e-7")
    ('0123456789ab', '')
    """
    found = _ID.fullmatch(name)
    return "" if found is None else found[1]


def queued_response(kept: bytes) -> bytes:
    """The object of a response that is to be made, as JSON: its id and time are not known yet. `kept`: of its request
    (`Sent.kept`).

    >>> queued_response(msgspec.json.encode(ResponsesKept(model="m")))[:75]
    b'{"id":"","object":"response","created_at":0,"status":"queued","completed_at'
    """
    return msgspec.json.encode(response_object(msgspec.json.decode(kept, type=ResponsesKept), "", 0, "queued", []))


def named(response: Mapping[str, Any], job: str) -> Event:
    """The object with the id that this job gives it."""
    return {**response, "id": response_id(job)}


def first_events(queued: Mapping[str, Any]) -> list[Event]:
    """The events of every response that is made in the background, before its model has said anything.

    >>> [(event["type"], event["sequence_number"]) for event in first_events({"id": "resp_1"})]
    [('response.created', 0), ('response.queued', 1)]
    """
    names = ("response.created", "response.queued")
    return [{"type": name, "response": queued, "sequence_number": number} for number, name in enumerate(names)]


def failed_event(code: str, message: str, number: int, output: list[Event]) -> Event:
    """The last event of a response that came to nothing, or to a part, to be recorded.

    >>> failed_event("server_error", "it is gone", 2, [])["response"]
    {'status': 'failed', 'output': [], 'error': {'code': 'server_error', 'message': 'it is gone'}}
    """
    response = {"status": "failed", "output": output, "error": {"code": code, "message": message}}
    return {"type": "response.failed", "response": response, "sequence_number": number}


def error_word(status: int) -> str:
    """The word for an error of this status in a response's object: clients know a few.

    >>> [error_word(status) for status in (429, 404, 502)]
    ['rate_limit_exceeded', 'invalid_prompt', 'server_error']
    """
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if 400 <= status < 500 else "server_error"


def recorded(event: Event, queued: Mapping[str, Any], number: int) -> Event:
    """An event of the job's own request as it is recorded: numbered anew, without what the request itself says.

    >>> recorded({"type": "t", "response": {"status": "x", "model": "m"}, "sequence_number": 1}, {"model": "m"}, 2)
    {'type': 't', 'response': {'status': 'x'}, 'sequence_number': 2}
    """
    lean = {**event, "sequence_number": number}
    response = event.get("response")
    if isinstance(response, dict):
        lean["response"] = {
            name: value
            for name, value in response.items()
            if name not in _OWN and (name not in queued or queued[name] != value)
        }
    return lean


def whole_event(event: Event, queued: Mapping[str, Any]) -> Event:
    """An event as its client is told it.

    >>> whole_event({"type": "t", "response": {"status": "x"}, "sequence_number": 2}, {"id": "resp_1", "status": "q"})
    {'type': 't', 'response': {'id': 'resp_1', 'status': 'x'}, 'sequence_number': 2}
    """
    response = event.get("response")
    return event if response is None else {**event, "response": {**queued, **response}}


def as_sse(event: Event) -> bytes:
    """The bytes of an event in a stream.

    >>> as_sse({"type": "response.queued"})
    b'event: response.queued\\ndata: {"type":"response.queued"}\\n\\n'
    """
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event))


class OutputSoFar:
    """The items of a response that was not made to its end, put together from its events.

    >>> output = OutputSoFar()
    >>> item = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    >>> output.take({"type": "response.output_item.added", "output_index": 0, "item": item})
    >>> for piece in ("Hel", "lo"):
    ...     delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": piece}
    ...     output.take(delta)
    >>> [(item["status"], item["content"][0]["text"]) for item in output.told()]
    [('incomplete', 'Hello')]
    """

    def __init__(self) -> None:
        self._items: dict[int, Event] = {}
        self._said: dict[int, dict[tuple[str, int, str], list[str]]] = {}
        """Pieces of the items that have not ended, by their index and their place in the item."""
        self.end: Event | None = None
        """The last event, once it is there."""
        self.number = FIRST_NUMBER - 1
        """The number of the last one that was taken."""

    def __repr__(self) -> str:
        return f"<OutputSoFar {len(self._items)} items, to event {self.number}>"

    def take(self, event: Event) -> None:
        """Takes the next recorded event."""
        kind, at = event["type"], event.get("output_index", 0)
        self.number = event.get("sequence_number", self.number)
        if kind in ENDS:
            self.end = event
        elif kind == "response.output_item.added":
            self._items[at] = event["item"]
            self._said[at] = {}
        elif kind == "response.output_item.done":
            self._items[at] = event["item"]
            self._said.pop(at, None)
        elif (place := _DELTAS.get(kind)) is not None and at in self._said:
            number = int(event.get("content_index") or event.get("summary_index") or 0)
            self._said[at].setdefault((place[0], number, place[1]), []).append(event["delta"])

    def told(self) -> list[Event]:
        """The items, those that have not ended with what there is of them."""
        return [self._told(at) for at in sorted(self._items)]

    def _told(self, at: int) -> Event:
        item, said = self._items[at], self._said.get(at)
        if said is None:
            return item
        made: Event = {**item, "status": "incomplete"}
        for (field, _, kind), pieces in sorted(said.items()):
            text = "".join(pieces)
            if not kind:
                made[field] = text
            else:
                made[field] = [*made.get(field, []), _part(kind, text)]
        return made


def _part(kind: str, text: str) -> Event:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    more: Event = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, **more, "text": text}
