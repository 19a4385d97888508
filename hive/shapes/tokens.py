"""The API's answers about its own tokens, as types (see system.py)."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.domain import Role, TokenState
from hive.shapes.system import UnixSeconds


class ApiToken(TypedDict):
    """A token of the API on TCP, without what it is. `expires_at`: null is never; `last_used_at`: null is never yet."""

    id: str
    name: str
    role: Role
    state: TokenState
    created_by: Annotated[str, Meta(description="Who made it, as in the audit table.")]
    created_at: UnixSeconds
    expires_at: UnixSeconds | None
    revoked_at: UnixSeconds | None
    last_used_at: UnixSeconds | None


class NewApiToken(ApiToken):
    """A token that was just made."""

    token: Annotated[str, Meta(description="What to send, in `Authorization: Bearer`. It is shown this once.")]


class ApiTokens(TypedDict):
    """The tokens by name, those of one name the newest first."""

    tokens: list[ApiToken]
