"""The order of a pull of a model."""

from __future__ import annotations

import msgspec


class PullOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model`: a name for Ollama, or the absolute path of a file or directory on this box. The rest is about paths.

    `name`: what it is called in Hive's directory, else as its file is; `link`: not copied; `force`: replaces what has
    that name.
    """

    model: str
    name: str = ""
    link: bool = False
    force: bool = False
