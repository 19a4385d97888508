"""Description of a server by itself in OpenAPI (`/openapi.json`): the paths it answers, the fields it takes. Pure."""

from __future__ import annotations

import msgspec

from hive.backends.vllm_fields import PRIORITY, SALT
from hive.domain import FoundCapabilities
from hive.models.capabilities import EXTRA

MAX_DEPTH = 8
"""Of references one behind another."""
IN_A_MESSAGE = "reasoning_content"
"""Taken for granted: servers that describe themselves pass over what they do not know in a message."""
_ASKED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")
"""A server that answers none of them is no inference server."""


class _Schema(msgspec.Struct):
    ref: str = msgspec.field(name="$ref", default="")
    properties: dict[str, msgspec.Raw] = {}
    any_of: list[_Schema] = msgspec.field(name="anyOf", default_factory=list)
    one_of: list[_Schema] = msgspec.field(name="oneOf", default_factory=list)
    all_of: list[_Schema] = msgspec.field(name="allOf", default_factory=list)


class _Media(msgspec.Struct):
    schema: _Schema = msgspec.field(default_factory=_Schema)


class _Body(msgspec.Struct):
    content: dict[str, _Media] = {}


class _Operation(msgspec.Struct):
    request_body: _Body | None = msgspec.field(name="requestBody", default=None)


class _Path(msgspec.Struct):
    post: _Operation | None = None


class _Components(msgspec.Struct):
    schemas: dict[str, _Schema] = {}


class _Description(msgspec.Struct):
    paths: dict[str, _Path] = {}
    components: _Components = msgspec.field(default_factory=_Components)


def capabilities(description: bytes) -> FoundCapabilities | None:
    """The capabilities it describes; None where it is no OpenAPI or describes nothing that is asked of a model.

    >>> chat = b'{"post":{"requestBody":{"content":{"application/json":{"schema":{"$ref":"#/components/schemas/C"}}}}}}'
    >>> schemas = b'{"C":{"properties":{"model":{},"top_k":{}}}}'
    >>> told = capabilities(b'{"paths":{"/v1/chat/completions":%b},"components":{"schemas":%b}}' % (chat, schemas))
    >>> told.endpoints, told.fields
    (('/v1/chat/completions',), ('top_k', 'reasoning_content'))
    """
    try:
        found = msgspec.json.decode(description, type=_Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    endpoints = tuple(sorted(path for path, item in found.paths.items() if item.post is not None))
    names = {name for path in _ASKED for name in _fields(found, path)}
    if "model" not in names:
        return None
    fields = tuple(name for name in EXTRA if name in names or name == IN_A_MESSAGE)
    taken = {path: _fields(found, path) for path in endpoints}
    return FoundCapabilities(
        endpoints=endpoints,
        fields=fields,
        salted=tuple(path for path, names in taken.items() if SALT in names),
        ordered=tuple(path for path, names in taken.items() if PRIORITY in names),
        found="/openapi.json",
    )


def _fields(found: _Description, path: str) -> set[str]:
    item = found.paths.get(path)
    body = item.post.request_body if item is not None and item.post is not None else None
    media = None if body is None else body.content.get("application/json")
    return set() if media is None else _named(found, media.schema, MAX_DEPTH)


def _named(found: _Description, schema: _Schema, depth: int) -> set[str]:
    if not depth:
        return set()
    names = set(schema.properties)
    target = found.components.schemas.get(schema.ref.removeprefix("#/components/schemas/"))
    for inner in [*([] if target is None else [target]), *schema.any_of, *schema.one_of, *schema.all_of]:
        names |= _named(found, inner, depth - 1)
    return names
