"""Separation of prompts in a server's cache, and the order of its own queue: by what it described of itself, where its
kind leaves that open. Pure.

A Ray Serve or a gateway before vLLMs is of the kind `remote`, and takes the fields that keep tenants apart as well as a
vLLM does. It is given those that its description (OpenAPI) has for that endpoint, and no others.
"""

from __future__ import annotations

from hive.backends.kinds import spec_of
from hive.backends.spec import Fields
from hive.backends.vllm_fields import priority_field, salt_field
from hive.domain import BackendInfo, Band, FoundCapabilities
from hive.models.cache_epochs import FlushedBy
from hive.settings.table import Settings

UNKNOWN = FoundCapabilities()
_PROMPTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")
"""Endpoints at which a server reads prompts of agents."""
_SHARED = "shared between all agents"


def cache_fields(
    backend: BackendInfo, endpoint: str, group: str, tag: str, apart: bool, flushed: tuple[str, ...]
) -> Fields:
    """The fields that keep a group's prompts to itself at this endpoint; none where it takes none. `flushed`: the parts
    of the salt that flushes have raised.

    >>> told = FoundCapabilities(salted=("/v1/chat/completions",))
    >>> ray = BackendInfo(kind="remote", address="h:1", capabilities=told)
    >>> [name for name, _ in cache_fields(ray, "/v1/chat/completions", "tenant a", "", True, ())]
    ['cache_salt']
    >>> cache_fields(ray, "/v1/embeddings", "tenant a", "", True, ())
    ()
    """
    spec, salted = spec_of(backend.kind), backend.capabilities.salted
    if not spec.is_as_described or salted is None:
        return spec.requests.cache_fields(endpoint, group, tag, apart, flushed)
    return salt_field(group, tag, flushed) if endpoint in salted else ()


def priority_fields(backend: BackendInfo, endpoint: str, band: Band) -> Fields:
    """The place in its own queue, where it is known to order that (`takes_priority`)."""
    spec, ordered = spec_of(backend.kind), backend.capabilities.ordered
    if not backend.priority:
        return ()
    if not spec.is_as_described or ordered is None:
        return spec.requests.priority_fields(endpoint, band)
    return priority_field(band) if endpoint in ordered else ()


def takes_priority(kind: str, settings: Settings, told: FoundCapabilities = UNKNOWN) -> bool:
    """Whether the backend orders its own queue by the `priority` of a request. That one describes the field is not
    enough: a vLLM of `fcfs` has it, too.

    >>> takes_priority("remote", Settings(), FoundCapabilities(ordered=("/v1/chat/completions",)))
    False
    """
    spec, inference = spec_of(kind), settings.inference
    if spec.orders_by_priority(inference):
        return True
    return inference.backend_priority and spec.is_as_described and bool(told.ordered)


def flushed_by(kind: str, told: FoundCapabilities = UNKNOWN) -> FlushedBy:
    """The way in which a flush reaches what such a server keeps of prompts.

    >>> salted = FoundCapabilities(salted=("/v1/completions",))
    >>> [str(flushed_by(*one)) for one in (("remote",), ("remote", salted), ("vllm",), ("llama", salted))]
    ['none', 'salt', 'salt', 'slots']
    """
    spec = spec_of(kind)
    if not spec.is_as_described or told.salted is None:
        return spec.flushed_by
    return FlushedBy.SALT if told.salted else FlushedBy.NONE


def why_not_flushed(kind: str, told: FoundCapabilities = UNKNOWN) -> str:
    """A clause, for a server that no flush reaches; empty for others.

    >>> why_not_flushed("vllm", FoundCapabilities(salted=()))
    'this vLLM describes no cache_salt'
    """
    if flushed_by(kind, told) is not FlushedBy.NONE:
        return ""
    spec = spec_of(kind)
    return spec.why_not_flush or f"this {spec.label} describes no cache_salt"


def unsalted(told: FoundCapabilities) -> tuple[str, ...]:
    """The endpoints for prompts that it described without a salt, beside others that have one.

    >>> unsalted(FoundCapabilities(endpoints=("/v1/completions", "/v1/embeddings"), salted=("/v1/completions",)))
    ('/v1/embeddings',)
    """
    if not told.salted:
        return ()
    return tuple(path for path in told.endpoints or () if path in _PROMPTS and path not in told.salted)


def prefix_cache(backend: BackendInfo, settings: Settings) -> str:
    """Separation of prompts in the backend's prefix cache, in words.

    >>> prefix_cache(BackendInfo(kind="ollama", address="h:1"), Settings())
    'shared between all agents (Ollama cannot separate it)'
    >>> told = FoundCapabilities(endpoints=("/v1/completions", "/v1/embeddings"), salted=("/v1/completions",))
    >>> prefix_cache(BackendInfo(kind="remote", address="h:1", capabilities=told), Settings())
    'separated by tenant (salt), as it describes itself; shared at /v1/embeddings'
    """
    spec, told = spec_of(backend.kind), backend.capabilities
    is_told = spec.is_as_described and told.salted is not None
    can_separate = bool(told.salted) if is_told else spec.can_separate
    if can_separate and not settings.proxy.cache_isolation:
        return f"{_SHARED} (cache_isolation = false)"
    if not is_told:
        return spec.prefix_cache
    if not can_separate:
        return f"{_SHARED} ({why_not_flushed(backend.kind, told)})" if spec.can_separate else spec.prefix_cache
    said = spec.prefix_cache if spec.can_separate else "separated by tenant (salt), as it describes itself"
    shared = unsalted(told)
    return f"{said}; shared at {', '.join(shared)}" if shared else said
