"""Any other server of OpenAI's dialect, wherever it runs; whose it is nobody here knows. Data and pure functions."""

from __future__ import annotations

from typing import Any

import msgspec

from hive.backends import openai_answers
from hive.backends.conversation import (
    Answers,
    AskedServer,
    ControlAnswer,
    Conversation,
    get,
    shape,
    text,
)
from hive.backends.openai_answers import MODELS, ONE_TOKEN_PROMPT
from hive.backends.ray_serve import ROUTES, routes_in
from hive.backends.spec import Asking, BackendSpec, Requests
from hive.domain import BackendKind, Dialect, FoundCapabilities, ModelInfo, origin_of
from hive.errors import BackendDown
from hive.settings.table import InferenceSection

VERSIONS = ("openai-version", "x-litellm-version", "x-vllm-version")
"""Header fields in which such a server may tell which it is; OpenAI's dialect has no question for that."""
RAY_SERVE = "Ray Serve"
OPENAIS = (".openai.com", ".openai.azure.com")
"""Ends of the names of OpenAI's own servers, whose newer models refuse `max_tokens`; all of their chats take
`max_completion_tokens`. Others that speak the dialect may pass over that one, and answer without a limit."""


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    created: float | None = None
    max_model_len: object = None
    """vLLM's and SGLang's servers tell it; a server that has something else there is still a server."""


class _Models(msgspec.Struct):
    data: list[_Model]


def recognise(answers: Answers) -> str | None:  # noqa: ARG001
    """None: a list of models is no evidence where nobody named the address (`listed`)."""
    return None


def listed(answer: ControlAnswer) -> str | None:
    """The version of a server at an address that somebody named, by its answer to `GET /v1/models`; None for none."""
    return version_in(answer.headers) if answer.status == 200 and is_list(answer.body) else None


def is_list(body: bytes) -> bool:
    """Whether this is OpenAI's list of models.

    >>> is_list(b'{"object":"list","data":[{"id":"m"}]}'), is_list(b'{"data":{}}'), is_list(b"<html>")
    (True, False, False)
    """
    try:
        msgspec.json.decode(body, type=_Models)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def version_in(headers: dict[str, str]) -> str:
    """Version that the fields of its answers tell, empty where they tell none.

    >>> version_in({"server": "nginx", "openai-version": "2020-10-01"})
    '2020-10-01'
    """
    told = next((headers[name] for name in VERSIONS if headers.get(name)), "")
    return told if len(told) <= 200 and told.isprintable() else ""


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    found = yield from shape(server, MODELS, _Models)
    return [
        ModelInfo(
            name=model.id,
            owned_by=model.owned_by or "",
            created=max(0, int(model.created or 0)),
            context_length=model.max_model_len if isinstance(model.max_model_len, int) else None,
        )
        for model in found.data
    ]


def version(server: AskedServer) -> Conversation[str]:
    answer = yield from get(MODELS)
    if answer.status != 200:
        raise BackendDown(refusal(server, answer.status))
    told = version_in(answer.headers)
    if told or origin_of(server.address).prefix:
        return told
    routes = yield from text(ROUTES)
    return "" if routes is None or routes_in(ControlAnswer(200, {}, routes)) is None else RAY_SERVE


def refusal(server: AskedServer, status: int) -> str:
    """Sentence that says why it is of no use.

    >>> refusal(AskedServer("https://h"), 401)
    'https://h asks for a key (401), and it is shown none'
    """
    if status in (401, 403):
        return f"{server} " + (
            f"refuses Hive's key ({status})" if server.has_key else f"asks for a key ({status}), and it is shown none"
        )
    return f"{server} answers GET {MODELS} with status {status}"


def one_token(model: str, limit: str) -> tuple[str, dict[str, Any]]:
    """Many of them chat only.

    >>> one_token("m", "max_completion_tokens")[1]
    {'model': 'm', 'messages': [{'role': 'user', 'content': 'Hi'}], 'max_completion_tokens': 1}
    """
    messages = [{"role": "user", "content": ONE_TOKEN_PROMPT}]
    return "/v1/chat/completions", {"model": model, "messages": messages, limit: 1}


def limit_name(address: str, setting: str) -> str:
    """The name of a limit of tokens in a chat, where it is not `max_tokens`. `setting`: `backend_limit_name`, for who
    stands before OpenAI's models under another name than theirs.

    >>> [limit_name(at, "auto") for at in ("https://api.openai.com", "https://h")]
    ['max_completion_tokens', '']
    >>> limit_name("https://gateway", "max_completion_tokens")
    'max_completion_tokens'
    """
    if setting != "auto":
        return setting if setting != "max_tokens" else ""
    return "max_completion_tokens" if origin_of(address).name.endswith(OPENAIS) else ""


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001
    return None, "a remote server does not tell; [proxy] backend_concurrency sets a limit"


SPEC = BackendSpec(
    kind=BackendKind.REMOTE,
    label="remote server of OpenAI's dialect",
    dialects=frozenset({Dialect.OPENAI}),
    questions=(MODELS, ROUTES),
    recognise=recognise,
    asking=Asking(
        health_path=MODELS,  # there is no other harmless question
        version=version,
        models=models,
        why_not_load="whoever runs the remote server decides what it has loaded",
        # Servers made with FastAPI have one (vLLM, SGLang); without it it is taken for one that has OpenAI's schema and
        # refuses every other field, as OpenAI's own does.
        described_at="/openapi.json",
        assumed=FoundCapabilities(fields=(), found="OpenAI's schema alone, it describes none of its own"),
    ),
    one_token=one_token,
    tokens_in=openai_answers.tokens_in,
    requests=Requests(
        limit_name=limit_name,
        limit_by_first_name=False,  # OpenAI's newest models refuse a request with both
        short_completions=True,
        why_not_ahead="a remote server is paid by the token, and what it keeps is not for Hive to know",
    ),
    places=places,
    prefix_cache="whoever runs the remote server decides; Hive shows it one key for all agents",
    why_not_flush="what a remote server keeps is for whoever runs it to flush",
    is_as_described=True,
    is_remote=True,
)
