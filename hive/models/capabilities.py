"""A backend's capabilities, by what it was found to take. Pure.

A server that does not know a field ignores it (llama-server, vLLM) or refuses the whole request (OpenAI's own, and
similar ones). Neither answers the request as asked. So a field that is known not to be taken is not sent, or the client
is told.
"""

from __future__ import annotations

import msgspec

from hive.domain import BackendInfo

EXTRA = (
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty", "repeat_last_n", "chat_template_kwargs"),
    *("thinking_token_budget", "thinking_budget_tokens", "continue_final_message", "add_generation_prompt"),
    *("truncate_prompt_tokens", "cache_salt", "cache_prompt", "priority", "reasoning_content"),
)
"""Fields of no schema of OpenAI's that Hive's translations make or Hive puts in; the last one within a message."""


class Over(msgspec.Struct, frozen=True):
    """One field that a server ignores silently.

    `refused`: the answer would have another shape than was asked for (several instead of one, JSON by a schema), so the
    request is refused; else it goes there, and the field is told in X-Hive-Ignored. `idle`: values that ask for
    nothing, or for what happens anyway; without any the empty ones do. `inner`: a field of the object `field`.
    """

    field: str
    why: str
    refused: bool = False
    idle: tuple[object, ...] = ()
    inner: str = ""

    @property
    def name(self) -> str:
        return f"{self.field}.{self.inner}" if self.inner else self.field


NO_SCHEMA = "it answers in any words, and no schema holds it"
"""Reason of a server that ignores a field which asks for JSON of a shape."""
EDITS = Over("context_management", "it edits no conversation", idle=({}, {"edits": []}))
"""Only Anthropic's own servers do."""


def lacking(backend: BackendInfo) -> tuple[str, ...]:
    """The fields of EXTRA that it is known not to take; none if nothing is known.

    >>> from hive.domain import FoundCapabilities
    >>> told = FoundCapabilities(fields=tuple(name for name in EXTRA if name != "min_p"))
    >>> lacking(BackendInfo(kind="remote", address="x", capabilities=told))
    ('min_p',)
    >>> lacking(BackendInfo(kind="vllm", address="x"))
    ()
    """
    taken = backend.capabilities.fields
    return () if taken is None else tuple(name for name in EXTRA if name not in taken)


def lacks_endpoint(backend: BackendInfo, endpoint: str) -> bool:
    """Whether it said of itself that it does not answer this path.

    >>> from hive.domain import FoundCapabilities
    >>> told = FoundCapabilities(endpoints=("/v1/messages",))
    >>> vllm = BackendInfo(kind="vllm", address="x", capabilities=told)
    >>> lacks_endpoint(vllm, "/v1/embeddings"), lacks_endpoint(vllm, "/v1/messages")
    (True, False)
    """
    told = backend.capabilities.endpoints
    return told is not None and endpoint not in told


class Makes(msgspec.Struct, frozen=True):
    """A sort of model, by its output. `capability`: in a list of models, as Ollama names it; `start`: the model that an
    operator has to start."""

    what: str
    capability: str
    endpoints: tuple[str, ...]
    start: str


_TEXT_MODEL = Makes(
    "text", "completion", ("/v1/chat/completions", "/v1/completions", "/v1/messages"), "one that generates text"
)
_MAKES = (
    _TEXT_MODEL,
    Makes(
        "embeddings",
        "embedding",
        ("/v1/embeddings",),
        "an embedding model (vLLM with --runner pooling, llama-server with --embeddings)",
    ),
    Makes(
        "scores",
        "reranking",
        ("/v1/rerank", "/rerank", "/v1/score", "/score"),
        "a reranker (vLLM with --runner pooling, llama-server with --reranking)",
    ),
)


def without_text(backend: BackendInfo) -> str:
    """The capability of its models if it said that they make vectors or scores and no text; else empty. A model that
    embeds has scores as well: of two embeddings.

    >>> from hive.domain import FoundCapabilities
    >>> paths = (("/v1/embeddings", "/v1/score"), ("/v1/score",), ("/v1/completions", "/v1/embeddings"), ())
    >>> told = [FoundCapabilities(endpoints=of) for of in paths]
    >>> [without_text(BackendInfo(kind="vllm", address="x", capabilities=can)) for can in told]
    ['embedding', 'reranking', '', '']
    """
    made = _made_by(backend)
    return made[0].capability if made and _TEXT_MODEL not in made else ""


def why_lacking(backend: BackendInfo, endpoint: str) -> tuple[str, str]:
    """The reason why it lacks a path, by its own word, and what to do; both empty if its kind decides that.

    >>> from hive.domain import FoundCapabilities
    >>> told = FoundCapabilities(endpoints=("/v1/completions",), found="/openapi.json")
    >>> vllm = BackendInfo(kind="vllm", address="x", capabilities=told)
    >>> why_lacking(vllm, "/v1/embeddings")[0], why_lacking(vllm, "/tokenize")
    ('its model makes text and no embeddings', ('/openapi.json has no /tokenize', ''))
    """
    if not lacks_endpoint(backend, endpoint):
        return "", ""
    made = _made_by(backend)
    wanted = next((sort for sort in _MAKES if endpoint in sort.endpoints), None)
    if not made or wanted is None or wanted in made:
        return f"{backend.capabilities.found} has no {endpoint}", ""
    why = f"its model makes {', '.join(sort.what for sort in made)} and no {wanted.what}"
    return why, f"an operator can start {wanted.start} and switch to it: hive backend switch"


def _made_by(backend: BackendInfo) -> list[Makes]:
    """The kinds of output of a backend, by the paths that it told; none if it told nothing."""
    told = {*(backend.capabilities.endpoints or ())}
    return [sort for sort in _MAKES if told.intersection(sort.endpoints)]
