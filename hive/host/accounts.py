"""The user of each service of Hive, and the groups that may call it."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import time
from typing import NamedTuple

from hive.errors import ConfigError

DAEMON, PROXY, SERVERS = "hive", "hive-proxy", "hive-inference"
OPERATORS, ADMINS = "hive", "hive-admin"
"""Groups of people: those that steer agents, and those that change Hive itself (they are in both)."""


class Accounts(NamedTuple):
    """uids of the services. The rest are gids, None where every service is one user and nobody else calls them.

    `services`: may dial the sockets on which services call each other. `operators` and `admins`: people.
    """

    daemon: int
    proxy: int
    services: int | None = None
    operators: int | None = None
    admins: int | None = None


def own() -> Accounts:
    """`hive up`: every service is this user."""
    return Accounts(os.geteuid(), os.geteuid())


def appliance() -> Accounts:
    """An installed Hive: each service is a user of its own. Raises ConfigError where one is missing."""
    try:
        return Accounts(
            daemon=pwd.getpwnam(DAEMON).pw_uid,
            proxy=pwd.getpwnam(PROXY).pw_uid,
            services=grp.getgrnam(PROXY).gr_gid,
            operators=grp.getgrnam(OPERATORS).gr_gid,
            admins=grp.getgrnam(ADMINS).gr_gid,
        )
    except KeyError as error:
        raise ConfigError(f"there is no such account: {error.args[0]}", hint="sudo hive install makes it") from None


def servers_uid() -> int | None:
    """The user that inference servers of an installed Hive are; None where there is none."""
    try:
        return pwd.getpwnam(SERVERS).pw_uid
    except KeyError:
        return None


# --- names of people ---------------------------------------------------------------------------------------------

UID = "uid:"
"""Prefix of an actor's uid, where names are written down beside it."""
NAME_KEPT_S = 60.0
NAME_WITHIN_S = 1.0
"""A directory service that does not answer holds up an order no longer than this."""


def name_of(uid: int) -> str:
    """The user's name now; empty where this system has none for it, as in a container. May wait for a directory."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


class UserNames:
    """Names of users as they were at most a minute ago, for callers that must not wait for them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, str]] = {}
        self._asked: dict[int, asyncio.Future[str]] = {}

    def __repr__(self) -> str:
        return f"<UserNames {len(self._known)} known, {len(self._asked)} asked for>"

    async def learn(self, actor: str) -> None:
        """Afterwards `of` knows the name of `uid:<n>`, if it can be had within a second. Raises nothing."""
        if (uid := uid_of(actor)) is None:
            return
        at, _ = self._known.get(uid, (float("-inf"), ""))
        if time.monotonic() - at < NAME_KEPT_S:
            return
        asked = self._asked.get(uid)
        if asked is None or asked.done():
            asked = self._asked[uid] = asyncio.get_running_loop().run_in_executor(None, name_of, uid)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(NAME_WITHIN_S):
                name = await asyncio.shield(asked)
            self._known[uid] = (time.monotonic(), name)
            self._asked.pop(uid, None)

    def of(self, actor: str) -> str:
        """The name that was learnt last; empty for one that never was, and for what is no user."""
        uid = uid_of(actor)
        return "" if uid is None else self._known.get(uid, (0.0, ""))[1]


def uid_of(actor: str) -> int | None:
    """
    >>> uid_of("uid:1000"), uid_of("idle")
    (1000, None)
    """
    number = actor.removeprefix(UID)
    return int(number) if actor.startswith(UID) and number.isascii() and number.isdecimal() else None


NAMES = UserNames()
"""The names of this system, for all code that records acts of people."""
