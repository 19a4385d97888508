"""Every way between two dialects, by the client's endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from hive.dialects import token_estimate
from hive.dialects.translation import TranslatedEndpoint

RESPONSES = "/v1/responses"


@cache
def way_of(endpoint: str) -> TranslatedEndpoint:
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


def counted(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """The answer of `/v1/messages/count_tokens` where no server counts: an estimate, after the edits it asks for.

    Raises BadRequest. As above, what edits is loaded when it is first needed.
    """
    if bytes(fields.get("context_management", b"null")) == b"null":
        return token_estimate.told(fields)
    from hive.dialects.anthropic_editing import told_after_edits

    return told_after_edits(dict(fields))
