"""The wishes of a request: its tenant, its turn, and what the server keeps of its prompt."""

from __future__ import annotations

from typing import NamedTuple

from hive.domain import Band, CacheMode


class Wishes(NamedTuple):
    """The wishes that a trusted caller may send with its request; those of any other caller are ignored, and the
    defaults hold."""

    tenant: str = ""
    band: Band = Band.NORMAL
    cache_mode: CacheMode = CacheMode.AUTO
    cache_tag: str = ""


NO_WISHES = Wishes()
