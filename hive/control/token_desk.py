"""The desk behind the API, the part about its own tokens."""

from __future__ import annotations

import time

from hive.control.services import Services
from hive.domain import Role, TokenState
from hive.shapes import tokens as shapes
from hive.store.tokens import StoredToken


class TokenDesk:
    """See `hive.control.desk.Desk`."""

    _parts: Services

    async def api_tokens(self, *, also_dead: bool) -> shapes.ApiTokens:
        now = time.time()
        found = [token_view(token, now) for token in await self._parts.keyring.tokens()]
        return {"tokens": [token for token in found if also_dead or token["state"] is TokenState.LIVE]}

    async def create_api_token(
        self, name: str, role: Role, expires_in_s: float | None, actor: str
    ) -> shapes.NewApiToken:
        now = time.time()
        expires_at = None if expires_in_s is None else now + expires_in_s
        token, secret = await self._parts.keyring.create(name, role, expires_at=expires_at, actor=actor, now=now)
        return {**token_view(token, now), "token": secret}

    async def revoke_api_token(self, ref: str, actor: str) -> shapes.ApiToken:  # noqa: ARG002 - the order is audited
        now = time.time()
        return token_view(await self._parts.keyring.revoke(ref, now=now), now)


def token_view(token: StoredToken, now: float) -> shapes.ApiToken:
    """
    >>> token_view(StoredToken(id="t_1", name="ci", digest="d", role=Role.VIEWER, created_by="uid:0", created_at=1), 2)
    {'id': 't_1', 'name': 'ci', 'role': <Role.VIEWER: 'viewer'>, 'state': <TokenState.LIVE: 'live'>, \
'created_by': 'uid:0', 'created_at': 1, 'expires_at': None, 'revoked_at': None, 'last_used_at': None}
    """
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "state": token.state(now),
        "created_by": token.created_by,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "last_used_at": token.last_used_at,
    }
