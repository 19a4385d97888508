"""Calls for images: what they ask for, and how images are told. Pure; standard library only.

The proxy has judged the fields of an agent's request; this reader holds for whoever asks a runner by itself, too.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from hive.runner.faults import EngineFault

MOST_IMAGES = 10
MOST_STEPS = 1000
MOST_PIXELS = 1 << 26
MOST_SEED = (1 << 63) - 1
FORMATS = ("png", "webp", "jpeg")
TOLD = frozenset(
    ("model", "prompt", "n", "size", "output_format", "output_compression", "response_format", "background", "stream")
)
EXTRAS = frozenset(("seed", "steps", "negative_prompt", "guidance_scale"))
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


class ImageOrder(NamedTuple):
    """The images that a call asks for. `size`, `steps`, `guidance`, `seed`: None where it does not say."""

    prompt: str
    number: int = 1
    size: tuple[int, int] | None = None
    format: str = "png"
    quality: int = 100
    seed: int | None = None
    steps: int | None = None
    negative: str = ""
    guidance: float | None = None
    streams: bool = False
    inputs: Mapping[str, Any] = {}


def read_order(body: Mapping[str, Any], *, inputs: bool = False) -> ImageOrder:
    """The order of a body of /v1/images/generations. `inputs`: whether the model has named inputs of its own.

    Raises EngineFault: 400.

    >>> read_order({"prompt": "a bee", "size": "64x32", "steps": 4}).size
    (64, 32)
    >>> read_order({"prompt": "a bee", "response_format": "url"})
    Traceback (most recent call last):
    hive.runner.faults.EngineFault: response_format must be b64_json: no image is kept, so that there is none to fetch
    """
    known = TOLD | EXTRAS | ({"inputs"} if inputs else frozenset())
    for name, value in body.items():
        if name not in known and value is not None:
            raise _wrong(name, "is not taken: this model has no such input" if name == "inputs" else "is not known")
    if _one_of(body, "response_format", ("b64_json", "url"), "b64_json") != "b64_json":
        raise EngineFault(
            400,
            "response_format must be b64_json: no image is kept, so that there is none to fetch",
            "bad_request",
            param="response_format",
        )
    _one_of(body, "background", ("auto", "opaque"), "auto")
    named = body.get("inputs") or {}
    if not isinstance(named, dict):
        raise _wrong("inputs", "must be an object")
    return ImageOrder(
        prompt=_prompt(body),
        number=_whole(body, "n", 1, 1, MOST_IMAGES),
        size=size_of(body.get("size")),
        format=_one_of(body, "output_format", FORMATS, "png"),
        quality=_whole(body, "output_compression", 100, 0, 100),
        streams=_switch(body, "stream"),
        inputs=named,
        **_extras(body),
    )


def read_generate(body: Mapping[str, Any]) -> ImageOrder:
    """The order of a body of /generate: width and height as numbers, and no model.

    >>> read_generate({"prompt": "a bee", "width": 64, "height": 32, "num_inference_steps": 4}).steps
    4
    """
    names = {"prompt", "n", "width", "height", "output_format", "num_inference_steps", *EXTRAS}
    for name, value in body.items():
        if name not in names and value is not None:
            raise _wrong(name, "is not known")
    told = {**body, "steps": body.get("steps") or body.get("num_inference_steps")}
    width, height = body.get("width"), body.get("height")
    if (width is None) is not (height is None):
        raise _wrong("width" if width is None else "height", "is missing beside the other one")
    size = (
        None
        if width is None
        else size_of(f"{_whole(body, 'width', 0, 1, 99999)}x{_whole(body, 'height', 0, 1, 99999)}")
    )
    return ImageOrder(
        prompt=_prompt(body),
        number=_whole(body, "n", 1, 1, MOST_IMAGES),
        size=size,
        format=_one_of(body, "output_format", FORMATS, "png"),
        **_extras(told),
    )


def size_of(told: object) -> tuple[int, int] | None:
    """Width and height of a size; None for `auto` and for none. Raises EngineFault: 400.

    >>> size_of("512x768"), size_of("auto"), size_of(None)
    ((512, 768), None, None)
    """
    if told in (None, "auto"):
        return None
    found = _SIZE.fullmatch(told) if isinstance(told, str) else None
    if found is None:
        raise _wrong("size", "must be WIDTHxHEIGHT in pixels, like 1024x1024, or auto")
    width, height = int(found[1]), int(found[2])
    if width * height > MOST_PIXELS:
        raise _wrong("size", f"asks for more than {MOST_PIXELS} pixels")
    return width, height


def check_multiple(size: tuple[int, int], multiple: int) -> None:
    """Raises EngineFault (400) where a side is none of a multiple, with the nearest size that is.

    >>> check_multiple((100, 64), 16)
    Traceback (most recent call last):
    hive.runner.faults.EngineFault: size: this model makes images whose sides are multiples of 16, like 96x64
    """
    if any(side % multiple for side in size):
        width, height = (max(multiple, round(side / multiple) * multiple) for side in size)
        raise EngineFault(
            400,
            f"size: this model makes images whose sides are multiples of {multiple}, like {width}x{height}",
            "bad_request",
            param="size",
        )


def seeds_of(order: ImageOrder) -> list[int]:
    """The seed of each image: the one that was asked for and those after it, or one made by chance.

    >>> seeds_of(ImageOrder("a bee", number=3, seed=7))
    [7, 8, 9]
    """
    first = secrets.randbelow(1 << 32) if order.seed is None else order.seed
    return [(first + number) & MOST_SEED for number in range(order.number)]


def cost_of(number: int, size: tuple[int, int], steps: int) -> str:
    """The cost of images, as `x-hive-cost` tells it.

    >>> cost_of(2, (512, 512), 4)
    'images=2; pixel_steps=2097152'
    """
    return f"images={number}; pixel_steps={number * size[0] * size[1] * steps}"


def told_images(
    created: int, order: ImageOrder, size: tuple[int, int], images: list[tuple[bytes, int]]
) -> dict[str, Any]:
    """The answer in one piece. `images`: each with its seed."""
    return {
        "created": created,
        "data": [{"b64_json": base64.b64encode(data).decode(), "seed": seed} for data, seed in images],
        "output_format": order.format,
        "size": f"{size[0]}x{size[1]}",
        "background": "opaque",
    }


def told_step(image: int, step: int, steps: int) -> dict[str, Any]:
    """The event of a step that is done; both numbers begin at 1, that of the image at 0."""
    return {"type": "image_generation.progress", "image_index": image, "step": step, "steps": steps}


def told_image(
    created: int, order: ImageOrder, size: tuple[int, int], image: int, data: bytes, seed: int
) -> dict[str, Any]:
    """The event of an image that is there, as OpenAI shapes it. It has no tokens, so that no usage is told."""
    return {
        "type": "image_generation.completed",
        "b64_json": base64.b64encode(data).decode(),
        "background": "opaque",
        "created_at": created,
        "output_format": order.format,
        "quality": "auto",
        "size": f"{size[0]}x{size[1]}",
        "usage": None,
        "image_index": image,
        "seed": seed,
    }


def _wrong(name: str, why: str) -> EngineFault:
    return EngineFault(400, f"{name[:60]} {why}", "bad_request", param=name[:60])


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise _wrong("prompt", "is missing: a text that says what is to be seen")
    return _encodable("prompt", prompt)


def _encodable(name: str, text: str) -> str:
    """The text, which has no half of a character: tokenizers take none, and JSON can hold one (`\\ud800`)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(name, "has half a character in it (a surrogate by itself)") from None
    return text


def _extras(body: Mapping[str, Any]) -> dict[str, Any]:
    negative, guidance = body.get("negative_prompt"), body.get("guidance_scale")
    if negative is not None and not isinstance(negative, str):
        raise _wrong("negative_prompt", "must be a string")
    if guidance is not None and (isinstance(guidance, bool) or not isinstance(guidance, int | float)):
        raise _wrong("guidance_scale", "must be a number")
    if guidance is not None and not 0 <= guidance <= 100:
        raise _wrong("guidance_scale", "must be from 0 to 100")
    return {
        "seed": None if body.get("seed") is None else _whole(body, "seed", 0, 0, MOST_SEED),
        "steps": None if body.get("steps") is None else _whole(body, "steps", 0, 1, MOST_STEPS),
        "negative": _encodable("negative_prompt", negative or ""),
        "guidance": None if guidance is None else float(guidance),
    }


def _whole(body: Mapping[str, Any], name: str, absent: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return absent
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, f"must be a whole number from {least} to {most}")
    return value


def _one_of(body: Mapping[str, Any], name: str, words: tuple[str, ...], absent: str) -> str:
    value = body.get(name)
    if value is None:
        return absent
    if value not in words:
        raise _wrong(name, f"must be {' or '.join(words)}")
    return str(value)


def _switch(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "must be true or false")
    return bool(value)
