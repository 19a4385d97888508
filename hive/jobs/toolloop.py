"""The tool loop's decider: from the calls of one answer to what happens next. Pure.

It knows no clock and runs nothing. Whoever drives it runs the calls that it says, and asks the model again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from hive.errors import BadRequest
from hive.jobs.exit_tools import Signal, ending_names
from hive.jobs.json_schema import mismatch
from hive.jobs.tools import ToolTable
from hive.worker.records import ToolCallText

FAULTY_TURNS = 2
"""So many turns in a row without one call that can be run, and the request has failed."""
WARN_AT, FAIL_AT = 3, 5
"""Identical batches of calls in a row: OpenCode, Kilocode and OpenRouter act at 3, docker-agent at 5."""
CALLS_A_TURN = 32
"""Calls of one answer that are looked at; with results of 64 KiB each that is 2 MiB more of a conversation."""
RAW_MAX = 4096
"""Characters of a malformed call that are told."""
SHOWN_MAX = 200


class LoopLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request's tool loop. Raises BadRequest for what is none."""

    max_tool_iterations: int = 8
    """Turns with calls; the turn after the last one has to be an answer."""
    tool_timeout_s: float = 30.0
    """One call, from its start."""
    result_max_bytes: int = 65536
    """Text of one result; the rest is cut off, and that is said."""
    parallel: int = 4
    """Calls of one turn that run at a time."""

    def __post_init__(self) -> None:
        for name in ("max_tool_iterations", "result_max_bytes", "parallel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"{name} is {value!r}: it must be a whole number from 1")
        if not 0 < self.tool_timeout_s < float("inf"):
            raise BadRequest(f"tool_timeout_s is {self.tool_timeout_s!r}: it must be more than 0 seconds")


class LoopFailure(StrEnum):
    """Reasons of a request that failed by its tool loop, beside those of the worker."""

    MALFORMED_TOOL_CALL = "malformed_tool_call"
    REPEATED_TOOL_CALL = "repeated_tool_call"
    TOOL_ITERATIONS_EXHAUSTED = "tool_iterations_exhausted"


class Fate(StrEnum):
    """Outcome of one call."""

    RUN = "run"
    NOTE = "note"
    """It is a signal: recorded, and answered with a stub that keeps the conversation whole."""
    REFUSE = "refuse"


class JudgedCall(msgspec.Struct, frozen=True):
    """One call and its fate. `why`: the fault of a refused one, told to the model."""

    call: ToolCallText
    fate: Fate
    arguments: Mapping[str, Any] = {}
    why: str = ""


class LoopStep(msgspec.Struct, frozen=True):
    """Outcome of one turn: its judged calls are carried out and the model is asked again, unless it `is_last` or is a
    `failure`. `warning`: a word to the model, for all results."""

    calls: tuple[JudgedCall, ...] = ()
    is_last: bool = False
    failure: LoopFailure | None = None
    detail: str = ""
    warning: str = ""


class ToolLoop:
    """One request's loop. `left`: turns with calls that are still permitted; `signals`: exit tools called so far.

    >>> from hive.jobs.tools import define
    >>> loop = ToolLoop(ToolTable([define("now", "", {"type": "object"})]), iterations=2)
    >>> step = loop.take([ToolCallText("a", "now", "{}"), ToolCallText("b", "then", "{}")])
    >>> [(one.fate.value, one.why) for one in step.calls], step.is_last, loop.left
    ([('run', ''), ('refuse', 'there is no tool "then"; there is: now')], False, 1)
    >>> loop.take([]).is_last
    True
    """

    def __init__(self, table: ToolTable, *, iterations: int, ending: Iterable[str] | None = None) -> None:
        self.left = iterations
        self.signals: list[Signal] = []
        self._table = table
        self._ending = ending_names() if ending is None else frozenset(ending)
        self._turn = 0
        self._faulty = 0
        self._batch: object = None
        self._same = 0

    def __repr__(self) -> str:
        return f"<ToolLoop turn {self._turn}, {self.left} left, {len(self.signals)} signals>"

    def take(self, calls: Sequence[ToolCallText], *, is_cut: bool = False) -> LoopStep:
        """Takes the calls of one whole answer, in their order. `is_cut`: it ended where its tokens did."""
        if not calls:
            return LoopStep(is_last=True)
        self._turn += 1
        judged: list[JudgedCall] = []
        for number, call in enumerate(calls):
            one = self._judged(call) if number < CALLS_A_TURN else _too_many(call)
            judged.append(one)
            if one.fate is Fate.NOTE:
                has_ended = call.name in self._ending
                self.signals.append(Signal(call.name, one.arguments, self._turn, has_ended))
                if has_ended:
                    return LoopStep(tuple(judged), is_last=True)
        if is_cut and judged[-1].fate is Fate.REFUSE:
            judged[-1] = replace(judged[-1], why=f"what you wrote was too long and was cut off, so {judged[-1].why}")
        return self._fault(judged) or self._repetition(judged) or self._spend(judged)

    def ends_with(self, calls: Sequence[ToolCallText]) -> bool:
        """Whether one of these ends the request, whatever comes behind it. Changes nothing."""
        return any(call.name in self._ending and self._judged(call).fate is Fate.NOTE for call in calls[:CALLS_A_TURN])

    def _fault(self, judged: Sequence[JudgedCall]) -> LoopStep | None:
        is_faulty = all(one.fate is Fate.REFUSE for one in judged)
        self._faulty = self._faulty + 1 if is_faulty else 0
        if self._faulty < FAULTY_TURNS:
            return None
        raw = "; ".join(f"{one.call.name}({one.call.arguments})" for one in judged)
        why = judged[0].why
        detail = f"{FAULTY_TURNS} turns in a row had no call that can be run: {why}. The model wrote: {raw[:RAW_MAX]}"
        return LoopStep(tuple(judged), failure=LoopFailure.MALFORMED_TOOL_CALL, detail=detail)

    def _repetition(self, judged: Sequence[JudgedCall]) -> LoopStep | None:
        batch = _key_of(judged)
        self._same = self._same + 1 if batch == self._batch else 1
        self._batch = batch
        if self._same < FAIL_AT:
            return None
        names = ", ".join(dict.fromkeys(one.call.name for one in judged))
        detail = f"the model made the same call {FAIL_AT} times in a row: {names}"
        return LoopStep(tuple(judged), failure=LoopFailure.REPEATED_TOOL_CALL, detail=detail)

    def _spend(self, judged: Sequence[JudgedCall]) -> LoopStep:
        if not self.left:
            if all(one.fate is Fate.NOTE for one in judged):
                return LoopStep(tuple(judged), is_last=True)
            detail = "the model went on calling tools after its last permitted turn with calls"
            return LoopStep(tuple(judged), failure=LoopFailure.TOOL_ITERATIONS_EXHAUSTED, detail=detail)
        self.left -= 1
        warning = ""
        if self._same >= WARN_AT:
            warning = f"You made the same call {self._same} times in a row; at {FAIL_AT} your work ends."
        return LoopStep(tuple(judged), warning=warning)

    def _judged(self, call: ToolCallText) -> JudgedCall:
        definition = self._table.by_name.get(call.name)
        if definition is None:
            return JudgedCall(call, Fate.REFUSE, why=self._unknown(call.name))
        arguments = arguments_of(call.arguments)
        if arguments is None:
            why = f"the arguments are no JSON object: {call.arguments[:SHOWN_MAX]}"
            return JudgedCall(call, Fate.REFUSE, why=why)
        if why := mismatch(arguments, definition.parameters):
            return JudgedCall(call, Fate.REFUSE, arguments, f"the arguments do not match the schema: {why}")
        return JudgedCall(call, Fate.NOTE if call.name in self._table.exit_tools else Fate.RUN, arguments)

    def _unknown(self, name: str) -> str:
        names = ", ".join(list(self._table.by_name)[:64])
        return (
            f'there is no tool "{name[:64]}"; there is: {names}' if name else f"this calls no tool; there is: {names}"
        )


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments that a model wrote; None where they are no JSON object. Servers write none as an empty text.

    >>> arguments_of('{"a": 1}'), arguments_of(""), arguments_of("true"), arguments_of('{"a": ')
    ({'a': 1}, {}, None, None)
    """
    if not text.strip():
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _too_many(call: ToolCallText) -> JudgedCall:
    return JudgedCall(call, Fate.REFUSE, why=f"there are at most {CALLS_A_TURN} calls in one turn")


def _key_of(judged: Sequence[JudgedCall]) -> tuple[tuple[str, bytes], ...]:
    """The same for two batches that ask for the same, however their JSON is written."""
    return tuple(
        (one.call.name, msgspec.json.encode(one.arguments, order="deterministic"))
        if one.arguments or not one.why
        else (one.call.name, one.call.arguments.encode(errors="replace"))
        for one in judged
    )
