"""The answers: a result as JSON, an error as application/problem+json (RFC 9457), an event as one of a stream."""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from hive.control import views
from hive.domain import JobState
from hive.errors import HiveError, MethodNotAllowed
from hive.shapes.runner import runner_error
from hive.store.jobs import StoredJob

PROBLEM = "application/problem+json"
LATER = frozenset({429, 503})
"""Statuses that say when to ask again."""


def as_json(answer: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def job_begun(job: StoredJob) -> Response:
    """The job, with 202 while it runs."""
    return as_json(views.job_view(job, time.time()), status=202 if job.state is JobState.RUNNING else 200)


def as_text(text: str | bytes) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


def problem(error: HiveError) -> Response:
    """The answer that carries this error: its code, and what to do next as `hint`."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "hint": error.hint,
    }
    headers = {"allow": error.allow} if isinstance(error, MethodNotAllowed) else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Response(msgspec.json.encode(body), error.status, headers, PROBLEM)


def is_runners(path: str) -> bool:
    """Whether a path is one of the runner API, whose errors have a shape of their own.

    >>> [is_runners(path) for path in ("/v1/models/load", "/llm/adapters/a/load", "/health", "/metrics", "/api/health")]
    [True, True, True, True, False]
    """
    return path.startswith(("/v1/", "/llm/")) or path in ("/health", "/metrics")


def failure(error: HiveError, path: str) -> Response:
    """The answer that carries this error, in the shape that callers of the path know."""
    if not is_runners(path):
        return problem(error)
    answer = problem(error)
    answer.body = msgspec.json.encode(runner_error(error))
    answer.headers["content-length"] = str(len(answer.body))
    answer.headers["content-type"] = "application/json"
    if error.status in LATER and "retry-after" not in answer.headers:
        answer.headers["retry-after"] = "1"
    return answer


def head_of(response: Response) -> Response:
    """The same without a body, which an answer to HEAD has not; a stream that would follow something ends."""
    bare = Response(status_code=response.status_code)
    bare.raw_headers = response.raw_headers
    return bare


def as_event(event: dict[str, Any]) -> bytes:
    """One server-sent event, named after its kind."""
    return f"event: {event['kind']}\ndata: {json.dumps(event)}\n\n".encode()
