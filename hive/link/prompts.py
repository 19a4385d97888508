"""Messages between daemon and proxy about prewarms: prompts that the backend reads before its agents ask."""

from __future__ import annotations

from hive.link.message import LinkMessage


class Prewarm(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The backend reads `system_prompt` as this agent's requests would have it read: its model, its place in the
    cache. It goes behind all requests, wakes no agent and counts for no limit of the agent's.

    Answer: `Prewarmed` once it has, or `Failed`: `not_supported` if nothing would be kept.
    """

    agent: str
    model: str
    system_prompt: str


class Prewarmed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`model`: the one that read it. `tokens_in`: of the whole question, `cached_tokens` of those it had kept before;
    None where the backend does not tell."""

    model: str
    tokens_in: int | None
    cached_tokens: int | None
    took_ms: float
