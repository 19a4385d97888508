"""The base of every message between proxy, daemon and helper."""

from __future__ import annotations

import msgspec


class LinkMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all messages; the tag is the class name."""
