"""What a backend can do with a request, by what it was found to take. Pure.

A server that does not know a field passes over it (llama-server, vLLM) or refuses the whole request (OpenAI's own, and
what is built like it). Neither is an answer to what was asked, so what is known not to be taken is not sent, or told.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hive.domain import BackendInfo, BackendKind, origin_of

EXTRA = (
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty", "repeat_last_n", "chat_template_kwargs"),
    *("thinking_token_budget", "thinking_budget_tokens", "continue_final_message", "add_generation_prompt"),
    *("truncate_prompt_tokens", "cache_salt", "cache_prompt", "priority", "reasoning_content"),
)
"""Fields of no schema of OpenAI's that Hive's translations make or Hive puts in; the last one within a message."""


OPENAIS = (".openai.com", ".openai.azure.com")
"""Ends of the names of OpenAI's own servers, whose newer models refuse `max_tokens`; all of their chats take
`max_completion_tokens`. Others that speak the dialect may pass over that one, and answer without a limit."""


class Over(msgspec.Struct, frozen=True):
    """One field that a server passes over without a word.

    `refused`: the answer would have another shape than was asked for (several instead of one, JSON by a schema), so
    nobody is asked; else the request goes there, and the field is told in X-Hive-Ignored. `idle`: values that ask
    for nothing, or for what happens anyway; without any the empty ones do. `inner`: a field of the object `field`.
    """

    field: str
    why: str
    refused: bool = False
    idle: tuple[object, ...] = ()
    inner: str = ""

    @property
    def name(self) -> str:
        return f"{self.field}.{self.inner}" if self.inner else self.field


_SCHEMA = "it answers in any words, and no schema holds it"
_ONE = "it gives one answer, however many are asked for"
_BEST = "it gives the first answer it makes"
_BIAS = "it weighs all tokens as the model does"
_MODEL_CHOOSES = "the model alone chooses whether it calls a tool, and which"
_NO_FUNCTIONS = "it has tools, and not what OpenAI had before them"
_TEXT = "it answers in text"
_NO_DOCUMENTS = Over("return_documents", "it answers with each document's index alone", idle=(False,))
_EDITS = Over("context_management", "it edits no conversation", idle=({}, {"edits": []}))
PASSED_OVER: Mapping[BackendKind, Mapping[str, tuple[Over, ...]]] = {
    BackendKind.OLLAMA: {  # measured with 0.17.4 and 0.32.15; openai/openai.go, anthropic/anthropic.go of 2026-08
        "/v1/chat/completions": (
            Over("n", _ONE, refused=True, idle=(1,)),
            Over("audio", _TEXT, refused=True),
            Over("tool_choice", _MODEL_CHOOSES, idle=("auto",)),
            Over("parallel_tool_calls", "a model that can call several tools at once may", idle=(True,)),
            Over("logit_bias", _BIAS),
            Over("functions", _NO_FUNCTIONS),
            Over("function_call", _NO_FUNCTIONS, idle=("auto", "none")),
        ),
        "/v1/completions": (
            Over("n", _ONE, refused=True, idle=(1,)),
            Over("response_format", _SCHEMA, refused=True, idle=({"type": "text"},)),
            Over("best_of", _BEST, idle=(1,)),
            Over("logit_bias", _BIAS),
        ),
        "/v1/responses": (
            Over("tool_choice", _MODEL_CHOOSES, idle=("auto",)),
            Over("parallel_tool_calls", "a model that can call several tools at once may", idle=(True,)),
        ),
        "/v1/messages": (
            Over("output_config", _SCHEMA, refused=True, inner="format"),
            Over("output_format", _SCHEMA, refused=True),
            Over("tool_choice", _MODEL_CHOOSES, idle=({"type": "auto"},)),
            _EDITS,
        ),
    },
    BackendKind.LLAMA: {  # measured with 0c1e570
        "/v1/completions": (Over("suffix", "it continues the prompt, and knows of nothing behind it", refused=True),),
        "/v1/rerank": (_NO_DOCUMENTS,),
        "/rerank": (_NO_DOCUMENTS,),
        "/tokenize": (
            Over("prompt", "llama-server splits the text of `content`", refused=True),
            Over("messages", "llama-server splits the text of `content` alone", refused=True),
        ),
        "/v1/messages": (
            Over("output_config", _SCHEMA, refused=True, inner="format"),
            Over("output_format", _SCHEMA, refused=True),
            Over(
                "thinking", "the template alone decides whether it thinks", idle=("enabled", "adaptive"), inner="type"
            ),
            _EDITS,
        ),
    },
    BackendKind.VLLM: {"/v1/messages": (_EDITS,)},  # measured with 0.32.0
}
"""By kind and endpoint, in the server's own dialect: what it is asked in vain."""


def lacking(backend: BackendInfo) -> tuple[str, ...]:
    """Which of EXTRA it is known not to take; none of them where nothing is known.

    >>> from hive.domain import BackendCapabilities
    >>> told = BackendCapabilities(fields=tuple(name for name in EXTRA if name != "min_p"))
    >>> lacking(BackendInfo(kind=BackendKind.REMOTE, address="x", capabilities=told))
    ('min_p',)
    >>> lacking(BackendInfo(kind=BackendKind.VLLM, address="x"))
    ()
    """
    taken = backend.capabilities.fields
    return () if taken is None else tuple(name for name in EXTRA if name not in taken)


def limit_name(backend: BackendInfo, setting: str = "auto") -> str:
    """The name of a limit of tokens in a chat, where it is not `max_tokens`. `setting`: `backend_limit_name`, for who
    stands before OpenAI's models under another name than theirs.

    >>> [limit_name(BackendInfo(kind=BackendKind.REMOTE, address=at)) for at in ("https://api.openai.com", "https://h")]
    ['max_completion_tokens', '']
    >>> limit_name(BackendInfo(kind=BackendKind.REMOTE, address="https://gateway"), "max_completion_tokens")
    'max_completion_tokens'
    """
    if setting != "auto":
        return setting if backend.kind is BackendKind.REMOTE and setting != "max_tokens" else ""
    is_openais = backend.kind is BackendKind.REMOTE and origin_of(backend.address).name.endswith(OPENAIS)
    return "max_completion_tokens" if is_openais else ""


def passed_over(backend: BackendInfo, endpoint: str) -> tuple[Over, ...]:
    """Fields of this endpoint that it would pass over without a word.

    >>> [over.field for over in passed_over(BackendInfo(kind=BackendKind.LLAMA, address="x"), "/v1/completions")]
    ['suffix']
    """
    return PASSED_OVER.get(backend.kind, {}).get(endpoint, ())


def lacks_endpoint(backend: BackendInfo, endpoint: str) -> bool:
    """Whether it said of itself that it does not answer this path.

    >>> from hive.domain import BackendCapabilities
    >>> told = BackendCapabilities(endpoints=("/v1/messages",))
    >>> vllm = BackendInfo(kind=BackendKind.VLLM, address="x", capabilities=told)
    >>> lacks_endpoint(vllm, "/v1/embeddings"), lacks_endpoint(vllm, "/v1/messages")
    (True, False)
    """
    told = backend.capabilities.endpoints
    return told is not None and endpoint not in told


class Makes(msgspec.Struct, frozen=True):
    """What a model of one sort makes. `capability`: in a list of models, as Ollama says it; `start`: what an operator
    starts to have one."""

    what: str
    capability: str
    endpoints: tuple[str, ...]
    start: str


_TEXT_MODEL = Makes(
    *("text", "completion", ("/v1/chat/completions", "/v1/completions", "/v1/messages")), "one that generates text"
)
_MAKES = (
    _TEXT_MODEL,
    Makes(
        *("embeddings", "embedding", ("/v1/embeddings",)),
        "an embedding model (vLLM with --runner pooling, llama-server with --embeddings)",
    ),
    Makes(
        *("scores", "reranking", ("/v1/rerank", "/rerank", "/v1/score", "/score")),
        "a reranker (vLLM with --runner pooling, llama-server with --reranking)",
    ),
)


def without_text(backend: BackendInfo) -> str:
    """The capability of its models where it said that they make vectors or scores and no text; else empty. Whose model
    embeds has scores as well: of two embeddings.

    >>> from hive.domain import BackendCapabilities
    >>> paths = (("/v1/embeddings", "/v1/score"), ("/v1/score",), ("/v1/completions", "/v1/embeddings"), ())
    >>> told = [BackendCapabilities(endpoints=of) for of in paths]
    >>> [without_text(BackendInfo(kind=BackendKind.VLLM, address="x", capabilities=can)) for can in told]
    ['embedding', 'reranking', '', '']
    """
    made = _made_by(backend)
    return made[0].capability if made and _TEXT_MODEL not in made else ""


def why_lacking(backend: BackendInfo, endpoint: str) -> tuple[str, str]:
    """Why it does not answer a path that it said it lacks, and what to do; both empty where its kind says it.

    >>> from hive.domain import BackendCapabilities
    >>> told = BackendCapabilities(endpoints=("/v1/completions",), found="/openapi.json")
    >>> vllm = BackendInfo(kind=BackendKind.VLLM, address="x", capabilities=told)
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
    """By the paths that it told; none where it told nothing."""
    told = {*(backend.capabilities.endpoints or ())}
    return [sort for sort in _MAKES if told.intersection(sort.endpoints)]


def tells_all(backend: BackendInfo) -> bool:
    """Whether a path that it does not describe is one that it does not have: vLLM makes its description of its routes.
    What stands before other servers may route more than it describes."""
    return backend.kind is BackendKind.VLLM
