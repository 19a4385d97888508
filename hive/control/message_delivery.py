"""Carries messages to agents: kept in SQLite until the agent's inbox has accepted them, in order for each agent.

An attempt wakes the agent and posts through the proxy's ingress, so that every runtime is reached the same way and the
agent counts as busy meanwhile. A message is accepted at least once: what kill -9 hits between the agent's answer and
its record is posted again, with the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.audit.audit_log import AuditLog
from hive.domain import ALIVE, Agent, AgentStatus, MessageState, WakeCause
from hive.errors import BadRequest, HiveError, NotFound
from hive.host.http_call import HttpCall, calling, dialled
from hive.http_answer import CallFailed, encode_request
from hive.link.proxy_link import ProxyGates
from hive.store import messages
from hive.store.database import Database
from hive.store.messages import StoredMessage
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
REFUSALS_MAX = 5
"""Tries at an agent that refuses: right after its start it may not know its own inbox yet."""
RECORD_AGAIN_S = 1.0
CONNECT_S = 2.0
BEYOND_PROXY_S = 30.0
"""The proxy's own limit to the first byte comes first, and says more."""
ANSWER_S = 5.0
"""For the body behind an answer's head; what it says is for people only."""
ANSWER_MAX_BYTES = 64 * 1024
ERROR_MAX_CHARS = 300

_ASLEEP = frozenset({AgentStatus.PAUSING, AgentStatus.PAUSED, AgentStatus.RESUMING})
_AGAIN = frozenset({408, 425, 429})
"""Refusals that mean later (RFC 9110 §15.5.9, RFC 8470 §5.2, RFC 6585 §4)."""
_NEVER = frozenset({501, 505})
"""Failures that mean never: it does not know POST, or not HTTP/1.1 (RFC 9110 §15.6.2, §15.6.6)."""


class AttemptFate(Enum):
    """The result of one attempt."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    LATER = "later"
    BLOCKED = "blocked"
    """Nothing was tried: something else has to change first."""


class DeliveryOutcome(NamedTuple):
    fate: AttemptFate
    why: str = ""
    retry_after_s: float = 0.0


def judge(status: int, text: str, *, by_hive: bool, retry_after_s: float = 0.0) -> DeliveryOutcome:
    """The meaning of an answer to the post. `by_hive`: the proxy answered, not the agent, so it is no refusal.

    >>> judge(204, "", by_hive=False).fate.value, judge(404, "no port", by_hive=True).fate.value
    ('accepted', 'later')
    >>> judge(404, "no", by_hive=False)[:2]
    (<AttemptFate.REFUSED: 'refused'>, 'its inbox answered 404: no')
    >>> judge(501, "<!DOCTYPE HTML> <title>Error</title>", by_hive=False).why  # for a browser
    'its inbox answered 501'
    """
    if 200 <= status < 300:
        return DeliveryOutcome(AttemptFate.ACCEPTED)
    if by_hive:
        return DeliveryOutcome(AttemptFate.LATER, text, retry_after_s)
    is_page = text.lstrip().startswith("<")
    why = f"its inbox answered {status}" + (f": {text}" if text and not is_page else "")
    if (status >= 500 and status not in _NEVER) or status in _AGAIN:
        return DeliveryOutcome(AttemptFate.LATER, why, retry_after_s)
    return DeliveryOutcome(AttemptFate.REFUSED, why)


def after(message: StoredMessage, outcome: DeliveryOutcome, now: float) -> StoredMessage:
    """The message after an attempt that ended so at `now` (Unix seconds).

    >>> one = StoredMessage(id="m", agent_id="a", text="hi", sender="uid:0", sent_at=0.0, refusals=4)
    >>> refused, later = DeliveryOutcome(AttemptFate.REFUSED, "404"), DeliveryOutcome(AttemptFate.LATER, "503")
    >>> after(one, refused, 9.0).refused_at, after(one, later, 9.0).refused_at
    (9.0, None)
    """
    refusals = message.refusals + (outcome.fate is AttemptFate.REFUSED)
    return msgspec.structs.replace(
        message,
        attempts=message.attempts + 1,
        refusals=refusals,
        last_error=outcome.why[:ERROR_MAX_CHARS],
        delivered_at=now if outcome.fate is AttemptFate.ACCEPTED else None,
        refused_at=now if refusals >= REFUSALS_MAX and outcome.fate is AttemptFate.REFUSED else None,
    )


def delay_s(failures: int, retry_after_s: float = 0.0) -> float:
    """Seconds to the next attempt after so many in a row that failed.

    >>> delay_s(1), delay_s(3), delay_s(99), delay_s(1, retry_after_s=20.0)
    (1.0, 4.0, 300.0, 20.0)
    """
    doubled: float = FIRST_RETRY_S * 2 ** min(failures - 1, 20)
    return min(LONGEST_RETRY_S, max(doubled, retry_after_s))


class _Round:
    """One agent's messages being carried. `again`: something changed for this agent; `more`: one was added."""

    def __init__(self) -> None:
        self.again = asyncio.Event()
        self.more = False
        self.why = ""
        self.task: asyncio.Task[None] | None = None


class MessageDelivery:
    """One per daemon. `recorded`: agents with messages from before.

    `token`: the agent's ingress token; `answer_s`: how long the proxy itself waits for an answer.
    """

    def __init__(
        self,
        roster: Roster,
        database: Database,
        audit_log: AuditLog,
        proxy_link: ProxyGates,
        recorded: Iterable[str],
        *,
        token: Callable[[Agent], str],
        answer_s: float,
    ) -> None:
        self._roster = roster
        self._database = database
        self._audit_log = audit_log
        self._proxy_link = proxy_link
        self._recorded = list(recorded)
        self._token = token
        self._rounds: dict[str, _Round] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._head_s = answer_s + BEYOND_PROXY_S

    def __repr__(self) -> str:
        return f"<MessageDelivery {len(self._rounds)} agents with messages>"

    async def run(self) -> None:
        """Takes up what an earlier daemon left, then listens for what lets a waiting message go on, until cancelled."""
        with self._audit_log.subscribe() as feed:
            for agent in self._recorded:
                self._begin(agent)
            async for event in feed:
                if event["kind"] == "events.dropped":
                    self.proxy_here()
                elif event["kind"] == "agent.changed" or (
                    event["kind"] == "agent.running" and event.get("from") not in _ASLEEP
                ):
                    self._go_on(event["agent"])

    async def close(self) -> None:
        """Ends what is under way; the next daemon takes it up."""
        tasks = [round.task for round in self._rounds.values() if round.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def proxy_here(self) -> None:
        """The way to the agents is open (again)."""
        for round in self._rounds.values():
            round.again.set()

    def forget(self, agent: str) -> None:
        """The agent was removed, and with it its rows."""
        self._go_on(agent)
        self._settled(agent)

    # What is asked of it ------------------------------------------------------------------------------------------

    async def send(self, life: AgentLifecycle, text: str, sender: str) -> StoredMessage:
        """Keeps a message until it is accepted. Raises BadRequest where the agent has no port, Saturated, StoreFull."""
        messages.check_text(text)
        if life.agent.spec.port is None:
            name = life.agent.name
            raise BadRequest(
                f"{name} has no port; messages are posted to the inbox of an agent that listens",
                hint=f"give it one: hive agent export {name}, add `port = 9000`, hive agent apply",
            )
        message = StoredMessage(
            id=secrets.token_hex(8), agent_id=life.agent.id, text=text, sender=sender, sent_at=time.time()
        )
        await self._database.write(lambda conn: messages.add(conn, message, name=life.agent.name))
        self._note("message.sent", life, message, actor=sender)
        self._begin(life.agent.id)
        return message

    async def undelivered(self, life: AgentLifecycle) -> tuple[list[StoredMessage], str]:
        """The messages waiting and refused, and the first one's reason to wait, empty where it is being delivered."""
        found: list[StoredMessage] = await self._database.read(lambda conn: messages.undelivered(conn, life.agent.id))
        round = self._rounds.get(life.agent.id)
        return found, round.why if round is not None else ""

    async def get(self, life: AgentLifecycle, message_id: str, *, within_s: float) -> StoredMessage:
        """One message, once it is settled or `within_s` have passed. Raises NotFound."""
        loop, agent, changed = asyncio.get_running_loop(), life.agent.id, asyncio.Event()
        until = loop.time() + within_s
        self._watchers.setdefault(agent, set()).add(changed)
        try:
            while (message := await self._find(life, message_id)).state is MessageState.WAITING and loop.time() < until:
                await _until(changed, until - loop.time())
                changed.clear()
            return message
        finally:
            self._watchers[agent].discard(changed)
            if not self._watchers[agent]:
                del self._watchers[agent]

    async def drop(self, life: AgentLifecycle, message_id: str, actor: str) -> StoredMessage:
        """Forgets one that was not accepted. Raises NotFound; one under way may still arrive."""
        message = await self._find(life, message_id)
        agent = life.agent.id
        if not await self._database.write(lambda conn: messages.drop(conn, agent, message_id)):
            raise NotFound(f"message {message_id} was delivered already")
        self._note("message.dropped", life, message, actor=actor)
        self._go_on(agent)
        self._settled(agent)
        return message

    async def waiting(self, agents: Collection[str]) -> dict[str, int]:
        """Agent → number of messages waiting for it; of the agents named, of all where none is."""
        return await self._database.read(lambda conn: messages.waiting(conn, agents))

    async def _find(self, life: AgentLifecycle, message_id: str) -> StoredMessage:
        agent = life.agent.id
        found: StoredMessage | None = await self._database.read(lambda conn: messages.get(conn, agent, message_id))
        if found is None:
            name = life.agent.name
            raise NotFound(f"there is no message {message_id[:40]!r} for {name}", hint=f"hive agent messages {name}")
        return found

    # Carrying -----------------------------------------------------------------------------------------------------

    def _begin(self, agent: str) -> None:
        round = self._rounds.get(agent)
        if round is None:
            round = self._rounds[agent] = _Round()
            round.task = spawn(self._carry(agent, round), name=f"messages {agent}")
        round.more = True

    def _go_on(self, agent: str) -> None:
        if (round := self._rounds.get(agent)) is not None:
            round.again.set()

    async def _carry(self, agent: str, round: _Round) -> None:
        """One message after the other, until none waits."""
        try:
            failures = 0
            while round.more and (life := self._roster.get(agent)) is not None:
                round.more = False
                round.again.clear()
                message = await self._next(agent)
                if message is None:
                    continue
                round.more = True
                outcome = await self._attempt(life, message)
                round.why = outcome.why
                if outcome.fate is AttemptFate.BLOCKED:
                    await _until(round.again, LONGEST_RETRY_S)
                    continue
                await self._record(life, after(message, outcome, time.time()))
                failures = 0 if outcome.fate is AttemptFate.ACCEPTED else failures + 1
                if failures:
                    await _until(round.again, delay_s(failures, outcome.retry_after_s))
        finally:
            del self._rounds[agent]

    async def _next(self, agent: str) -> StoredMessage | None:
        while True:
            try:
                return await self._database.read(lambda conn: messages.first_waiting(conn, agent))
            except HiveError as error:
                log.error("messages_not_read agent=%s error=%s", agent, error.message)
            await asyncio.sleep(RECORD_AGAIN_S)

    async def _attempt(self, life: AgentLifecycle, message: StoredMessage) -> DeliveryOutcome:
        """Wakes the agent and posts."""
        if (obstacle := self._obstacle(life)) is not None:
            return DeliveryOutcome(AttemptFate.BLOCKED, obstacle)
        if status := await life.awaken(WakeCause.MESSAGE):
            fate = AttemptFate.LATER if status in ALIVE else AttemptFate.BLOCKED
            return DeliveryOutcome(fate, f"{life.agent.name} could not be woken: it is {status}")
        spec = life.agent.spec
        address = f"127.0.0.1:{self._proxy_link.ingress_port}"
        head = {
            "Host": address,
            "Content-Type": "application/json",
            "Idempotency-Key": message.id,
            "X-Hive-Token": self._token(life.agent),
            "Connection": "close",
        }
        told = {"id": message.id, "text": message.text, "from": message.sender, "sent_at": message.sent_at}
        target = f"/agents/{spec.name}{spec.inbox}"
        request = encode_request("POST", target, head, msgspec.json.encode(told))
        opening = dialled(address, within_s=CONNECT_S)
        try:
            async with asyncio.timeout(self._head_s) as head_only, calling(opening, request) as call:
                answered = await call.status()
                head_only.reschedule(None)
                return _read(answered, call, await _beginning(call))
        except (CallFailed, OSError) as error:
            return DeliveryOutcome(AttemptFate.LATER, f"the proxy broke off: {str(error) or type(error).__name__}")

    def _obstacle(self, life: AgentLifecycle) -> str | None:
        """The condition that has to change before an attempt makes sense."""
        if life.status not in ALIVE:
            return f"{life.agent.name} is {life.status}"
        if life.agent.spec.port is None:
            return f"{life.agent.name} has no port"
        if self._proxy_link.session is None or self._proxy_link.ingress_port is None:
            return "the proxy is not connected"
        return None

    async def _record(self, life: AgentLifecycle, message: StoredMessage) -> None:
        """Until it is written where it was accepted: the next ones wait, or it would be posted again."""
        while True:
            try:
                await self._database.write(lambda conn: messages.update(conn, message))
                break
            except HiveError as error:
                log.error("message_not_recorded message=%s error=%s", message.id, error.message)
                if message.delivered_at is None:
                    break
            await asyncio.sleep(RECORD_AGAIN_S)
        if message.delivered_at is not None:
            self._note("message.delivered", life, message)
        elif message.refused_at is not None:
            self._note("message.refused", life, message)
        else:
            log.info("message_waits agent=%s message=%s error=%r", life.agent.name, message.id, message.last_error)
        self._settled(life.agent.id)

    def _settled(self, agent: str) -> None:
        for changed in self._watchers.get(agent, ()):
            changed.set()

    def _note(self, act: str, life: AgentLifecycle, message: StoredMessage, *, actor: str = "hive") -> None:
        """Notes an act on a message. Its text is nobody's business but its agent's."""
        detail: dict[str, Any] = {"name": life.agent.name, "message": message.id, "attempts": message.attempts}
        if message.last_error:
            detail["reason"] = message.last_error
        self._audit_log.note(act, target=life.agent.id, actor=actor, detail=detail)


async def _until(happened: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await happened.wait()
    except TimeoutError:
        return


async def _beginning(call: HttpCall) -> bytes:
    """Reads the useful part of the body. The head has decided: an agent that breaks off then changes nothing."""
    body = b""
    with contextlib.suppress(CallFailed, OSError):
        async with asyncio.timeout(ANSWER_S):
            async for piece in call.pieces():
                body += piece
                if len(body) > ANSWER_MAX_BYTES:
                    break
    return body[:ANSWER_MAX_BYTES]


def _read(status: int, call: HttpCall, body: bytes) -> DeliveryOutcome:
    text = " ".join(body.decode(errors="replace").split())
    by_hive = False
    try:
        found = msgspec.json.decode(body)["error"]
        by_hive = found["src"] == "hive"
        text = found["message"] if by_hive else text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        pass  # the agent's own words
    later = call.fields.get("retry-after", "")
    return judge(
        status,
        str(text)[:ERROR_MAX_CHARS],
        by_hive=by_hive,
        retry_after_s=float(later) if later.isdecimal() and len(later) < 6 else 0.0,
    )
