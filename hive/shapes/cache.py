"""The API's answers about the prompt cache, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta


class CachedModel(TypedDict):
    """One model at one server, and what was reused of the prompts that it was asked since the daemon started."""

    model: str
    backend: Annotated[str, Meta(description="The kind of its server.")]
    pooled: Annotated[bool, Meta(description="It is one of the pool's.")]
    flushed_by: Annotated[str, Meta(description="How a flush reaches it: salt, slots, load or none.")]
    why_not: Annotated[str, Meta(description="Why none does; else empty.")]
    requests: Annotated[int | None, Meta(description="Those whose server told what it reused; null: none did.")]
    hits: Annotated[int | None, Meta(description="Of those, with anything reused.")]
    tokens: Annotated[int | None, Meta(description="Tokens of their prompts.")]
    tokens_reused: Annotated[int | None, Meta(description="Of those, kept from earlier ones.")]
    hit_rate: Annotated[float | None, Meta(description="tokens_reused by tokens.")]


class CacheFlushed(TypedDict):
    """The last flush of one scope."""

    scope: Annotated[str, Meta(description="all, model, tenant, group, tag, or tags for all of them.")]
    name: Annotated[str, Meta(description="Empty for all, and for the model of the active backend.")]
    at: Annotated[float, Meta(description="Unix seconds.")]
    actor: str


class FirstRequests(TypedDict):
    """The first requests of agents after a sleep, by what they found."""

    sleeps: int
    tokens: int
    tokens_reused: int
    hit_rate: Annotated[float | None, Meta(description="tokens_reused by tokens.")]


class ParkingView(TypedDict):
    """Slots of llama-servers that are kept on the disk while agents sleep; counts since the daemon started."""

    files: int
    held_bytes: int
    sleeps: Annotated[int, Meta(description="Of agents that had a slot.")]
    saved: int
    found_share: Annotated[float | None, Meta(description="The share of them that found what they left.")]
    first_requests: Annotated[
        dict[str, FirstRequests], Meta(description="By what was found: own, restored, cold, refused.")
    ]


class CacheView(TypedDict):
    """`GET /api/cache`."""

    separation: Annotated[str, Meta(description="Who may meet whose prompts in the active backend's, in words.")]
    models: list[CachedModel]
    flushes: Annotated[list[CacheFlushed], Meta(description="The newest first.")]
    flushing: Annotated[list[str], Meta(description="Jobs of flushes that have not ended.")]
    parking: Annotated[ParkingView | None, Meta(description="null: `[inference] llama_slot_dir` is empty.")]


class CacheFlush(TypedDict):
    """Outcome of a flush. `flushed` is false while its job runs."""

    flushed: bool
    scope: str
    name: str
    entries_removed: Annotated[int | None, Meta(description="Prompts that were erased; null: not known.")]
    memory_freed_mb: Annotated[int | None, Meta(description="null: not known.")]
    left_out: Annotated[list[str], Meta(description="What no flush reaches, each with the reason.")]
    id: Annotated[str, Meta(description="Of its job.")]
