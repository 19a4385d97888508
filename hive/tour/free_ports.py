"""Free ports for the tour's agents, looked for at random: two tours that begin together look at different ones."""

from __future__ import annotations

import random

from hive.demo.callers import is_free
from hive.errors import DependencyDown

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ephemeral range (32768 and up), so that no outgoing connection sits on one."""


def free_ports(count: int) -> list[int]:
    """So many different ports of 127.0.0.1 at which nobody listens. Raises DependencyDown."""
    found: list[int] = []
    for port in random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    if len(found) < count:
        raise DependencyDown(f"no {count} ports from {FIRST_PORT} to {LAST_PORT} are free")
    return found
