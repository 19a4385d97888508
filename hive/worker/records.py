"""Answers of a worker: the seed's types, with fields that programs may rely on.

Times are Unix seconds, None for what has not happened.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from hive.worker.judge import FailReason

NO_SLOT_AVAILABLE = "NO_SLOT_AVAILABLE"
WORKER_NOT_READY = "WORKER_NOT_READY"
BAD_PARAMS = "BAD_PARAMS"
CANCELED = "canceled"


class RequestState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = CANCELED


class WorkerState(StrEnum):
    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    """Its server has ended, and the next start waits."""
    STOPPING = "stopping"
    FAILED = "failed"
    """It did not come up, or ended too often."""


class SubmitResult(msgspec.Struct, frozen=True):
    """`error`: NO_SLOT_AVAILABLE, WORKER_NOT_READY, or BAD_PARAMS for params that are no JSON."""

    ok: bool
    request_id: int | None = None
    error: str | None = None


class ToolCallText(msgspec.Struct):
    """One tool call as the model wrote it; `arguments` may be anything, JSON or not."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class ModelAnswer(msgspec.Struct, frozen=True):
    """One answer of the model. Tokens read and written are None where the server did not tell."""

    text: str
    thinking: str = ""
    tool_calls: tuple[ToolCallText, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of the prompt that the server had read before."""


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    request_id: int
    job_name: str
    state: RequestState
    reason: str | None
    """A `FailReason`, a reason of its dialogue, or `canceled`; None while it runs and when it completed."""
    created_at: float
    first_data_at: float | None
    last_stream_byte_at: float | None
    last_liveness_at: float | None
    """Last time the process was seen to burn CPU while this request ran."""
    last_progress_at: float
    """Last data event or sign of life, whichever is later; before both, its creation."""
    ended_at: float | None
    output_length: int
    """Characters of text so far, of all turns."""
    tool_iterations_remaining: int | None
    signals: tuple[Any, ...]


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a request that has ended; what came before a failure or a cancel is kept."""

    request_id: int
    job_name: str
    state: RequestState
    reason: str | None
    detail: str
    """One sentence for people, empty where it completed."""
    answer: ModelAnswer
    """Answer of the last turn, or the part of it that came."""
    signals: tuple[Any, ...]
    turns: tuple[ModelAnswer, ...]
    """All whole answers as the model wrote them, in order."""


class NotReady(msgspec.Struct, frozen=True):
    """The request has not ended."""

    request_id: int
    state: RequestState = RequestState.RUNNING


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: WorkerState
    active: bool
    """True while it has a server process, or is to have one again."""
    healthy: bool
    restarting: bool
    slots_total: int
    slots_used: int
    active_requests: dict[int, str]
    """Request id → job name."""
    restart_count: int
    last_error: str | None
    last_healthy_at: float | None
    pid: int | None


class Restart(msgspec.Struct, frozen=True):
    """One end of the server that was followed by another start. `reason`: a `FailReason` or the caller's own word."""

    at: float
    reason: FailReason | str


class WorkerDebugInfo(msgspec.Struct, frozen=True, kw_only=True):
    log: tuple[str, ...]
    """Last lines of the output of the server, of the one before where the present one said nothing yet."""
    restarts: tuple[Restart, ...]
    """The last of them, oldest first."""
    last_error: str | None
    restart_count: int
