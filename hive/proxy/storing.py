"""The part of a request that has to do with kept responses: it names them, asks about them, or is to be kept itself.

Other requests pass none of this, and none does while storage is off.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from hive.dialects.openai_responses_answers import response_id
from hive.errors import HiveError
from hive.proxy import kept_answers, stored_turn
from hive.proxy.datapath import DataPath, Decided
from hive.proxy.endpoints import Keeps
from hive.proxy.lists import OwnAnswer
from hive.proxy.registry import AgentEntry
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.stored_turn import StoredTurn
from hive.proxy.waiting import WaitingRequest, no_room_for_bodies
from hive.tasks import spawn
from hive.wire.http1 import Request

if TYPE_CHECKING:
    from hive.proxy.answer import Answer
    from hive.proxy.body_workers import BodyReading

MIB = 1024 * 1024


class Storing(WaitingRequest):
    """A request that may be stored. `_turn`: of a request to `/v1/responses`; None if storage is off, and once it is
    kept. `_pending`: work under way for it elsewhere; the end of the request cancels it."""

    __slots__ = ("_path", "_pending", "_turn", "request_id")
    _path: DataPath
    _pending: BodyReading | asyncio.Task[None] | None
    _turn: StoredTurn | None
    request_id: str

    @abstractmethod
    def _5_what_is_asked(self, request: Request, entry: AgentEntry, decided: Decided) -> None:
        """The body is whole."""

    @abstractmethod
    def _say(self, said: OwnAnswer) -> None:
        """Ends with an answer of Hive's own."""

    def _read_turn(self, request: Request, entry: AgentEntry, decided: Decided, stored: StoredResponses) -> None:
        """Reads the turn before the body is read: only a request that names a stored one waits for the daemon, which
        has it."""
        kept_mb = self._path.settings.proxy.responses_kept_mb if stored.is_here else 0
        try:
            turn = stored_turn.turn_of(b"".join(request.body), most_bytes=kept_mb * MIB)
        except HiveError as error:
            self.refuse(error)
            return
        if turn.store and not self._hold_more(len(turn.asked)):  # it is held until the answer is there
            turn = turn._replace(store=False)
        self._turn = turn.as_held()
        if turn.names_stored:
            self._pending = spawn(self._ask_history(request, entry, decided, stored, turn), name="stored response")
        else:
            self._5_what_is_asked(request, entry, decided)

    async def _ask_history(
        self, request: Request, entry: AgentEntry, decided: Decided, stored: StoredResponses, turn: StoredTurn
    ) -> None:
        sent, longest = request.body_bytes, self._path.settings.proxy.body_max_bytes
        try:
            found = await stored.history(entry.row.id, turn.previous, turn.references, most_bytes=longest - sent)
            whole = stored_turn.whole_body(turn, found.history, found.items, most_bytes=longest)
            if not self._hold_more(sum(map(len, whole)) - sent):
                raise no_room_for_bodies()
        except HiveError as error:
            self._pending = None
            self.refuse(error)
            return
        self._pending = None
        request.body = whole
        self._5_what_is_asked(request, entry, decided)

    def _keep(self, turn: StoredTurn, answer: Answer) -> None:
        """Sends the response to the daemon before the client can know that the answer is complete, so that its next
        request finds it."""
        stored, entry, response = self._path.stored, self._entry, answer.response
        if response and turn.store and stored is not None and entry is not None:
            self._turn = None
            name = response_id(self.request_id)
            stored.keep(entry.row.id, name, previous_id=turn.previous, asked=turn.asked, response=response)

    async def _answer_kept(self, decided: Decided, entry: AgentEntry, keeps: Keeps) -> None:
        """Answers a request about a kept response; a client that leaves ends it."""
        try:
            said = await kept_answers.said_of_kept(self._path, entry, keeps, decided.target)
        except HiveError as error:
            self._pending = None
            self.refuse(error)
        else:
            self._pending = None
            self._say(said)
