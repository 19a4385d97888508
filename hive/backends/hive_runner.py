"""Hive's own runners (hive.runner) as kinds of server: how they are asked and started.

Each is `hive-runner KIND` in a virtual environment of its own, and serves one model of sound or pictures. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from hive.backends import openai_answers
from hive.backends.command_line import Launch, Needed, Order, program
from hive.backends.conversation import (
    Answers,
    AskedServer,
    Conversation,
    json_of,
    shape,
    text,
    text_in,
)
from hive.backends.counters import Heard, ReportedLimits, gauge, heard_counters
from hive.backends.openai_answers import MODELS
from hive.backends.spec import Asking, BackendSpec, Requests
from hive.domain import Dialect, ModelInfo
from hive.settings.table import InferenceSection

HEALTH = "/health"
OF_TEXT = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
"""Paths of OpenAI's dialect that no runner has."""


class _Health(msgspec.Struct):
    runner: str
    version: str = ""


class _Listed(msgspec.Struct):
    id: str
    created: int = 0
    owned_by: str = ""
    size_bytes: int | None = None
    capabilities: tuple[str, ...] = ()
    meta: dict[str, int | float | str | bool] = {}


class _List(msgspec.Struct):
    data: list[_Listed]


def recognises(kind: str) -> Callable[[Answers], str | None]:
    """Makes the judge of whether a server is this kind of runner.

    >>> recognises("whisper")({})
    """

    def recognise(answers: Answers) -> str | None:
        health = json_of(answers, HEALTH)
        return text_in(health, "version") or None if health.get("runner") == kind else None

    return recognise


def version(server: AskedServer) -> Conversation[str]:
    return (yield from shape(server, HEALTH, _Health)).version


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    listed = yield from shape(server, MODELS, _List)
    return [
        ModelInfo(
            name=row.id,
            size_bytes=row.size_bytes,
            owned_by=row.owned_by,
            created=row.created,
            capabilities=row.capabilities,
            meta=row.meta,
        )
        for row in listed.data
    ]


def busy() -> Conversation[ReportedLimits]:
    metrics = yield from text("/metrics")
    if metrics is None:
        return ReportedLimits()
    return ReportedLimits(places=gauge(metrics, "hive_runner_places"), waiting=gauge(metrics, "hive_runner_waiting"))


def heard() -> Conversation[Heard | None]:
    """The counters of a runner of sound."""
    metrics = yield from text("/metrics")
    return None if metrics is None else heard_counters(metrics)


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001
    """One request is at work at a time, whatever the engine is."""
    return told or 1, "a runner works on one request at a time"


def runner_launch(
    kind: str, order: Order, *, program_key: str, flags: tuple[str, ...], environment: dict[str, str]
) -> Launch:
    """The start of a runner. `program_key`: the setting of `[inference]` that names its hive-runner; `flags`,
    `environment`: of its kind, besides those of every runner."""
    path: str = getattr(order.inference, program_key)
    command = (
        *(path, kind, "--socket", str(order.socket), "--name", order.name),
        *("--spool", str(order.state)),
        *flags,
    )
    # No hub is asked for anything: its files are here.
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(order.state / "huggingface"), "PYTHONUNBUFFERED": "1"}
    needed = [program(program_key, path)]
    if order.model:
        needed.append(Needed("file", Path(order.model), "put the model there"))
    return Launch(command, order.environment | offline | environment, tuple(needed), order.socket)


ASKING = Asking(
    health_path=HEALTH,  # 503 while its model loads
    version=version,
    models=models,
    busy=busy,
    loaded=openai_answers.all_listed,
    why_not_load="a runner serves the model it was started with",
)


def runner_spec(
    *,
    kind: str,
    label: str,
    category: str,
    adds: frozenset[str],
    launch: Callable[[Order], Launch],
    why_not_ahead: str,
    why_not_flush: str,
    asking: Asking = ASKING,
    not_relayed: Mapping[str, str] = MappingProxyType({}),
    model_format: str = "",
    program: Callable[[InferenceSection], str] | None = None,
) -> BackendSpec:
    """The specification of a kind of runner: all of them are asked alike, and stop late."""
    return BackendSpec(
        kind=kind,
        label=label,
        dialects=frozenset({Dialect.OPENAI}),
        category=category,
        adds=adds,
        lacks=OF_TEXT,
        not_relayed=not_relayed,
        stops_late=True,
        questions=(HEALTH,),
        recognise=recognises(kind),
        asking=asking,
        one_token=openai_answers.completion,
        tokens_in=openai_answers.tokens_in,
        requests=Requests(why_not_ahead=why_not_ahead),
        places=places,
        prefix_cache="none",
        why_not_flush=why_not_flush,
        model_format=model_format,
        program=program,
        launch=launch,
    )
