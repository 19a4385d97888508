"""BIOS prompt: what every model of this box is told before its caller's own words. Pure.

Stable text comes first and the time last, so that the server's prefix cache holds for everything but the last lines.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

STABLE = (
    "You are one of several cooperating models on one machine. Programs start you, read your answer and may hand it to"
    " other models. Nobody is there to answer a question, so work with what you were given."
)
DIVIDER = "\n\n---\n\n"


class BiosForm(StrEnum):
    """Shape of the BIOS in the messages."""

    ONE_MESSAGE = "one_message"
    """Within one system message: many chat templates refuse a second one."""
    MESSAGES = "messages"
    """As system messages of their own."""
    OFF = "off"


def runtime_block(now: datetime) -> str:
    """Minute and zone.

    >>> from datetime import UTC
    >>> runtime_block(datetime(2026, 11, 23, 19, 5, 59, tzinfo=UTC))
    'It is 2026-11-23 19:05 (UTC).'
    """
    return f"It is {now:%Y-%m-%d %H:%M} ({now.tzname() or 'local time'})."


def messages(
    system: str, user: str, now: datetime, form: BiosForm = BiosForm.ONE_MESSAGE, *, rules: str = ""
) -> list[dict[str, str]]:
    """The conversation a request begins with: BIOS, the caller's system prompt, the runtime block, the user's prompt.

    `rules` (of tools, for example) belong to the stable part; where the BIOS is off they alone stand before the
    caller's.

    >>> from datetime import UTC
    >>> now = datetime(2026, 11, 23, 19, 5, tzinfo=UTC)
    >>> [one["role"] for one in messages("Be short.", "Hi", now)]
    ['system', 'user']
    >>> print(messages("Be short.", "Hi", now)[0]["content"].removeprefix(STABLE))
    <BLANKLINE>
    <BLANKLINE>
    ---
    <BLANKLINE>
    Be short.
    <BLANKLINE>
    ---
    <BLANKLINE>
    It is 2026-11-23 19:05 (UTC).
    >>> [one["content"] for one in messages("Be short.", "Hi", now, BiosForm.OFF)]
    ['Be short.', 'Hi']
    >>> [one["content"] for one in messages("Be short.", "Hi", now, BiosForm.MESSAGES, rules="Call X.")][1:]
    ['Call X.', 'Be short.', 'It is 2026-11-23 19:05 (UTC).', 'Hi']
    """
    parts = [rules, system] if form is BiosForm.OFF else [STABLE, rules, system, runtime_block(now)]
    told = [part for part in parts if part]
    if form is BiosForm.ONE_MESSAGE:
        told = [DIVIDER.join(told)]
    return [*({"role": "system", "content": part} for part in told), {"role": "user", "content": user}]
