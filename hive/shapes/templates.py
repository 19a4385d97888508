"""The API's answers about templates, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.shapes.system import Bytes, UnixSeconds


class TemplateView(TypedDict):
    """A template: what hive.conf says of it, and how it is."""

    name: str
    owner: Annotated[str, Meta(description="The tenant whose agents may use it.")]
    python: Annotated[str, Meta(description="Its interpreter; empty where it is described no more.")]
    imports: list[str]
    warm: list[str]
    script: Annotated[str, Meta(description="Its agents' script, which it runs until `hive.ready()`; empty: none.")]
    stage: Annotated[
        str,
        Meta(description="Where it stops: packages (its imports are done), ready (at `hive.ready()` in its script)."),
    ]
    env: Annotated[list[str], Meta(description="Names of the variables it imports with.")]
    memory_mb: Annotated[int | None, Meta(description="MiB of the template itself at most; null: no limit.")]
    pin: Annotated[bool, Meta(description="Whether its memory stays in RAM.")]
    first_uid: Annotated[int | None, Meta(description="Of its block; null: none is reserved, or agents have no users.")]
    uids: Annotated[int, Meta(description="How many there are in a block.")]
    state: Annotated[
        str,
        Meta(
            description="none (no agent asked for it yet), starting, ready, failed, ended; unknown: the helper cannot "
            "be asked."
        ),
    ]
    why: Annotated[str, Meta(description="Why its agents are ordinary programs; empty where they are not.")]
    pid: int | None
    since: UnixSeconds | None
    agents: Annotated[list[str], Meta(description="Names of the running agents that were forked from it.")]
    older: Annotated[list[str], Meta(description="Of these, those of an older process of it.")]
    named_by: Annotated[list[str], Meta(description="Names of all agents that are to be forked from it.")]
    held_bytes: Bytes
    shared_bytes: Annotated[int, Meta(description="Of that, what its agents share.")]
    saved_bytes: Annotated[
        int,
        Meta(description="What its agents would hold besides, were they ordinary programs, less what it holds itself."),
    ]
    packages_at: Annotated[UnixSeconds | None, Meta(description="The youngest change among its packages.")]
    is_stale: Annotated[bool, Meta(description="Whether a package or its script has changed since it started.")]


class TemplateList(TypedDict):
    """Every template, by name."""

    templates: list[TemplateView]
