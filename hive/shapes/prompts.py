"""The API's answers about system prompts, as types (see system.py)."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.shapes.system import Bytes, UnixSeconds


class Prompt(TypedDict):
    """A system prompt of living agents that share the backend's cache, for one model. Not its text."""

    hash: Annotated[str, Meta(description="SHA-256 of the text, its first 16 hex digits.")]
    bytes: Bytes
    agents: Annotated[list[str], Meta(description="Their names.")]
    shared_by: Annotated[int, Meta(description="Agents that have this prompt, those of other lines too.")]
    tenants: list[str]
    model: Annotated[str, Meta(description="The one their requests are given; empty where there is none.")]
    prewarm: Annotated[bool, Meta(description="Whether one of them wants it read ahead.")]
    warm_since: Annotated[
        UnixSeconds | None, Meta(description="Since when the backend has it; null where that is not known.")
    ]
    tokens: Annotated[int | None, Meta(description="What was read ahead: the prompt, and what the question adds.")]
    tokens_reused: Annotated[int, Meta(description="Of its agents' requests, since the backend is up.")]
    why: Annotated[str, Meta(description="How it stands, or why it could not be read ahead.")]


class Prompts(TypedDict):
    """Every system prompt of living agents."""

    prompts: list[Prompt]
