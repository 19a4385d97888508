"""Hive's own answers to requests to the model: lists, estimates, and what asks to load, unload or fetch a model. The
server is not asked.

No agent decides which models are loaded: one agent's unload would evict the model that all others use. So the answer
says that a model that is there is loaded, or unloaded, and nothing happens; `X-Hive-Dropped` names `keep_alive`.
"""

from __future__ import annotations

import time

from hive.bodies.body import Asked
from hive.dialects import ollama_loading
from hive.domain import ModelInfo
from hive.endpoints.endpoints import COUNT, PULL, Endpoint
from hive.endpoints.lists import RUNNING, OwnAnswer, answer_any, estimated, found
from hive.errors import HiveError, NotFound, Refusal
from hive.proxy.datapath import DataPath, Decided
from hive.proxy.refusals import no_backend

LINES = b"application/x-ndjson"
JSON = b"application/json; charset=utf-8"


def said_here(path: DataPath, decided: Decided, asked: Asked | None, rung: str = "") -> OwnAnswer:
    """The answer to a request that Hive answers itself (`DataPath.answers`), or that is about loading a model. Raises
    NotFound, Refusal, Saturated."""
    endpoint = decided.endpoint
    if asked is not None and endpoint.name == COUNT:
        return estimated(asked.kept, asked.upstream)
    models, caller = path.routing.seen(endpoint, decided.caller), path.routing.looker(decided.caller)
    if endpoint.target == RUNNING and path.slots.pooled:
        models = [model for model in models if path.slots.is_warm(model.name)]
    if asked is None or not (asked.loading or endpoint is PULL):
        named = asked.answering if asked is not None else ""
        return answer_any(endpoint, decided.target, models, caller, named)
    served, slot = path.slots.routed(rung or asked.model, decided.caller)
    if slot.pool is None:
        raise slot.why_no_way or no_backend()
    return loaded(endpoint, asked, served, models, time.time())


def loaded(endpoint: Endpoint, asked: Asked, served: str, models: list[ModelInfo], now: float) -> OwnAnswer:
    """The answer where `served`, the model that is meant, is one of `models`. Raises NotFound, and Refusal for one that
    is to be fetched.

    >>> tiny = Asked("tiny", True, [], loading="load")
    >>> loaded(PULL, tiny, "tiny", [ModelInfo(name="tiny:latest")], 0.0)
    OwnAnswer(content=b'{"status":"success"}\\n', content_type=b'application/x-ndjson', fields=b'')
    """
    try:
        found(models, served)
    except NotFound as error:
        raise refusal(endpoint, error) from None
    if endpoint is PULL:
        return OwnAnswer(ollama_loading.fetched(stream=asked.stream), LINES if asked.stream else JSON)
    return OwnAnswer(ollama_loading.done(endpoint.name, asked.model, asked.loading, now), JSON)


def refusal(endpoint: Endpoint, error: HiveError) -> HiveError:
    """The error of a model that is not there: to fetch one is refused by policy, and no fault of its name.

    >>> refusal(PULL, NotFound("model 'x' not found")).status
    403
    """
    if endpoint is PULL and isinstance(error, NotFound):
        return Refusal(f"{error.message}: agents fetch no models", hint="an operator does: hive model pull NAME")
    return error
