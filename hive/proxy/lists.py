"""`GET /v1/models` and `/v1/models/{id}`, answered from the list the daemon pushes. Pure."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from hive.domain import Caller, ModelInfo
from hive.errors import NotFound
from hive.policy import Act, may
from hive.proxy.endpoints import MODEL_PREFIX

_encode = msgspec.json.Encoder().encode


class _Row(msgspec.Struct):
    """A model as OpenAI's API lists it. `created`: Unix seconds."""

    id: str
    created: int
    owned_by: str
    object: str = "model"


class _List(msgspec.Struct):
    data: list[_Row]
    object: str = "list"


def answer(target: bytes, models: list[ModelInfo], caller: Caller) -> bytes:
    """The JSON of the list, or of the one model the target names, as far as `caller` may see it. Raises NotFound.

    An id with reserved characters is compared as openai-python 3.51 writes it (`meta%2Fllama-3%20x`) and plain.

    >>> from hive.domain import CallerKind
    >>> alice = Caller(CallerKind.AGENT, "a1")
    >>> answer(b"/v1/models/meta%2Fx", [ModelInfo(name="meta/x", owned_by="vllm")], alice)
    b'{"id":"meta/x","created":0,"owned_by":"vllm","object":"model"}'
    """
    seen = [model for model in models if may(caller, Act.SEE, model.name) is None]
    if not target.startswith(MODEL_PREFIX):
        return _encode(_List([_row(model) for model in seen]))
    wanted = target[len(MODEL_PREFIX) :]
    for model in seen:
        if wanted in (model.name.encode(), quote(model.name, safe="").encode()):
            return _encode(_row(model))
    raise NotFound("no such model; GET /v1/models lists what there is")


def _row(model: ModelInfo) -> _Row:
    return _Row(model.name, model.created, model.owned_by or "hive")
