"""What a backend can do with a request, by what it was found to take. Pure.

A server that does not know a field passes over it (llama-server, vLLM) or refuses the whole request (OpenAI's own, and
what is built like it). Neither is an answer to what was asked, so what is known not to be taken is not sent.
"""

from __future__ import annotations

from hive.domain import BackendInfo, BackendKind

EXTRA = (
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty", "repeat_last_n", "chat_template_kwargs"),
    *("thinking_token_budget", "thinking_budget_tokens", "continue_final_message", "add_generation_prompt"),
    *("truncate_prompt_tokens", "cache_salt", "cache_prompt", "priority", "reasoning_content"),
)
"""Fields of no schema of OpenAI's that Hive's translations make or Hive puts in; the last one within a message."""

LLAMA_IGNORES = {"/v1/completions": {"suffix": "llama-server passes over it (measured, 0c1e570)"}}
"""By endpoint: what a llama-server is sent in vain, and gives another answer than was asked for."""


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


def ignored(backend: BackendInfo, endpoint: str) -> tuple[tuple[str, str], ...]:
    """Fields of this endpoint that it would pass over without a word, and why they are refused.

    >>> [name for name, why in ignored(BackendInfo(kind=BackendKind.LLAMA, address="x"), "/v1/completions")]
    ['suffix']
    """
    return tuple(LLAMA_IGNORES.get(endpoint, {}).items()) if backend.kind is BackendKind.LLAMA else ()


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
