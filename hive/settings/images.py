"""The settings of images: `[images]`, how large they may be and how much may be worked on each."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s


class ImagesSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[images]`: what a request to /v1/images/generations may ask for."""

    max_pixels: Annotated[
        int, _s("Pixels of one image: 2359296 is 1536x1536. A larger size is refused.", ge=4096, le=1 << 26)
    ] = 2359296
    max_steps: Annotated[int, _s("Steps of one image; a larger number is cut to it.", ge=1, le=1000)] = 100
    max_prompt_bytes: Annotated[
        int, _s("Longest prompt, and longest negative prompt.", unit="bytes", ge=1, le=1 << 20)
    ] = 32768
