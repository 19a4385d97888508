"""The storage of one request to `/v1/responses`: the response it continues, and the decision to keep its own.

The backend never sees it: named items are put into the body before that is read. Other requests pass none of this, and
none does while storage is off.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hive.bodies.body import Asked
from hive.dialects.openai_responses import as_stored, asks_to_store, with_items
from hive.dialects.openai_responses_answers import response_id
from hive.dialects.openai_responses_background import BackgroundAsked
from hive.errors import BadRequest
from hive.proxy.answer import Answer
from hive.proxy.refusals import no_room_for_bodies
from hive.proxy.stored_responses import StoredResponses
from hive.queue.body_budget import HeldBody
from hive.store.response_items import ID_MAX, references_in, resolved


class StoredTurn(NamedTuple):
    """`previous`: the response it goes on from, empty for none. `asked`: its own input, an array of items, JSON; the
    `references` in it name items that were kept. `store`: whether its answer is to be kept. `rest`: all else of the
    body. `background`: what it asks for there."""

    previous: str
    asked: bytes
    references: list[str]
    store: bool
    rest: bytes = b""
    background: BackgroundAsked | None = None

    @property
    def names_stored(self) -> bool:
        """Whether the body is whole only with stored items."""
        return bool(self.previous or self.references)

    @property
    def begins(self) -> bool:
        """Whether a job is to be begun that makes the response: it is not that job's own request."""
        return self.background is not None and not self.background.job

    def as_held(self) -> StoredTurn:
        """The part of it that is needed until the answer is there."""
        asked = self.asked if self.store and not self.begins else b""
        return self._replace(rest=b"", references=[], asked=asked)


def turn_of(body: bytes, *, most_bytes: int, job: str = "") -> StoredTurn:
    """The turn that a body asks for. Input longer than may be kept of an agent is not to be kept. `job`: the model job
    that sent it. Raises BadRequest.

    >>> turn_of(b'{"input":[{"type":"item_reference","id":"msg_1"}],"previous_response_id":"r"}', most_bytes=99)[2:5]
    (['msg_1'], True, b'{}')
    >>> turn_of(b'{"input":"hi","store":false}', most_bytes=99).store, turn_of(b'{"input":"hi"}', most_bytes=9).store
    (False, False)
    """
    stored = asks_to_store(body)
    if stored.background is not None and stored.background.job != job:
        raise BadRequest("background: Input should be true or false")
    found = references_in(stored.items) if stored.may_refer else []
    names = list(dict.fromkeys(name[:ID_MAX] for name in found))
    is_kept = stored.store and len(stored.items) <= most_bytes
    return StoredTurn(stored.previous[:ID_MAX], stored.items, names, is_kept, stored.rest, stored.background)


def whole_body(turn: StoredTurn, history: bytes, items: list[bytes], *, most_bytes: int) -> list[bytes]:
    """The body, in pieces, with the history in front of its own items, and `items` in place of its references. Raises
    BadRequest where those become longer than `most_bytes`.

    >>> body = b'{"input":[{"type":"item_reference","id":"a"}],"previous_response_id":"r","n":1}'
    >>> history, items = b'[{"role":"user","content":"q"}]', [b'{"id":"a"}']
    >>> b"".join(whole_body(turn_of(body, most_bytes=99), history, items, most_bytes=99))
    b'{"input":[{"role":"user","content":"q"},{"id":"a"}],"n":1}'
    """
    own = turn.asked
    if turn.references:
        own = resolved(own, dict(zip(turn.references, items, strict=True)), most_bytes=most_bytes - len(history))
    return with_items(turn.rest, [history, own])


def with_turn(asked: Asked, turn: StoredTurn) -> Asked:
    """The request with its storage, so that its answer tells it; what goes upstream is the same."""
    if not turn.store and not turn.previous and turn.background is None:
        return asked
    told = as_stored(asked.kept, previous=turn.previous, store=turn.store, background=turn.background)
    return msgspec.structs.replace(asked, kept=told)


class TurnStorage:
    """The storage of one request. `held`: the room of its body; what is held beside the body counts there too.

    `body`: all of it, as it came, where a job is to begin with it; else empty.
    """

    __slots__ = ("_agent", "_held", "_is_kept", "_stored", "_turn", "body")

    def __init__(
        self, stored: StoredResponses, agent: str, held: HeldBody, turn: StoredTurn, *, body: bytes = b""
    ) -> None:
        """Raises Saturated where there is no room for a body that a job is to begin with."""
        if turn.begins:
            if not held.take(len(body)):
                raise no_room_for_bodies()
        elif turn.store and turn.asked and not held.take(len(turn.asked)):  # it is held until the answer is there
            turn = turn._replace(store=False)
        self.body = body if turn.begins else b""
        self._stored = stored
        self._agent = agent
        self._held = held
        self._turn = turn if turn.names_stored or turn.background is not None else turn.as_held()
        self._is_kept = False

    def __repr__(self) -> str:
        return f"<TurnStorage after {self._turn.previous or 'nothing'}{', to be kept' * self._turn.store}>"

    @property
    def names_stored(self) -> bool:
        """Whether the body is whole only with stored items."""
        return self._turn.names_stored

    @property
    def is_rewritten(self) -> bool:
        """Whether the model's server must not see the body as it came."""
        return self._turn.background is not None

    def tag(self, request_id: str) -> str:
        """The name that the ids of the response are made of."""
        background = self._turn.background
        return request_id if background is None or not background.job else background.job

    def plain_body(self) -> list[bytes]:
        """The body without its word on the background, where it names nothing stored."""
        turn, self._turn = self._turn, self._turn.as_held()
        return with_items(turn.rest, [turn.asked])

    async def whole_body(self, sent_bytes: int, *, most_bytes: int) -> list[bytes]:
        """The body with the stored items it names. Raises NotFound, BadRequest, Saturated."""
        turn, left_bytes = self._turn, most_bytes - sent_bytes
        found = await self._stored.history(self._agent, turn.previous, turn.references, most_bytes=left_bytes)
        whole = whole_body(turn, found.history, found.items, most_bytes=most_bytes)
        more = sum(map(len, whole)) - sent_bytes
        if more > 0 and not self._held.take(more):
            raise no_room_for_bodies()
        self._turn = turn.as_held()
        return whole

    def shown_in(self, asked: Asked) -> Asked:
        return with_turn(asked, self._turn)

    def keep(self, request_id: str, answer: Answer) -> None:
        """Sends a complete response to the daemon before the client can know that it is complete, so that its next
        request finds it."""
        turn = self._turn
        if turn.store and not self._is_kept and (response := answer.response):
            self._is_kept = True
            name = response_id(self.tag(request_id))
            self._stored.keep(self._agent, name, previous_id=turn.previous, asked=turn.asked, response=response)
