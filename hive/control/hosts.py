"""The check that a request on TCP was meant for this Hive: a page with a name made to lead here may not ask. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from hive.errors import NotPermitted

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")


class Reached(NamedTuple):
    """The address of a connection, and the part of `[api]` about it: where it listens, and its further names."""

    address: str
    port: int
    listen: str
    hosts: frozenset[str]

    def names(self) -> frozenset[str]:
        return frozenset(map(plain, (*LOOPBACK, self.address, self.listen)))


def check_host(fields: Sequence[bytes], origins: Sequence[bytes], reached: Reached) -> None:
    """Raises NotPermitted where the Host field names somebody else (DNS rebinding), or a page of somebody else's asks.

    The port may be left out, and is any with a name of `hosts`: a server before Hive under that name has its own.

    >>> here = Reached("127.0.0.1", 3000, "127.0.0.1", frozenset({"hive.lan"}))
    >>> check_host([b"localhost:3000"], [], here), check_host([b"hive.lan:8443"], [b"https://hive.lan:8443"], here)
    (None, None)
    >>> check_host([b"evil.test:3000"], [], here)
    Traceback (most recent call last):
    hive.errors.NotPermitted: this is not evil.test:3000
    """
    host = fields[0].decode("latin-1").lower() if len(fields) == 1 else ""
    found = _AUTHORITY.fullmatch(host)
    if found is None:
        raise NotPermitted("the request has no Host field that can be read", hint="send one, such as localhost")
    name, port = plain(found[1]), found[2]
    if name not in reached.hosts and not (name in reached.names() and port in (None, str(reached.port))):
        raise NotPermitted(
            f"this is not {host[:80]}", hint=f"ask localhost:{reached.port}, or name it in `hosts` of [api]"
        )
    if origins and [origin.decode("latin-1").lower() for origin in origins] not in (
        [f"http://{host}"],
        [f"https://{host}"],
    ):
        raise NotPermitted("a page of another origin may not ask this Hive", hint="browsers are kept out on purpose")


def hosts_of(text: str) -> frozenset[str]:
    """The names in a setting.

    >>> sorted(hosts_of("hive.lan, Hive.example.com,, [fd00:0::1]"))
    ['fd00::1', 'hive.example.com', 'hive.lan']
    """
    return frozenset(plain(name.strip()) for name in text.split(",") if name.strip())


def plain(name: str) -> str:
    """One spelling for each: without brackets, in lower case, an address as short as it can be.

    >>> plain("[0:0::1]"), plain("::ffff:127.0.0.1"), plain("LocalHost")
    ('::1', '127.0.0.1', 'localhost')
    """
    bare = name.lower().removeprefix("[").removesuffix("]")
    try:
        address = ip_address(bare)
    except ValueError:
        return bare
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
