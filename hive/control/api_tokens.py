"""The valid tokens for TCP, in memory as digests: no request waits for the database."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from hive.agents.tokens import digest as digest_of
from hive.agents.transition_lock import outcome_of
from hive.audit.auth import API_TOKEN, INTERNAL, MAKE_ONE, Person
from hive.domain import Role
from hive.errors import HiveError, Unauthorized
from hive.store import tokens
from hive.store.database import Database
from hive.store.tokens import StoredToken

log = logging.getLogger("hive.api")

TOKEN_BYTES = 32
WRITTEN_EVERY_S = 60.0
"""Interval of writing the tokens' last uses."""
EXPIRED_TOLD_S = 7 * 86400.0
"""Time for which a caller with an expired token is told so; after that the token is not known."""
HangUp = Callable[[], None]


class Key(NamedTuple):
    """A token that is good. `id`: empty for one that is no row of the table."""

    digest: str
    person: Person
    id: str = ""
    expires_at: float | None = None


class LiveTokens:
    """`internal` is an operator, `api_token` (None where there is none) an admin; the rest is in the table.

    `load` reads it; `run` writes again and again when they were used, until it is cancelled.
    """

    def __init__(self, database: Database, *, internal: str, api_token: str | None = None) -> None:
        self._database = database
        self._keys: dict[str, Key] = {}
        self._used: dict[str, float] = {}
        """Token → when it was used last, of those where that is not written yet."""
        self._held: dict[str, set[HangUp]] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Tells that there is a new token, or one less."""
        self._put(Key(digest_of(internal), Person(INTERNAL, Role.OPERATOR)))
        if api_token is not None:
            self._put(Key(digest_of(api_token), Person(API_TOKEN, Role.ADMIN)))

    def __repr__(self) -> str:
        return f"<LiveTokens {len(self._keys)} tokens, {sum(map(len, self._held.values()))} held>"

    async def load(self) -> None:
        found: list[StoredToken] = await self._database.read(tokens.all)
        for token in found:
            if token.revoked_at is None:
                self._put(_key_of(token))
        self._forget_expired(time.time())

    def find(self, token: str, now: float) -> Key:
        """The token's key. Raises Unauthorized."""
        digest = digest_of(token)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise Unauthorized("this token is not known here, or was revoked", hint=MAKE_ONE)
        if key.expires_at is not None and key.expires_at <= now:
            raise Unauthorized(f"{key.person.name} has expired", hint=MAKE_ONE)
        if key.id:
            self._used[key.id] = now
        return key

    @contextmanager
    def held(self, key: Key, hang_up: HangUp) -> Iterator[None]:
        """Meanwhile `hang_up` is called where the token is revoked, or expires."""
        if not key.id:
            yield
            return
        held = self._held.setdefault(key.id, set())
        held.add(hang_up)
        timer = None
        if key.expires_at is not None:
            left_s = max(0.0, key.expires_at - time.time())
            timer = asyncio.get_running_loop().call_later(left_s, hang_up)
        try:
            yield
        finally:
            held.discard(hang_up)
            if not held:
                self._held.pop(key.id, None)
            if timer is not None:
                timer.cancel()

    async def create(
        self, name: str, role: Role, *, expires_at: float | None, actor: str, now: float
    ) -> tuple[StoredToken, str]:
        """A new one, and the token itself, which is kept nowhere. Raises WrongState where the name is taken."""
        secret = f"hive_{secrets.token_urlsafe(TOKEN_BYTES)}"
        token = StoredToken(
            id=f"t_{secrets.token_hex(6)}",
            name=name,
            digest=digest_of(secret),
            role=role,
            created_by=actor,
            created_at=now,
            expires_at=expires_at,
        )
        await self._database.write(lambda conn: tokens.add(conn, token, now=now))
        self._put(_key_of(token))
        self.on_change()
        return token, secret

    async def revoke(self, ref: str, *, now: float) -> StoredToken:
        """It is good no longer, and what is being answered to it ends. Raises NotFound, WrongState."""
        token: StoredToken = await self._database.write(lambda conn: tokens.revoke(conn, ref, now=now))
        self._keys.pop(token.digest, None)
        for hang_up in [*self._held.get(token.id, ())]:
            hang_up()
        self.on_change()
        return self._as_used(msgspec.structs.replace(token, revoked_at=now))

    def keys(self) -> list[Key]:
        """Every one that is good, or was until it expired."""
        return [*self._keys.values()]

    async def tokens(self) -> list[StoredToken]:
        """Every one that is kept, by name."""
        found: list[StoredToken] = await self._database.read(tokens.all)
        return [self._as_used(token) for token in found]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITTEN_EVERY_S)
            self._forget_expired(time.time())
            await self.write_used()

    async def write_used(self) -> None:
        """Writes the last uses of tokens; where that fails it is done next time."""
        if not (used := {**self._used}):
            return
        if isinstance(error := await outcome_of(self._database.write(lambda c: tokens.used(c, used))), HiveError):
            log.warning("token_use_not_written error=%s", error.message)
            return
        self._used = {token: at for token, at in self._used.items() if used.get(token) != at}

    def _forget_expired(self, now: float) -> None:
        """Forgets keys that expired long ago: their rows are bounded (tokens.KEPT), and so is this."""
        for key in [*self._keys.values()]:
            if key.expires_at is not None and key.expires_at + EXPIRED_TOLD_S <= now:
                del self._keys[key.digest]

    def _put(self, key: Key) -> None:
        self._keys[key.digest] = key

    def _as_used(self, token: StoredToken) -> StoredToken:
        at = self._used.get(token.id, token.last_used_at)
        return msgspec.structs.replace(token, last_used_at=at)


def _key_of(token: StoredToken) -> Key:
    return Key(token.digest, Person(f"token:{token.name}", token.role), token.id, token.expires_at)
