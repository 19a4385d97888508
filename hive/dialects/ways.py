"""Every way between two dialects, by the client's endpoint."""

from __future__ import annotations

from functools import cache

from hive.dialects.translation import Way

RESPONSES = "/v1/responses"


@cache
def way_of(endpoint: str) -> Way:
    """The way from this endpoint of a client's dialect to a backend that speaks OpenAI's. Raises KeyError for none.

    Loaded when it is first gone: where the backend speaks the client's dialect, never.
    """
    if endpoint.startswith("/api/"):
        from hive.dialects.ollama_openai import WAYS
    elif endpoint == RESPONSES:
        from hive.dialects.openai_responses import WAYS
    else:
        from hive.dialects.anthropic_openai import WAYS
    return WAYS[endpoint]
