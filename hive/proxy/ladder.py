"""One request on a task's ladder: what is known of its rungs, the one that is chosen, and the steps to the next.

Every rung is found as if the client had named that model (`Resolve`), so that nothing that holds for the model is
passed over: tenant, tier, aliases, far models. Which rung it is decides `choose_rung` (hive/pool/ladder.py).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hive.bodies.needs import VISION, BodyNeeds, needs_of
from hive.domain import BackendKind
from hive.errors import (
    AgentAsleep,
    BackendDown,
    BackendGaveUp,
    BackendTimeout,
    BudgetExceeded,
    CloudRefused,
    DependencyDown,
    HiveError,
    ModelCold,
    NotApproved,
    NotFound,
    NotSupported,
    QueueFull,
    Refusal,
    Saturated,
    TooManyRequests,
)
from hive.pool.ladder import (
    CAUSE_OF,
    Choice,
    LadderCaller,
    NoRung,
    RungFacts,
    RungState,
    StepCause,
    Task,
    choose_rung,
)
from hive.proxy.registry import OPERATOR, PREWARM
from hive.queue.slot_gate import Cold

if TYPE_CHECKING:
    from hive.bodies.body import NamedBody
    from hive.endpoints.endpoints import Endpoint
    from hive.proxy.datapath import DataPath, Decided
    from hive.proxy.registry import AgentEntry
    from hive.queue.queue import Flow
    from hive.routing.slot import Slot

Resolve = Callable[[str, int], "tuple[str, Slot]"]
"""(name of a model, its rung) → the model that is meant and its slot, as for a request that names it. Raises what such
a request is refused with."""
LACKS = "lacks"
"""Cause of a step from a rung that the request cannot have: its server cannot do what is asked for, or a budget or the
cloud guard is against it. Others are a `StepCause`."""
TRIED_AGAIN = frozenset({429, 502, 503})
"""Statuses of a server's own that are no answer to the request."""
TOO_LONG = re.compile(
    rb"exceed_context_size|context_length_exceeded|maximum context length|available context size|prompt is too long"
)
"""Words of llama-server, OpenAI, vLLM and Anthropic for a prompt that does not fit."""
TOO_LONG_STATUSES = frozenset({400, 413})
WHY_MAX = 300
"""Characters of X-Hive-Why."""
_PREFERRED = {503: 0, 429: 1, 403: 2, 501: 3, 404: 4}
"""By status, the error that is told where no rung may be used: one that may be over soon goes first."""


class FoundRung(NamedTuple):
    """A rung as it was looked up: `served` and `slot` if it was found, else the error."""

    facts: RungFacts
    served: str = ""
    slot: Slot | None = None
    error: HiveError | None = None


class Climb:
    """One request on its way down the ladder of `task`. `rung`: the one it was given, None before; `served`: its
    model; `why`: the reason, a sentence; `is_over`: it steps no further, and the next error is told as it is."""

    __slots__ = (
        "_decided",
        "_entry",
        "_failed",
        "_over",
        "_path",
        "_resolve",
        "body",
        "ends_at",
        "is_over",
        "needs",
        "rung",
        "served",
        "task",
        "why",
    )

    def __init__(
        self,
        path: DataPath,
        task: Task,
        entry: AgentEntry,
        decided: Decided,
        resolve: Resolve,
        *,
        body: list[bytes],
        named: NamedBody,
        begun_at: float,
    ) -> None:
        """`body`: the client's, kept for the next rung, which may be of another kind."""
        self._path = path
        self.task = task
        self._entry = entry
        self._decided = decided
        self._resolve = resolve
        self.body = body
        self.needs: BodyNeeds = named.needs or needs_of(b"".join(body))
        self.ends_at = begun_at + task.budget_s
        self._failed: dict[int, tuple[str, str]] = {}
        """Rung → why it gave no answer, and the cause of the step by it."""
        self._over: int | None = None
        self.rung: int | None = None
        self.served = self.why = ""
        self.is_over = False

    def __repr__(self) -> str:
        return f"<Climb {self.task.name} rung {self.rung}, {len(self._failed)} failed>"

    # which rung -------------------------------------------------------------------------------------------------------

    def choose(self) -> tuple[str, Slot]:
        """The model that is meant and its slot: of the rung it has, if that is there still, else of the one that is
        chosen now. Raises the refusal where there is none."""
        now = time.monotonic()
        found = self._found(now)
        if self.rung is not None and self.rung not in self._failed and found[self.rung].slot is not None:
            kept = found[self.rung]
            assert kept.slot is not None
            return kept.served, kept.slot
        choice = self._choice(found, now)
        if isinstance(choice, NoRung):
            self.is_over = True
            raise self._refusal(choice, found)
        self.is_over = False
        self._take(choice.index, choice.why, found, now)
        taken = found[choice.index]
        assert taken.slot is not None
        return taken.served, taken.slot

    def _found(self, now: float) -> list[FoundRung]:
        left_s, decided = self.ends_at - now, self._decided
        looked = []
        for index, model in enumerate(self.task.rungs):
            one = look_at(self._resolve, model, index, decided.endpoint, decided.flow, self.needs, left_s, now)
            if index in self._failed:
                one = one._replace(facts=with_failure(one.facts, self._failed[index][0]))
            looked.append(one)
        return looked

    def _choice(self, found: Sequence[FoundRung], now: float) -> Choice:
        agent = self._entry.row.id
        held, until = (None, 0.0) if agent in (OPERATOR, PREWARM) else self._path.tasks.held_by(agent, self.task)
        caller = LadderCaller(self.ends_at, held, until, self.needs.tokens, self._over)
        return choose_rung(self.task, caller, [one.facts for one in found], now)

    def _take(self, index: int, why: str, found: Sequence[FoundRung], now: float) -> None:
        path, task, agent = self._path, self.task, self._entry.row.id
        usable = [number for number, one in enumerate(found) if not (one.facts.refused or one.facts.failed)]
        before, cause = self._step_to(index, usable[0], found)
        if cause:
            path.metrics.stepped(task.name, str(before), str(index), cause)
        self.rung, self.served, self.why = index, found[index].served, why
        if agent not in (OPERATOR, PREWARM):
            path.tasks.gave(agent, task, index, now)
        first = found[usable[0]]
        if first.slot is not None and usable[0] < index and first.facts.state is RungState.COLD:
            path.wish(first.slot, self._decided.tenant.name, agent, now)

    def _step_to(self, index: int, first: int, found: Sequence[FoundRung]) -> tuple[int, str]:
        """The rung from which this one was come to, and why; no reason where it was not stepped to."""
        if self.rung is not None and self.rung in self._failed:
            return self.rung, self._failed[self.rung][1]
        facts = found[first].facts
        if index <= first or facts.state is RungState.READY:
            return first, LACKS if facts.lacks and index > first else ""
        return first, CAUSE_OF[facts.state]

    def _refusal(self, choice: NoRung, found: Sequence[FoundRung]) -> HiveError:
        errors = [one.error for one in found if one.error is not None]
        if choice.index is None and errors:
            error = min(errors, key=lambda error: _PREFERRED.get(error.status, 2))
            error.message = f"no model of the task {self.task.name} is for this: {choice.why}"
            return error
        return ModelCold(f"the task {self.task.name}: {choice.why}", retry_after_s=choice.retry_after_s)

    # the next rung ----------------------------------------------------------------------------------------------------

    def steps_down(self, error: HiveError, *, is_sent: bool, is_ready: bool, slot: Slot) -> bool:
        """Whether the request goes on to another rung after this error. `is_sent`: the server had it; `is_ready`: its
        body has been read for the rung it has."""
        if self.is_over or self.rung is None or self.rung in self._failed:
            return False
        cause = cause_of(error, is_sent=is_sent, is_ready=is_ready, has_way=slot.pool is not None)
        return bool(cause) and self._steps(cause, told_of(error, cause))

    def steps_from(self, status: int, told: bytes) -> bool:
        """Whether the request goes on to another rung instead of getting this error of its server."""
        if self.is_over or self.rung is None:
            return False
        if status in TOO_LONG_STATUSES and TOO_LONG.search(told):
            return self._steps(StepCause.CONTEXT, "the prompt does not fit there")
        if status not in TRIED_AGAIN:
            return False
        return self._steps(StepCause.FULL if status == TooManyRequests.status else StepCause.DOWN, f"answered {status}")

    def can_step(self, cause: StepCause) -> bool:
        """Whether another rung could serve it, were this one given up for this cause."""
        if self.is_over or self.rung is None:
            return False
        failed, over = dict(self._failed), self._over
        is_possible = self._gives_up(cause, "")
        self._failed, self._over = failed, over
        return is_possible

    def _steps(self, cause: str, why: str) -> bool:
        if not self._gives_up(cause, why):
            self.is_over = True
            return False
        return True

    def _gives_up(self, cause: str, why: str) -> bool:
        """Counts the rung as failed; whether another one can serve the request then."""
        task, rung = self.task, self.rung
        assert rung is not None
        if cause != LACKS and (cause not in task.step_down_on or (cause == StepCause.COLD and self._waits_for(rung))):
            return False
        now = time.monotonic()
        if cause == StepCause.CONTEXT:
            self._over = self._found(now)[rung].facts.context
            if self._over is None:
                return False
        self._failed[rung] = why or cause, cause
        return not isinstance(self._choice(self._found(now), now), NoRung)

    def _waits_for(self, rung: int) -> bool:
        return rung == 0 and self.task.pin_primary

    # what is told -----------------------------------------------------------------------------------------------------

    def fields(self) -> bytes:
        """The lines of the head that tell which model answers, its place in the ladder, and why."""
        if self.rung is None:
            return b""
        return b"x-hive-model: %b\r\nx-hive-rung: %d\r\nx-hive-why: %b\r\n" % (
            _plain(self.served),
            self.rung,
            _plain(self.why),
        )


def look_at(
    resolve: Resolve,
    model: str,
    index: int,
    endpoint: Endpoint,
    flow: Flow,
    needs: BodyNeeds,
    left_s: float,
    now: float,
    *,
    in_full: bool = False,
) -> FoundRung:
    """Looks one rung up. `in_full`: a refusal is told in its own words, which may name what a client may not
    know."""
    try:
        served, slot = resolve(model, index)
        slot.check_offered(endpoint)
    except HiveError as error:
        return FoundRung(RungFacts(model, refused=error.message if in_full else why_refused(error)), error=error)
    state, expected_s = state_of(slot, flow, left_s, now)
    info = next((one for one in slot.models if one.name == served), None)
    facts = RungFacts(
        model,
        state,
        lacks="" if info is None else lack_of(info.capabilities, needs, endpoint.name, slot),
        expected_s=expected_s,
        context=None if info is None else info.context_length,
    )
    return FoundRung(facts, served, slot)


def state_of(slot: Slot, flow: Flow, left_s: float, now: float) -> tuple[RungState, float | None]:
    """The state of the slot for a request of this flow, and the seconds until it has its turn there: None where that
    cannot be said, infinite where no end can be seen. A place that comes free after `left_s` is none."""
    gate = slot.gate
    if gate.is_cold:
        reason = gate.reason
        assert isinstance(reason, Cold)
        if reason.never:
            return RungState.COLD, math.inf
        return RungState.COLD, slot.load_s or None if reason.ready_at is None else max(0.0, reason.ready_at - now)
    if gate.is_closed or slot.backend is None or slot.pool is None:
        return RungState.DOWN, None
    if slot.line.has_place(flow):
        return RungState.READY, 0.0
    expected_s = slot.line.retry_after_s(flow, now)
    return (RungState.READY if slot.line.has_room(flow) and expected_s < left_s else RungState.FULL), expected_s


def lack_of(capabilities: Sequence[str], needs: BodyNeeds, endpoint: str, slot: Slot) -> str:
    """A clause that tells what the model cannot do of what is needed; empty for nothing, or where that is not known.

    Whether a model takes tools only Ollama's list tells.
    """
    if not capabilities:
        return ""
    is_chat = endpoint in ("/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses")
    if is_chat and "completion" not in capabilities:
        return "generates no text"
    tells = slot.backend is not None and slot.backend.kind == BackendKind.OLLAMA and not slot.name
    missing = [one for one in needs.abilities if one not in capabilities and (one == VISION or tells)]
    return f"has no {' and no '.join(missing)}" if missing else ""


def why_refused(error: HiveError) -> str:
    """The reason why a caller may not have a rung, without the names of what it may not know.

    >>> why_refused(Refusal('tenant acme may not use the model "secret"')), why_refused(NotFound("model 'x' not found"))
    ('not for this caller', 'there is no such model')
    """
    if isinstance(error, NotFound):
        return "there is no such model"
    return "not for this caller" if error.status == Refusal.status else error.message


def with_failure(facts: RungFacts, why: str) -> RungFacts:
    return RungFacts(facts.model, facts.state, facts.refused, facts.lacks, why, facts.expected_s, facts.context)


def cause_of(error: HiveError, *, is_sent: bool, is_ready: bool, has_way: bool) -> str:
    """The cause to step down that an error is; empty for none: a mistake of the client's, a refusal, a time that is
    over.

    >>> [str(cause_of(error(), is_sent=False, is_ready=True, has_way=True)) for error in (QueueFull, ModelCold)]
    ['full', 'cold']
    >>> [str(cause_of(BackendTimeout(), is_sent=sent, is_ready=True, has_way=True)) for sent in (False, True)]
    ['down', '']
    >>> cause_of(Refusal(), is_sent=False, is_ready=True, has_way=True)
    ''
    """
    if isinstance(error, NotSupported | BudgetExceeded | CloudRefused):
        return "" if is_sent else LACKS
    if not is_ready or isinstance(error, AgentAsleep):  # that is the agent, not the rung
        return ""
    if isinstance(error, ModelCold | NotApproved):
        return StepCause.COLD
    if isinstance(error, QueueFull | TooManyRequests):
        return StepCause.FULL
    if isinstance(error, Saturated):
        return StepCause.FULL if has_way and error.code == Saturated.code else StepCause.DOWN
    if isinstance(error, BackendGaveUp):
        return StepCause.DOWN if error.status in TRIED_AGAIN else ""
    if isinstance(error, BackendTimeout):
        return "" if is_sent else StepCause.DOWN
    return StepCause.DOWN if isinstance(error, BackendDown | DependencyDown) else ""


def told_of(error: HiveError, cause: str) -> str:
    """The reason why a rung gave no answer, in few words: an error may say where a server is."""
    if cause == LACKS:
        return error.message
    return {"cold": "it was not loaded in time", "full": "it had no place", "down": "it could not be reached"}[cause]


def _plain(text: str) -> bytes:
    """A text as a field's value may have it."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return shown.encode("ascii", "replace")[:WHY_MAX]
