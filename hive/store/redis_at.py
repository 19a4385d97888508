"""The address of Redis, and the user it is asked as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from hive.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

URL = "REDIS_URL"
PASSWORD = "redis-password"
"""The credential with the password for that URL, so that it need not stand in the environment."""
Credential = Callable[[str, Mapping[str, str]], bytes | None]
"""host.credentials.credential."""


class RedisAt(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """`address`: the path of a socket, or a URL `redis://`, `rediss://`, `unix://`, which may carry user and password.

    `user` and `password` count where the URL carries none. Printed without either.

    >>> RedisAt("rediss://:secret@db.example:6380/2"), str(RedisAt("/run/hive/redis.sock", "proxy", "secret"))
    (<RedisAt db.example:6380/2>, '/run/hive/redis.sock')
    """

    address: str
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"<RedisAt {self}>"

    def __str__(self) -> str:
        if self.address.startswith("/"):
            return self.address
        parts = urlsplit(self.address)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"

    def client(self, **options: Any) -> Redis:
        """A client that connects when it is first used; `options` are redis-py's."""
        from redis.asyncio import Redis  # 0.1 s that `hive up`, which names Redis only, does not pay

        if self.password:
            options |= {"username": self.user or None, "password": self.password}
        if self.address.startswith("/"):
            return Redis(unix_socket_path=self.address, **options)
        return Redis.from_url(self.address, **options)


def redis_at(socket: Path, service: str, env: Mapping[str, str], credential: Credential) -> RedisAt:
    """The Redis of `service`: at REDIS_URL, else at `socket`, as its own user where it was given a password.

    Raises ConfigError for a URL that is none; it repeats nothing of it, any part may be the password.

    >>> given = {"redis-password": b"secret", "redis-daemon": b"own"}
    >>> redis_at(Path("/r.sock"), "daemon", {"REDIS_URL": "redis://redis:6379"}, lambda name, env: given[name])
    <RedisAt redis:6379>
    >>> redis_at(Path("/r.sock"), "daemon", {}, lambda name, env: given[name])
    <RedisAt /r.sock>
    """
    url = env.get(URL, "")
    name, user = (PASSWORD, "") if url else (f"redis-{service}", service)
    given = credential(name, env)
    password = "" if given is None else given.decode("ascii", "replace").strip()
    if not url:
        return RedisAt(str(socket), user, password)
    from redis.asyncio.connection import parse_url

    try:
        parse_url(url)
    except ValueError:
        hint = "like redis://USER:PASSWORD@HOST:6379/0; write / @ : and # of a password in percent, like %2F"
        raise ConfigError(f"{URL} is not the address of a Redis", hint=hint) from None
    return RedisAt(url, user, password)
