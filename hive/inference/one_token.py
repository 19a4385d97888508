"""The one control question that costs something: a model is asked for a single token.

A server may answer everything else and still not be able to generate: vLLM with a model its kernels cannot run is
healthy and dies at the first request (seen with 0.32). It is asked before agents are sent to a server, and never else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hive.domain import DIALECTS, BackendInfo, BackendKind, Dialect
from hive.errors import BackendDown
from hive.host.access import NO_ACCESS, Access
from hive.inference import ask
from hive.models.capabilities import limit_name

PROMPT = "Hi"
_OTHER_NAME = "backend_limit_name = max_completion_tokens in [inference] says the limit by the name it takes"


class _OllamaAnswer(msgspec.Struct):
    eval_count: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _OpenAiAnswer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


def question(kind: BackendKind, model: str, limit: str = "max_tokens") -> tuple[str, dict[str, Any]]:
    """Path and body, in the dialect that is the server's own. `limit`: by which name its chats take one.

    >>> question(BackendKind.VLLM, "m")
    ('/v1/completions', {'model': 'm', 'prompt': 'Hi', 'max_tokens': 1})
    """
    if Dialect.OLLAMA in DIALECTS[kind]:
        options = {"num_predict": 1}
        return "/api/generate", {"model": model, "prompt": PROMPT, "stream": False, "options": options}
    if kind is BackendKind.REMOTE:  # many of them chat only
        messages = [{"role": "user", "content": PROMPT}]
        return "/v1/chat/completions", {"model": model, "messages": messages, limit: 1}
    return "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 1}


def tokens_in(kind: BackendKind, body: bytes) -> int:
    """How many tokens an answer says it generated; 0 where it does not say so.

    >>> tokens_in(BackendKind.OLLAMA, b'{"eval_count":1}'), tokens_in(BackendKind.LLAMA, b'{"usage":{}}')
    (1, 0)
    """
    try:
        if Dialect.OLLAMA in DIALECTS[kind]:
            return msgspec.json.decode(body, type=_OllamaAnswer).eval_count
        return msgspec.json.decode(body, type=_OpenAiAnswer).usage.completion_tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


async def generate(
    kind: BackendKind, address: str, model: str, *, within_s: float, access: Access = NO_ACCESS, limit: str = "auto"
) -> None:
    """Returns once `model` has generated a token; loading it is a part of that. `limit`: `backend_limit_name`.

    Raises `BackendDown` where it does not, saying what was answered, and `BackendTimeout`.
    """
    path, body = question(kind, model, limit_name(BackendInfo(kind=kind, address=address), limit) or "max_tokens")
    answer = await ask.post(address, path, body, within_s=within_s, access=access)
    if answer.status != 200:
        said = " ".join(answer.body[:200].decode(errors="replace").split())
        hint = _OTHER_NAME if kind is BackendKind.REMOTE and b"max_completion_tokens" in answer.body else ""
        raise BackendDown(f"asked for a token of {model} it answers {answer.status}: {said}", hint=hint)
    if tokens_in(kind, answer.body) < 1:
        raise BackendDown(f"asked for a token of {model} it generated none")
