"""The use of one agent in a day, for its page: by hour and by model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hive.terminal_text import counted, shares
from hive.tui.cells import fit, one_line, span
from hive.tui.charts import SCALE, short, stretched, with_scale
from hive.tui.lines import Line, LinePart, line

HOUR_S, HOURS = 3600, 25
"""Hours of the clock that 24 h are parts of: the first and the last are seldom whole."""
_NAME = 20


class ModelUse(msgspec.Struct, frozen=True):
    model: str
    requests: int
    tokens_in: int
    tokens_out: int
    audio_s: float = 0.0
    images: int = 0

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out

    @property
    def said(self) -> str:
        """Words for its use, in the units of its work.

        >>> ModelUse("ear", 2, 0, 0, audio_s=88.8).said, ModelUse("eye", 1, 0, 0, images=2).said
        ('audio 1m28s', '2 images')
        """
        sound = [f"audio {span(self.audio_s)}"] if self.audio_s else []
        sound += [counted(self.images, "image")] if self.images else []
        tokens = [f"tokens {self.tokens_in} in, {self.tokens_out} out"] if self.tokens or not sound else []
        return ", ".join(tokens + sound)


class Use(msgspec.Struct, frozen=True):
    """Use in the last 24 h. `hours`: tokens in each of the clock, the present one last; `models`: the most used first.

    Both add up to the same.
    """

    is_metered: bool
    hours: list[float]
    models: list[ModelUse]


def use_of(by_hour: Mapping[str, Any], by_model: Mapping[str, Any], now: float) -> Use:
    """The use by the answers of `GET /api/usage` by hour and by model.

    >>> hour = {"hour": 7200, "requests": 1, "tokens_in": 10, "tokens_out": 5}
    >>> model = {"model": "m", "requests": 1, "tokens_in": 10, "tokens_out": 5}
    >>> found = use_of({"token_tracking": True, "hours": [hour]}, {"models": [model]}, now=11000.0)
    >>> found.hours[-3:], found.models[0].tokens
    ([0, 15, 0], 15)
    """
    tokens = {row["hour"]: row["tokens_in"] + row["tokens_out"] for row in by_hour["hours"]}
    last = int(now) // HOUR_S * HOUR_S
    models = [
        ModelUse(row["model"], *(row.get(field, 0) for field in ModelUse.__struct_fields__[1:]))
        for row in by_model["models"]
    ]
    return Use(
        is_metered=by_hour["token_tracking"],
        hours=[tokens.get(last - HOUR_S * ago, 0) for ago in range(HOURS - 1, -1, -1)],
        models=sorted(models, key=lambda found: (-found.tokens, -found.audio_s, -found.images, found.model)),
    )


def hours_title(use: Use | None) -> str:
    """
    >>> hours_title(None), hours_title(Use(True, [10.0, 5.0], [])), hours_title(Use(False, [], []))
    ('tokens by hour, 24 h', 'tokens by hour, 24 h: 15', 'tokens by hour: nothing is metered')
    """
    if use is None:
        return "tokens by hour, 24 h"
    return f"tokens by hour, 24 h: {short(sum(use.hours))}" if use.is_metered else "tokens by hour: nothing is metered"


def hours_lines(use: Use | None, width: int, height: int, *, unicode: bool) -> list[Line]:
    """A curve of the day, as wide as there is room."""
    drawn = stretched([] if use is None else use.hours, width - SCALE)
    return [line(LinePart(text, "going")) for text in with_scale(drawn, width, height, unicode=unicode)]


def model_lines(use: Use | None, width: int, room: int, *, unicode: bool) -> list[Line]:
    """Each model with a bar; what has no room is counted.

    >>> use = Use(True, [], [ModelUse("m", 3, 700, 300), ModelUse("n", 1, 500, 0)])
    >>> for parts in model_lines(use, 72, 2, unicode=False):
    ...     print("".join(part.text for part in parts))
    m                    ############    3 requests, tokens 700 in, 300 out
    n                    ######           1 request, tokens 500 in, 0 out
    """
    if use is None or not use.models:
        return []
    shown, left = (use.models, []) if len(use.models) <= room else (use.models[: room - 1], use.models[room - 1 :])
    said = [f" {counted(found.requests, 'request'):>13}, {found.said}" for found in shown]
    wide = max(0, min(40, width - _NAME - 2 - max((len(text) for text in said), default=0)))
    most = max(found.tokens for found in use.models)
    lines = []
    for found, text in zip(shown, said, strict=True):
        bar = ("█" if unicode else "#") * shares([found.tokens], most, wide)[0]
        name = fit(one_line(found.model, unicode=unicode), _NAME, unicode=unicode)
        lines.append(line(f"{name:<{_NAME}} ", LinePart(f"{bar:<{wide}}", "going"), text))
    if left:
        tokens = sum(found.tokens for found in left)
        lines.append(line(LinePart(f"and {len(left)} more models: {tokens} tokens", "dim")))
    return lines
