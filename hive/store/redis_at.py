"""The address of Redis, and the user it is asked as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from hive.errors import ConfigError
from hive.store.redis_client import RedisPlace

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

    @property
    def place(self) -> RedisPlace:
        """Raises ValueError for a URL that is none."""
        place = RedisPlace(path=self.address) if self.address.startswith("/") else place_of(self.address)
        if place.password or not self.password:
            return place
        return msgspec.structs.replace(place, user=place.user or self.user, password=self.password)


def place_of(url: str) -> RedisPlace:
    """`redis://`, `rediss://` (with TLS) or `unix://` taken apart. Raises ValueError, which may repeat a password.

    >>> place_of("redis://u:p%2Fa@db.example:6380/2") == RedisPlace(
    ...     host="db.example", port=6380, user="u", password="p/a", db=2)
    True
    >>> place_of("unix://:p@/run/r.sock?db=3") == RedisPlace(path="/run/r.sock", password="p", db=3)
    True
    >>> place_of("rediss://cache").has_tls, place_of("redis://").host
    (True, 'localhost')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"no such scheme: {parts.scheme}")
    options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    if options.keys() - {"db"}:
        raise ValueError(f"no such options: {parts.query}")
    is_unix = parts.scheme == "unix"
    db = options.get("db") or ("" if is_unix else parts.path.strip("/")) or "0"
    if not db.isdigit():
        raise ValueError(f"no such database: {db}")
    return RedisPlace(
        path=unquote(parts.path) if is_unix else "",
        host=unquote(parts.hostname or "localhost"),
        port=parts.port or 6379,
        has_tls=parts.scheme == "rediss",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        db=int(db),
    )


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
    try:
        place_of(url)
    except ValueError:
        hint = "like redis://USER:PASSWORD@HOST:6379/0; write / @ : and # of a password in percent, like %2F"
        raise ConfigError(f"{URL} is not the address of a Redis", hint=hint) from None
    return RedisAt(url, user, password)
