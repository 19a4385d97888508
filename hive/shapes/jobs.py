"""The API's answers about jobs of kind task, in which a model works through tools, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from hive.shapes.system import JobStatus, UnixSeconds

TokensOrNull = Annotated[int | None, Meta(description="null: the server did not tell.")]


class JobOutputEvent(TypedDict):
    """One event of a job's output. `n` counts from 1; `data` is by kind of event."""

    n: int
    at: UnixSeconds
    event: Annotated[
        str,
        Meta(description="delta, thinking, turn, tool_call, tool_result, signal, response or, as the last one, ended."),
    ]
    data: dict[str, Any]


class JobSignal(TypedDict):
    """An exit tool that the model called. `has_ended`: the job ended with it. `turn`: from 1."""

    n: int
    name: str
    arguments: dict[str, Any]
    turn: int
    has_ended: bool
    at: UnixSeconds


class JobCall(TypedDict):
    """A tool call as the model wrote it; `arguments` may be anything, JSON or not."""

    id: str
    name: str
    arguments: str


class JobCallResult(TypedDict):
    """Result of a call, as the model was told it."""

    id: str
    name: str
    result: str


class JobTurn(TypedDict):
    """One answer of the model. `results`: of its calls, in their order, as far as there were some."""

    n: int
    answer: str
    thinking: str
    calls: list[JobCall]
    results: list[JobCallResult]
    finish_reason: Annotated[str, Meta(description="As the server told it; empty where it did not.")]
    tokens_in: TokensOrNull
    tokens_out: TokensOrNull
    tokens_cached: TokensOrNull
    at: UnixSeconds


class JobUsage(TypedDict):
    """Tokens of all turns."""

    turns: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int


class JobResult(TypedDict):
    """Outcome of a job; of one that failed or was cancelled, what there was by then."""

    id: str
    status: JobStatus
    reason: Annotated[str, Meta(description="Why it did not complete, in a word; empty where it did.")]
    detail: Annotated[str, Meta(description="The same as a sentence.")]
    answer: Annotated[str, Meta(description="The text of the last turn.")]
    signals: list[JobSignal]
    turns: list[JobTurn]
    usage: JobUsage


class ReleasedJob(TypedDict):
    """A job whose output and result are gone."""

    id: str
