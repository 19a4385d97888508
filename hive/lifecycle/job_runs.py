"""One model job under way: what it may do, what it has said, and how it ends."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hive.domain import JobState
from hive.errors import NotPermitted
from hive.jobs.ending import BOUNDS
from hive.jobs.order import JobOrder
from hive.jobs.toolloop import LoopFailure, LoopLimits
from hive.lifecycle.job_output import JobOutput
from hive.link.jobs import JobGrantRow, JobWord
from hive.store import job_turns
from hive.store.job_turns import JobSignalRow, JobTurnRow
from hive.store.jobs import StoredJob

INTO_ROWS_ONLY = ("answer", "thinking")
"""Of a turn: its output has them already, piece by piece."""
MALFORMED = "the model called no tool as it is to be called; hive job result tells what it wrote"
_TOKENS = ("tokens_in", "tokens_out", "tokens_cached")


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job. `usage`: of all its turns, as far as the server told."""

    state: JobState
    reason: str = ""
    detail: str = ""
    answer: str = ""
    is_incomplete: bool = False
    usage: dict[str, int] = {}

    @classmethod
    def failed(cls, reason: str, detail: str, *, answer: str = "") -> JobEnd:
        return cls(state=JobState.FAILED, reason=reason, detail=detail, answer=answer, is_incomplete=reason in BOUNDS)

    @classmethod
    def told(cls, data: Mapping[str, Any]) -> JobEnd:
        """The end that an output has as its last event."""
        states = {"completed": JobState.DONE, "incomplete": JobState.DONE, "cancelled": JobState.CANCELLED}
        return cls(
            state=JobState(data.get("state") or states.get(str(data.get("status")), JobState.FAILED)),
            reason=str(data.get("reason", "")),
            detail=str(data.get("detail", "")),
            answer=str(data.get("answer", "")),
            is_incomplete=data.get("status") == "incomplete",
            usage=data.get("usage") or {},
        )

    @property
    def status(self) -> str:
        """OpenAI's word.

        >>> JobEnd.failed("tool_iterations_exhausted", "no end").status, JobEnd(state=JobState.DONE).status
        ('incomplete', 'completed')
        """
        if self.is_incomplete:
            return "incomplete"
        return {JobState.DONE: "completed", JobState.CANCELLED: "cancelled"}.get(self.state, "failed")

    @property
    def row(self) -> dict[str, Any]:
        """For the table of jobs, which viewers read too: nothing of what a model wrote is in it."""
        return {"status": self.status, "reason": self.reason, "detail": self.summary, "usage": self.usage}

    @property
    def summary(self) -> str:
        """Its detail, where that is no text of the model's."""
        return MALFORMED if self.reason == LoopFailure.MALFORMED_TOOL_CALL else self.detail

    @property
    def data(self) -> dict[str, Any]:
        """Of the event `ended`."""
        return {**self.row, "detail": self.detail, "state": str(self.state), "answer": self.answer}

    @property
    def error(self) -> dict[str, Any] | None:
        if self.state is not JobState.FAILED:
            return None
        return {"code": self.reason, "message": self.summary, "hint": "", "log": []}

    def with_usage(self, turns: Sequence[Mapping[str, Any]]) -> JobEnd:
        """With the sum of these turns' tokens.

        >>> JobEnd(state=JobState.DONE).with_usage([{"tokens_in": 3, "tokens_out": None}, {"tokens_in": 4}]).usage
        {'turns': 2, 'tokens_in': 7, 'tokens_out': 0, 'tokens_cached': 0}
        """
        sums = {name: sum(turn.get(name) or 0 for turn in turns) for name in _TOKENS}
        return replace(self, usage={"turns": len(turns), **sums})

    def with_answer(self, answer: str) -> JobEnd:
        return replace(self, answer=answer)


class RowsOf(NamedTuple):
    """Words of a job as they are kept: `lines` of its output, `write(conn, job)` for the database, None where nothing
    of them is kept there."""

    lines: list[JobWord]
    turns: list[dict[str, Any]]
    signals: int
    calls: list[dict[str, Any]]
    results: list[dict[str, Any]]
    write: Callable[[sqlite3.Connection, str], None] | None


def rows_of(words: Sequence[JobWord], signals_before: int) -> RowsOf:
    """Takes them apart. `signals_before`: those that the job has given so far."""
    lines: list[JobWord] = []
    turns: list[JobTurnRow] = []
    signals: list[JobSignalRow] = []
    results: dict[int, list[dict[str, Any]]] = {}
    calls = []
    for word in words:
        data = word.data
        match word.event:
            case "turn":
                turns.append(msgspec.convert({**_without_turn(data), "n": data["turn"], "at": word.at}, JobTurnRow))
                word = JobWord(word.at, word.event, {k: v for k, v in data.items() if k not in INTO_ROWS_ONLY})
            case "tool_result":
                results.setdefault(int(data["turn"]), []).append(_without_turn(data))
            case "tool_call":
                calls.append(data)
            case "signal":
                number = signals_before + len(signals) + 1
                signals.append(msgspec.convert({**data, "n": number, "at": word.at}, JobSignalRow))
        lines.append(word)

    def write(conn: sqlite3.Connection, job: str) -> None:
        for turn in turns:
            job_turns.add_turn(conn, job, turn)
        for signal in signals:
            job_turns.add_signal(conn, job, signal)
        for number, found in results.items():
            job_turns.add_results(conn, job, number, found)

    said = [line.data for line in lines if line.event == "turn"]
    flat = [one for found in results.values() for one in found]
    return RowsOf(lines, said, len(signals), calls, flat, write if turns or signals or results else None)


def _without_turn(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "turn"}


class JobRun:
    """One that has not ended. `is_told`: its process knows of it. `parent`: the job one of whose calls began it.
    `begun_by`: the agent that began it for itself, empty for an operator."""

    def __init__(
        self,
        job: StoredJob,
        order: JobOrder,
        *,
        limits: LoopLimits,
        agent: str,
        tenant: str,
        callable_agents: list[str],
        parent: JobRun | None,
        begun_by: str,
        token: str,
    ) -> None:
        self.id = job.id
        self.job = job
        self.order = order
        self.limits = limits
        self.agent = agent
        self.tenant = tenant
        self.callable_agents = callable_agents
        self.parent = parent
        self.begun_by = begun_by
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.token = token
        self.output: JobOutput | None = None
        self.writing = asyncio.Lock()
        self.is_granted = self.is_told = self.is_cancelled = self.is_ended = False
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()
        """Set at its next word; another one is made then."""
        self.turns: list[dict[str, Any]] = []
        self.signals = 0
        self._calls: dict[str, str] = {}
        """Calls under way: id → the agent."""
        self._spent = 0
        """Turns with calls of this job and of those that it began, and one for each of those."""
        self.has_children = False

    def __repr__(self) -> str:
        return f"<JobRun {self.id} depth {self.depth}, {len(self.turns)} turns>"

    @property
    def grant(self) -> JobGrantRow:
        return JobGrantRow(
            job=self.id,
            agent=self.agent,
            tenant=self.tenant,
            band=self.order.priority,
            agents=self.callable_agents,
            is_local_only=self.order.local_only,
        )

    @property
    def called_agents(self) -> set[str]:
        """Agents, by id or name as the order has it, at which a call of it is under way."""
        return {agent for agent in self._calls.values() if agent}

    @property
    def waits_for_tools(self) -> bool:
        """Whether it has nothing under way at the model now, and will ask it again."""
        return bool(self._calls)

    @property
    def root(self) -> JobRun:
        return self if self.parent is None else self.parent.root

    @property
    def has_overspent(self) -> bool:
        """Whether the tree of jobs has had more turns than its root may have. A root that has begun none counts its own
        itself."""
        root = self.root
        return (root is not self or root.has_children) and root._spent > root.limits.max_tool_iterations

    def take_turn(self) -> None:
        """A job below it takes one of the turns that its tree has. Raises NotPermitted where none is left."""
        root = self.root
        if root._spent >= root.limits.max_tool_iterations:
            raise NotPermitted("the jobs that belong together have used up their turns")
        root._spent += 1
        root.has_children = True

    def took(self, rows: RowsOf) -> None:
        """These are kept."""
        self.turns += rows.turns
        self.signals += rows.signals
        self.root._spent += sum(bool(turn.get("calls")) for turn in rows.turns)
        for call in rows.calls:
            self._calls[f"{call['turn']} {call['id']}"] = str(call.get("agent", ""))
        for turn in rows.turns:
            self._calls = {key: agent for key, agent in self._calls.items() if int(key.split()[0]) >= turn["turn"]}
        if rows.results:
            self._calls.clear()

    def tell_changed(self) -> None:
        """Wakes those that follow it."""
        self.changed.set()
        self.changed = asyncio.Event()
