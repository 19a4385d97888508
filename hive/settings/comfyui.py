"""The settings of an operator's ComfyUI: `[comfyui]`, whose workflows are models."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hive.settings.meta import setting_meta as _s

NAME = "comfyui"
"""Of its slot in the pool."""
PREFIX = "comfy/"
"""Beginning of its models' names."""


class ComfyuiSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[comfyui]`: a ComfyUI on this box, whose workflows are models of /v1/images/generations (docs/comfyui.md)."""

    url: Annotated[
        str,
        _s(
            "Where it is: http://127.0.0.1:8188, or the path of a unix socket; empty: there is none.",
            pattern=r"^(http://(127\.0\.0\.1|localhost|\[::1\])(:[1-9][0-9]{0,4})?/?|/.+)?$",
            expected="http://127.0.0.1:PORT or the path of a unix socket: a ComfyUI is on this box",
        ),
    ] = ""
    workflows_dir: Annotated[
        str, _s("The directory of its workflow files, NAME.json.", pattern="^/", expected="an absolute path")
    ] = "/etc/hive/comfyui"
    vram_mb: Annotated[
        int, _s("Memory it takes, until that was measured once (on a CPU it cannot be).", unit="MiB", ge=1)
    ] = 8192
    gpus: Annotated[
        str,
        _s(
            "The UUID of the GPU it is on; `cpu`: none; empty: any.",
            pattern=r"^(cpu|(GPU-|MIG-)[A-Za-z0-9-]+)?$",
            expected="a UUID as `nvidia-smi -L` shows it (GPU-…, MIG-…), or cpu",
        ),
    ] = ""
