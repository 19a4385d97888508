"""Lists of the models that a caller may use. `GET /v1/models` is made here from the list the daemon pushes. Ollama's
own lists are relayed without the models that the caller may not see, and made here for a backend that has none.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from hive.dialects import ollama_lists
from hive.dialects.translators import counted
from hive.domain import Caller, Dialect, ModelInfo
from hive.endpoints.endpoints import MODEL_PREFIX, Endpoint
from hive.endpoints.pages import cut, page_of
from hive.errors import BackendDown, ModelNotFound
from hive.models.names import spelled
from hive.policy import Act, may

_encode = msgspec.json.Encoder().encode
TAGS, RUNNING, SHOW = b"/api/tags", b"/api/ps", b"/api/show"
FILTERED = frozenset({TAGS, RUNNING})
"""Lists of models that Ollama answers; a caller of a tenant with limited models gets its own part of them."""


class _Named(msgspec.Struct):
    name: str


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_rows = msgspec.json.Decoder(list[msgspec.Raw]).decode
_named = msgspec.json.Decoder(_Named).decode


class OwnAnswer(NamedTuple):
    """An answer of Hive's own."""

    content: bytes
    content_type: bytes = b"application/json"
    fields: bytes = b""
    """Lines of the head that go with it."""


class _Row(msgspec.Struct):
    """A model as OpenAI's API lists it, and as Anthropic's does. `created` and `created_at` are one time: in Unix
    seconds, and as RFC 3339 has it. `max_model_len`, `parent` (of an adapter) and `meta`: vLLM's and llama-server's
    names for what they tell."""

    id: str
    created: int
    owned_by: str
    display_name: str
    created_at: str
    object: str = "model"
    type: str = "model"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET
    meta: dict[str, int | float | str | bool] | msgspec.UnsetType = msgspec.UNSET


class _List(msgspec.Struct):
    """`has_more`, `first_id`, `last_id`: how Anthropic's clients page; OpenAI's pass over them."""

    data: list[_Row]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


def answer(target: bytes, models: list[ModelInfo], caller: Caller) -> bytes:
    """The JSON of the list, or the page of it that the query asks for, or of the one model the target names, as far as
    `caller` may see it. Raises ModelNotFound, BadRequest.

    An id with reserved characters is compared plain, and as openai-python 3.51 writes it (`meta%2Fllama-3%20x`).

    >>> from hive.domain import CallerKind
    >>> alice = Caller(CallerKind.AGENT, "a1")
    >>> answer(b"/v1/models/meta%2Fx", [ModelInfo(name="meta/x", owned_by="vllm")], alice)[:48]
    b'{"id":"meta/x","created":0,"owned_by":"vllm","di'
    """
    seen = [model for model in models if may(caller, Act.SEE, model.name) is None]
    path = target.partition(b"?")[0]
    if not path.startswith(MODEL_PREFIX):
        part = cut([model.name for model in seen], page_of(target))
        rows = [_row(model) for model in seen[part.first : part.last]]
        ends = (rows[0].id, rows[-1].id) if rows else (None, None)
        return _encode(_List(rows, part.has_more, *ends))
    model = _named_in(seen, path[len(MODEL_PREFIX) :])
    return _encode(_row(model))


def _named_in(models: list[ModelInfo], wanted: bytes) -> ModelInfo:
    """The model that the end of a target names, under the name it is asked by. Raises ModelNotFound.

    >>> _named_in([ModelInfo(name="tiny:latest"), ModelInfo(name="tiny:1b")], b"TINY").name
    'TINY'
    """
    plain = wanted.decode("utf-8", "replace")
    for name in (plain, unquote(plain)):
        try:
            return msgspec.structs.replace(found(models, name), name=name)
        except ModelNotFound:
            continue
    raise ModelNotFound("no such model", hint="GET /v1/models lists what there is")


def answer_any(endpoint: Endpoint, target: bytes, models: list[ModelInfo], caller: Caller, named: str) -> OwnAnswer:
    """Hive's own answer to a request of `endpoint`; `named`: the model its body names. Raises ModelNotFound,
    BadRequest."""
    if endpoint.dialect is not Dialect.OLLAMA:
        return OwnAnswer(answer(target, models, caller))
    seen = [model for model in models if may(caller, Act.SEE, model.name) is None]
    match endpoint.name:
        case "/api/tags":
            return OwnAnswer(ollama_lists.tags(seen))
        case "/api/ps":
            return OwnAnswer(ollama_lists.running(seen))
        case "/api/version":
            return OwnAnswer(ollama_lists.version())
        case "/api/show":
            return OwnAnswer(ollama_lists.shown(found(seen, named)))
        case _:
            return OwnAnswer(ollama_lists.RUNNING, b"text/plain; charset=utf-8")


def estimated(told: bytes, body: list[bytes]) -> OwnAnswer:
    """An estimate of a prompt's tokens, marked as no count; made from the body if there is none yet. Raises
    BadRequest."""
    return OwnAnswer(told or counted(_decode(b"".join(body))), fields=b"x-hive-estimated: true\r\n")


def found(models: list[ModelInfo], name: str) -> ModelInfo:
    """The model of that name; neither case nor `:latest` tells two models apart where one is meant. Raises
    ModelNotFound.

    >>> found([ModelInfo(name="tiny"), ModelInfo(name="tiny:1b")], "Tiny:latest").name
    'tiny'
    """
    for model in models:
        if model.name == name:
            return model
    alike = [model for model in models if spelled(model.name) == spelled(name)]
    if len(alike) != 1:
        raise no_such_model(name)
    return alike[0]


def no_such_model(name: str) -> ModelNotFound:
    """The error for a model that no backend offers under that name.

    >>> no_such_model("gpt-9").message
    "model 'gpt-9' not found"
    """
    return ModelNotFound(f"model '{name[:80]}' not found", hint="GET /v1/models and GET /api/tags list what there is")


def _row(model: ModelInfo) -> _Row:
    made_at = ollama_lists.time_of(model.created)
    row = _Row(model.name, model.created, model.owned_by or "hive", model.name, made_at)
    row.max_model_len = model.context_length or msgspec.UNSET
    row.parent = model.parent or msgspec.UNSET
    row.meta = model.meta or msgspec.UNSET
    return row


def is_filtered(target: bytes, caller: Caller) -> bool:
    """Whether the backend's answer to this target is a list of which `caller` may see a part only."""
    return caller.models is not None and target in FILTERED


def filtered(
    answer: bytes, caller: Caller, aliases: Sequence[tuple[str, str]] = (), hidden: frozenset[str] = frozenset()
) -> bytes:
    """Ollama's list without the models that `caller` may not see, nor those of `hidden`, and with `aliases`, each as a
    further model like the one it stands for. Raises BackendDown where it is no such list.

    >>> from hive.domain import CallerKind
    >>> alice = Caller(CallerKind.AGENT, "a1", models=frozenset({"a"}))
    >>> filtered(b'{"models":[{"name":"a:latest","size":1e2},{"name":"b"}]}', alice)
    b'{"models":[{"name":"a:latest","size":1e2}]}'
    >>> bob = Caller(CallerKind.AGENT, "b1")
    >>> filtered(b'{"models":[{"name":"a","model":"a","size":1e2}]}', bob, [("gpt-4", "a")])
    b'{"models":[{"name":"a","model":"a","size":1e2},{"name":"gpt-4","model":"gpt-4","size":1e2}]}'
    """
    try:
        listed = _decode(answer)
        models = _rows(listed.get("models", msgspec.Raw(b"[]")))
        by_name = {_named(model).name: model for model in models}
        shown = [name for name in by_name if name not in hidden and may(caller, Act.SEE, name) is None]
        seen = [by_name[name] for name in shown]
        for alias, target in aliases:
            if target in by_name and may(caller, Act.SEE, alias) is None:
                own = msgspec.Raw(_encode(alias))
                seen.append(msgspec.Raw(_encode({**_decode(by_name[target]), "name": own, "model": own})))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BackendDown("the backend's list of models is none") from None
    return _encode({**listed, "models": seen})
