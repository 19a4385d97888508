"""Epochs of what backends keep of prompts: a flush raises one, and no salt made with it finds anything older. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from hive.domain import is_name
from hive.errors import BadRequest

EVERYTHING, SHARED, TAGS = "all", "shared", "tags"
"""Keys of epochs: of all there is, of what tenants keep together where they are not kept apart, of all tags."""
TAG_MAX = 64


class FlushKind(StrEnum):
    """Subject of a flush."""

    ALL = "all"
    MODEL = "model"
    TENANT = "tenant"
    TAG = "tag"


class FlushedBy(StrEnum):
    """The way in which a flush reaches what such a server keeps of prompts: another salt in each request; erasing its
    slots; loading the model anew; or none."""

    SALT = "salt"
    SLOTS = "slots"
    LOAD = "load"
    NONE = "none"


class FlushScope(msgspec.Struct, frozen=True):
    """A flush: of everything, or of one model, tenant or tag by its `name`."""

    kind: FlushKind
    name: str = ""

    def __str__(self) -> str:
        return "all" if self.kind is FlushKind.ALL else f"{self.kind} {self.name}"

    def params(self) -> dict[str, str]:
        """The parameters of the operation `cache-flush`, as a signed token has them.

        >>> FlushScope(FlushKind.TENANT, "acme").params(), FlushScope(FlushKind.TAG, "t").params()
        ({'scope': 'tenant', 'tenantId': 'acme'}, {'scope': 'tag', 'tag': 't'})
        """
        told = {"scope": str(self.kind)}
        if self.kind is not FlushKind.ALL:
            told[_MEMBERS[self.kind]] = self.name
        return told


def cache_tag(text: str) -> str:
    """A tag by its one name, without blanks around it: the header of a request and the order to flush both come through
    here. Raises BadRequest for one that a header cannot carry as it is written.

    >>> cache_tag(" team a "), cache_tag("")
    ('team a', '')
    """
    tag = text.strip(" \t")
    if len(tag) > TAG_MAX or not (tag.isascii() and tag.isprintable()):
        raise BadRequest(f"a cache tag is at most {TAG_MAX} printable characters of ASCII")
    return tag


_MEMBERS = {FlushKind.MODEL: "modelId", FlushKind.TENANT: "tenantId", FlushKind.TAG: "tag"}


def flush_scope(
    scope: str, *, model: str | None = None, tenant: str | None = None, tag: str | None = None
) -> FlushScope:
    """The scope with the one name that belongs to it; raises BadRequest where that is missing, or another is there.

    >>> flush_scope("tenant", tenant="acme"), flush_scope("all")
    (FlushScope(kind=<FlushKind.TENANT: 'tenant'>, name='acme'), FlushScope(kind=<FlushKind.ALL: 'all'>, name=''))
    """
    try:
        kind = FlushKind(scope)
    except ValueError:
        raise BadRequest(f"scope is all, model, tenant or tag, not {scope[:40]!r}") from None
    given = {FlushKind.MODEL: model, FlushKind.TENANT: tenant, FlushKind.TAG: tag}
    name = given.pop(kind, "")
    for other, value in given.items():
        if value is not None:
            raise BadRequest(f"{_MEMBERS[other]} does not belong to the scope {kind}")
    if kind is not FlushKind.ALL and not name:
        raise BadRequest(f"the scope {kind} needs {_MEMBERS[kind]}")
    name = name or ""
    if kind is FlushKind.TENANT and not is_name(name):
        raise BadRequest("tenantId: a tenant's name is a letter a-z, then up to 39 of a-z, 0-9 and -")
    if kind is FlushKind.TAG and not (name := cache_tag(name)):
        raise BadRequest("the scope tag needs tag")
    return FlushScope(kind, name)


def raised_by(scope: FlushScope, *, server: str = "", groups: Sequence[str] = ()) -> tuple[str, ...]:
    """The keys whose epochs a flush raises. `server`: of the slot that has the model; `groups`: the tenant's.

    What tenants and tags keep is shared where tenants are not kept apart, so that goes too.

    >>> raised_by(FlushScope(FlushKind.TENANT, "acme"), groups=("tenant acme", "group us"))
    ('tenant acme', 'group us', 'shared')
    >>> raised_by(FlushScope(FlushKind.MODEL, "m"), server="m-1"), raised_by(FlushScope(FlushKind.TAG, "t"))
    (('server m-1',), ('tag t', 'shared'))
    """
    match scope.kind:
        case FlushKind.ALL:
            return (EVERYTHING,)
        case FlushKind.MODEL:
            return (f"server {server}",)
        case FlushKind.TENANT:
            return (*groups, SHARED)
        case FlushKind.TAG:
            return (f"tag {scope.name}", SHARED)


class CacheEpochs:
    """The epochs as a proxy has them. `numbers` by key, none for what was never flushed; `fresh`: the servers whose
    requests are told to use nothing that was kept, as a flush is under way there.

    >>> epochs = CacheEpochs({"all": 3, "tenant acme": 7})
    >>> epochs.parts("", "tenant acme", ""), epochs.parts("", "tenant other", "t"), CacheEpochs().parts("", "a", "")
    (('all 3', 'tenant acme 7'), ('all 3',), ())
    """

    __slots__ = ("fresh", "numbers")

    def __init__(self, numbers: Mapping[str, int] | None = None, fresh: Sequence[str] = ()) -> None:
        self.numbers = dict(numbers or {})
        self.fresh = frozenset(fresh)

    def __repr__(self) -> str:
        return f"<CacheEpochs {self.numbers}, fresh {sorted(self.fresh)}>"

    def parts(self, server: str, group: str, tag: str) -> tuple[str, ...]:
        """The parts of a salt that follow from flushes; none where nothing of this was ever flushed."""
        numbers = self.numbers
        if not numbers:
            return ()
        keys = (EVERYTHING, f"server {server}", group, *((TAGS, f"tag {tag}") if tag else ()))
        return tuple(f"{key} {numbers[key]}" for key in keys if key in numbers)
