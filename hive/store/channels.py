"""The messages published: the JSON of each channel, as structs.

`hive:agent:status` carries `AgentChanged`, `hive:agent:logs` `AgentLogged`, `hive:system:events` `SystemEvent`.
Nobody may depend on receiving one: a subscriber that was away, or a Redis that was down, misses it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hive.store import keys


class AgentChanged(msgspec.Struct, frozen=True, kw_only=True, rename={"was": "from", "now": "to"}):
    """One transition: `{"at","agent","name","from","to","generation","reason","actor","outcome"}`.

    `at` Unix seconds; `from`, `to` agent statuses; `outcome` `ok` or the code of the error.
    """

    at: float
    agent: str
    name: str
    was: str
    now: str
    generation: int
    reason: str = ""
    actor: str = ""
    outcome: str = "ok"


class AgentLogged(msgspec.Struct, frozen=True, kw_only=True):
    """One line an agent wrote: `{"at","agent","name","line"}`, `at` Unix seconds."""

    at: float
    agent: str
    name: str
    line: str


class SystemEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something about Hive itself: `{"at","kind","detail"}`, as `backend.up`, `redis.restarted`, `store.full`."""

    at: float
    kind: str
    detail: dict[str, Any] = {}


CHANNELS: dict[type[msgspec.Struct], str] = {
    AgentChanged: keys.AGENT_STATUS,
    AgentLogged: keys.AGENT_LOGS,
    SystemEvent: keys.SYSTEM_EVENTS,
}
