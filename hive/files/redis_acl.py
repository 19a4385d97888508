"""The rights at the appliance's own Redis: one user for Hive's daemon, one for people, no other. Pure.

The rules are selectors (Redis 7.0): a command is let through where one of them allows the command *and* all its keys.
A test holds them against everything store/live.py does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hive.store import keys
from hive.store.channels import CHANNELS

SERVICES = ("daemon",)
"""Each has a password, a secret of the appliance."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NOTHING = "resetkeys resetchannels clearselectors -@all"


def acl_file(hashes: Mapping[str, str]) -> str:
    """The content of Redis's `aclfile`; `hashes`: SHA-256 of each service's password, as lower-case hex.

    A user without one is off. `viewer` has no password: the mode of the socket limits who gets that far. Raises
    ValueError for what is no such hash.

    >>> acl_file({"daemon": "ab" * 32}).splitlines()[0]
    'user default off resetkeys resetchannels clearselectors -@all'
    """
    lines = [f"user default off {_NOTHING}"]
    for user in SERVICES:
        password = _password(hashes.get(user))
        lines.append(f"user {user} {password} {_NOTHING} {' '.join(_RULES[user])}")
    lines.append(f"user viewer on nopass {_NOTHING} {' '.join(_VIEWER)}")
    return "\n".join([*lines, ""])


def _password(sha256: str | None) -> str:
    if sha256 is None:
        return "off"
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError("a password is given as its SHA-256, 64 hexadecimal digits in lower case")
    return f"on #{sha256}"


def _may(commands: str, *patterns: str) -> str:
    """A selector: these commands with keys of these patterns.

    >>> _may("set del", "%W~a:*", "~b")
    '(+set +del %W~a:* ~b)'
    """
    return f"({' '.join([*(f'+{command}' for command in commands.split()), *patterns])})"


_RULES: dict[str, tuple[str, ...]] = {
    "daemon": (
        *(f"&{channel}" for channel in CHANNELS.values()),
        "+ping +info +scan +publish +multi +exec",
        _may(
            "set",
            f"%W~{keys.agent_paused('*')}",
            f"%W~{keys.agent_tier('*')}",
            f"%W~{keys.agent_prompt('*')}",
            f"%W~{keys.agent_activity('*')}",
            f"%W~{keys.PROMPTS}",
            f"%W~{keys.VM_INSTANCES}",
            f"%W~{keys.VM_CIDS}",
            f"%W~{keys.MODELS_AVAILABLE}",
            f"%W~{keys.INFERENCE_BACKEND}",
            f"%W~{keys.CONFIG_RUNTIME}",
            f"%W~{keys.gpu_lease('*')}",
        ),
        _may("del", f"%W~{keys.PROMPTS}", f"%W~{keys.gpu_lease('*')}"),
        _may("sadd expire", f"%W~{keys.prompt_agents('*')}"),
        # An agent that is forgotten: what leads to it is found by SCAN.
        _may("del", "%W~hive:agent:*", f"%W~{keys.VM_INSTANCES}", f"%W~{keys.VM_CIDS}"),
        _may("mget", f"%R~{keys.VM_INSTANCES}", f"%R~{keys.VM_CIDS}"),
        _may("hset", f"%W~{keys.agent_tokens('*')}"),
        _may("zadd zrem zremrangebyscore expire", f"~{keys.AGENTS_ACTIVITY}"),
        _may("xadd xreadgroup xack xdel xgroup|destroy", f"~{keys.USAGE_STREAM}"),
    ),
}
_SHOWN = ("agent", "agents", "vm", "models", "inference", "config", "gpu")
"""The second word of keys that any user may read who gets to Redis."""
_VIEWER = (
    *(f"%R~hive:{word}:*" for word in _SHOWN),
    *(f"%R~{keys.USAGE_STREAM}", f"%R~{keys.prompt_agents('*')}", "&hive:*"),
    "+@read -@dangerous -@blocking +ping +info +subscribe +psubscribe",
)
"""To look at everything but the text of prompts, which is their tenants' own, change nothing, and delay nothing."""
