"""Hive's answers to an agent that asks to load, unload or fetch a model: the server is not asked. Pure.

No agent decides which models are loaded: one agent's unload would evict the model that all others use. So the answer
says that a model that is there is loaded, or unloaded, and nothing happens; `X-Hive-Dropped` names `keep_alive`.
"""

from __future__ import annotations

from hive.dialects import ollama_loading
from hive.domain import ModelInfo
from hive.errors import HiveError, NotFound, Refusal
from hive.proxy.body import Asked
from hive.proxy.endpoints import PULL, Endpoint
from hive.proxy.lists import OwnAnswer, found

LINES = b"application/x-ndjson"
JSON = b"application/json; charset=utf-8"


def is_asked(endpoint: Endpoint, asked: Asked) -> bool:
    """Whether it is about a model itself: there is no prompt."""
    return bool(asked.loading) or endpoint is PULL


def answer(endpoint: Endpoint, asked: Asked, served: str, models: list[ModelInfo], now: float) -> OwnAnswer:
    """The answer where `served`, the model that is meant, is one of `models`. Raises NotFound, and Refusal for one that
    is to be fetched.

    >>> tiny = Asked("tiny", True, [], loading="load")
    >>> answer(PULL, tiny, "tiny", [ModelInfo(name="tiny:latest")], 0.0)
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
