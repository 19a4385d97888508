"""The work that a request for images asks for, as its body says it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

TARGET = "/v1/images/generations"
USUAL_SIDE, USUAL_STEPS = 512, 25
"""Taken where a body does not say: its model has its own, which the line of its server learns."""
_SIZE = re.compile(rb'"([0-9]{1,5})x([0-9]{1,5})"')


def images_asked(fields: Mapping[str, msgspec.Raw]) -> tuple[int, float]:
    """The number of images, and the pixels of all their steps, of fields that are judged.

    >>> told = {"n": b"2", "size": b'"1024x512"', "steps": b"10"}
    >>> images_asked({name: msgspec.Raw(text) for name, text in told.items()}), images_asked({})
    ((2, 10485760.0), (1, 6553600.0))
    """
    number, steps = _number(fields.get("n"), 1), _number(fields.get("steps"), USUAL_STEPS)
    size = _SIZE.fullmatch(bytes(fields.get("size", b"")))
    pixels = USUAL_SIDE * USUAL_SIDE if size is None else int(size[1]) * int(size[2])
    return number, float(number * pixels * steps)


def _number(raw: msgspec.Raw | None, usual: int) -> int:
    try:
        return max(1, int(float(bytes(raw)))) if raw is not None else usual
    except ValueError:  # null
        return usual
