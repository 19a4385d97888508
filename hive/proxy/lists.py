"""Lists show a caller what it may use: `GET /v1/models` is made here from the list the daemon pushes, Ollama's own
lists are relayed, without what is not for this caller. Pure."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from hive.domain import Caller, ModelInfo
from hive.errors import BackendDown, NotFound
from hive.policy import Act, may
from hive.proxy.endpoints import MODEL_PREFIX

_encode = msgspec.json.Encoder().encode
FILTERED = frozenset({b"/api/tags", b"/api/ps"})
"""Lists of models that the backend answers; a caller whose tenant is limited gets its own part of them."""


class _Named(msgspec.Struct):
    name: str


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_rows = msgspec.json.Decoder(list[msgspec.Raw]).decode
_named = msgspec.json.Decoder(_Named).decode


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


def is_filtered(target: bytes, caller: Caller) -> bool:
    """Whether the backend's answer to this target is a list of which `caller` may see a part only."""
    return caller.models is not None and target in FILTERED


def filtered(answer: bytes, caller: Caller) -> bytes:
    """Ollama's list without the models that `caller` may not see. Raises BackendDown where it is no such list.

    >>> from hive.domain import CallerKind
    >>> alice = Caller(CallerKind.AGENT, "a1", models=frozenset({"a"}))
    >>> filtered(b'{"models":[{"name":"a:latest","size":1e2},{"name":"b"}]}', alice)
    b'{"models":[{"name":"a:latest","size":1e2}]}'
    """
    try:
        listed = _decode(answer)
        models = _rows(listed.get("models", msgspec.Raw(b"[]")))
        seen = [model for model in models if may(caller, Act.SEE, _named(model).name) is None]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BackendDown("the backend's list of models is none") from None
    return _encode({**listed, "models": seen})
