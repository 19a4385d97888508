"""The names by which servers know adapters: with a part of their digest, so that one name is the same weights for ever.
Pure."""

from __future__ import annotations

import re

_ENGINE_NAME = re.compile(r".+@[0-9a-f]{12}")


def is_engine_name(name: str) -> bool:
    """Whether a server's model of this name is an adapter that Hive loaded (`AdapterRecord.engine_name`).

    >>> is_engine_name("legal@0123456789ab"), is_engine_name("legal"), is_engine_name("tiny@main")
    (True, False, False)
    """
    return _ENGINE_NAME.fullmatch(name) is not None
