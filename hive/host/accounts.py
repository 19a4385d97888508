"""Which user each service of Hive runs as, and which groups may call it."""

from __future__ import annotations

import grp
import os
import pwd
from typing import NamedTuple

from hive.errors import ConfigError

DAEMON, PROXY = "hive", "hive-proxy"
OPERATORS, ADMINS = "hive", "hive-admin"
"""Groups of people: those who steer agents, and those who change Hive itself (they are in both)."""


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
