"""The one control question that costs something: a model is asked for a single token.

A server may answer everything else and still not be able to generate: vLLM with a model its kernels cannot run is
healthy and dies at the first request (seen with 0.32). It is asked before agents are sent to a server, and never else.
"""

from __future__ import annotations

from hive.backends import ask, openai_answers
from hive.backends.conversation import ControlAnswer
from hive.backends.kinds import spec_of
from hive.backends.spec import BackendSpec
from hive.errors import BackendDown
from hive.host.access import NO_ACCESS, RemoteAccess

_OTHER_NAME = "backend_limit_name = max_completion_tokens in [inference] says the limit by the name it takes"


async def generate(
    kind: str, address: str, model: str, *, within_s: float, access: RemoteAccess = NO_ACCESS, limit: str = "auto"
) -> None:
    """Returns once `model` has generated a token; loading it is a part of that. `limit`: `backend_limit_name`.

    Raises `BackendDown` where it does not, saying what was answered, and `BackendTimeout`.
    """
    spec = spec_of(kind)
    path, body = spec.one_token(model, spec.requests.limit_name(address, limit) or "max_tokens")
    answer = await ask.post(address, path, body, within_s=within_s, access=access)
    _check(answer, spec, model)


async def likeliest(kind: str, address: str, model: str, *, within_s: float) -> str:
    """The text of the one token that `model` finds likeliest: of the same server the same, whenever it is asked while
    nothing else runs there. Empty where such a server does not tell it so. Raises as `generate`."""
    spec = spec_of(kind)
    path, body = spec.one_token(model, spec.requests.limit_name(address, "auto") or "max_tokens")
    answer = await ask.post(address, path, body | {"temperature": 0}, within_s=within_s)
    _check(answer, spec, model)
    return openai_answers.text_in(answer.body)


def _check(answer: ControlAnswer, spec: BackendSpec, model: str) -> None:
    if answer.status != 200:
        said = " ".join(answer.body[:200].decode(errors="replace").split())
        hint = _OTHER_NAME if spec.is_remote and b"max_completion_tokens" in answer.body else ""
        raise BackendDown(f"asked for a token of {model} it answers {answer.status}: {said}", hint=hint)
    if spec.tokens_in(answer.body) < 1:
        raise BackendDown(f"asked for a token of {model} it generated none")
