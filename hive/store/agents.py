"""Agents and their uids in SQLite. Every function takes the connection of one transaction (`Database.write`)."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Mapping

import msgspec

from hive.domain import Agent, AgentSpec, AgentStatus, CloudUse, SleepDepth
from hive.errors import NotFound, Saturated, WrongState

_decode_spec = msgspec.json.Decoder(AgentSpec).decode

# Totals and last_active_at are not among these: they belong to the rows of usage (`usage.insert`, `touch`), and an
# Agent held in memory has old ones.
_WRITTEN = (
    *("id", "name", "runtime", "spec", "status", "depth", "depth_goal", "generation", "reason", "since", "tenant"),
    *("inference_tier", "preferred_model", "restart", "uid", "token_serial", "created_at"),
    *("keep_awake_until", "stopped_by"),
)
_INSERT = f"INSERT INTO agents ({', '.join(_WRITTEN)}) VALUES ({', '.join(f':{name}' for name in _WRITTEN)})"
_UPDATE = f"UPDATE agents SET {', '.join(f'{name} = :{name}' for name in _WRITTEN[1:])} WHERE id = :id"

NOT_FOR_AGENTS = frozenset({65534, 65535})
"""`nobody`, and (uid_t) -1 in 16 bits."""
_PROMPT = ("system_prompt", "prewarm_on_start")
"""Fields of a spec that have a table of their own (migrations.py)."""
_PUT_PROMPT = """
INSERT INTO agent_prompts VALUES (?, ?, ?) ON CONFLICT (agent_id) DO UPDATE
SET system_prompt = excluded.system_prompt, prewarm_on_start = excluded.prewarm_on_start
WHERE system_prompt IS NOT excluded.system_prompt OR prewarm_on_start != excluded.prewarm_on_start
"""
_LIMITS = ("cloud", "tokens_per_day", "tokens_per_month", "cloud_tokens_per_day")
"""The same."""
_PUT_LIMITS = f"""
INSERT INTO agent_limits (agent_id, {", ".join(_LIMITS)}) VALUES (?{", ?" * len(_LIMITS)})
ON CONFLICT (agent_id) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _LIMITS)}
WHERE {" OR ".join(f"{name} IS NOT excluded.{name}" for name in _LIMITS)}
"""
_ALL = f"""
SELECT agents.*, template, system_prompt, prewarm_on_start, {", ".join(f"agent_limits.{name}" for name in _LIMITS)}
FROM agents
LEFT JOIN agent_prompts ON agent_prompts.agent_id = agents.id
LEFT JOIN agent_limits ON agent_limits.agent_id = agents.id
LEFT JOIN agent_templates ON agent_templates.agent_id = agents.id
ORDER BY created_at, id
"""


_OF_NO_BLOCK = (
    "NOT EXISTS (SELECT 1 FROM template_uids AS t WHERE uid BETWEEN t.first_uid AND t.first_uid + t.uids - 1)"
)
"""The uids of a template's block are its agents' alone (template_uids.py)."""


def insert(conn: sqlite3.Connection, agent: Agent) -> None:
    """Adds a new agent. Raises WrongState where its name or its cid is taken."""
    try:
        conn.execute(_INSERT, _row(agent))
        _put_prompt(conn, agent)
        _put_limits(conn, agent)
        if agent.spec.template is not None:
            conn.execute("INSERT OR REPLACE INTO agent_templates VALUES (?, ?)", (agent.id, agent.spec.template))
    except sqlite3.IntegrityError as error:
        raise _taken(conn, agent) from error


def update(conn: sqlite3.Connection, agent: Agent) -> None:
    """Writes everything of `agent` but its totals, its last activity and its template, which is for good.

    Raises WrongState where its name or its cid is taken.
    """
    try:
        conn.execute(_UPDATE, _row(agent))
        _put_prompt(conn, agent)
        _put_limits(conn, agent)
    except sqlite3.IntegrityError as error:
        raise _taken(conn, agent) from error


def remove(conn: sqlite3.Connection, agent_id: str, *, now: float) -> None:
    """Forgets the agent, its messages and schedules, and frees its uid; its usage stays.

    Removing one that is not there does nothing.
    """
    conn.execute("DELETE FROM agents WHERE id = ?", (agent_id,))
    conn.execute("DELETE FROM agent_prompts WHERE agent_id = ?", (agent_id,))
    conn.execute("DELETE FROM agent_limits WHERE agent_id = ?", (agent_id,))
    conn.execute("DELETE FROM agent_templates WHERE agent_id = ?", (agent_id,))
    conn.execute("DELETE FROM messages WHERE agent_id = ?", (agent_id,))
    conn.execute("DELETE FROM schedules WHERE agent_id = ?", (agent_id,))
    conn.execute("UPDATE uids SET freed_at = ? WHERE agent_id = ? AND freed_at IS NULL", (now, agent_id))


def check_there(conn: sqlite3.Connection, agent_id: str, *, name: str) -> None:
    """Raises NotFound where the agent, called `name`, was removed: what is kept for it now would stay for ever."""
    if conn.execute("SELECT 1 FROM agents WHERE id = ?", (agent_id,)).fetchone() is None:
        raise NotFound(f"{name} was removed")


def all(conn: sqlite3.Connection) -> list[Agent]:
    """Every agent, oldest first."""
    return [_agent(row) for row in conn.execute(_ALL)]


def touch(conn: sqlite3.Connection, active_at: Mapping[str, float]) -> None:
    """Records activity: agent id → Unix seconds. An older time than the recorded one changes nothing."""
    conn.executemany(
        "UPDATE agents SET last_active_at = max(coalesce(last_active_at, 0), ?) WHERE id = ?",
        [(at, agent_id) for agent_id, at in active_at.items()],
    )


def allocate_uid(
    conn: sqlite3.Connection,
    agent_id: str,
    *,
    first_uid: int,
    in_use: Collection[int],
    freed_before: float = math.inf,
) -> int:
    """The agent's uid: the one it holds, else the lowest from `first_uid` up that an agent gave back, else a new one.

    `in_use`: uids a process lives under now; none of them is given out, also where its agent was removed.
    `freed_before`: what was given back later is not given out yet, for `in_use` may not know of it.
    Raises Saturated where the 32-bit range is exhausted.
    """
    held = conn.execute("SELECT uid FROM uids WHERE agent_id = ? AND freed_at IS NULL", (agent_id,)).fetchone()
    if held is not None:
        return int(held["uid"])
    freed = conn.execute(
        "SELECT uid FROM uids WHERE freed_at IS NOT NULL AND uid >= ? AND freed_at < ?"
        f" AND {_OF_NO_BLOCK} ORDER BY uid",
        (first_uid, freed_before),
    )
    uid = next((int(row[0]) for row in freed if row[0] not in in_use), None)
    if uid is None:
        uid = max(first_uid, 1 + (conn.execute("SELECT max(uid) FROM uids").fetchone()[0] or 0))
        while uid in NOT_FOR_AGENTS or uid in in_use:
            uid += 1
    if uid >= 2**32 - 2:
        raise Saturated("no uid is left for another agent")
    conn.execute("INSERT OR REPLACE INTO uids (uid, agent_id, freed_at) VALUES (?, ?, NULL)", (uid, agent_id))
    return uid


def name_taken(name: str) -> WrongState:
    """The conflict of a new agent with the one that has its name.

    >>> name_taken("summ").message
    'there is an agent named summ already'
    """
    change = f"hive agent export {name} > {name}.toml, change it, hive agent apply {name}.toml"
    hint = f"hive agent remove {name}, then again; or {change}"
    return WrongState(f"there is an agent named {name} already", hint=hint)


def _taken(conn: sqlite3.Connection, agent: Agent) -> WrongState:
    """The conflict with another agent: its cid, taken by an agent of another name, else its name."""
    found = conn.execute(
        "SELECT name FROM agents WHERE json_extract(spec, '$.cid') = ? AND id != ? AND name != ?",
        (agent.spec.cid, agent.id, agent.name),
    ).fetchone()
    if found is None:
        return name_taken(agent.name)
    return WrongState(
        f"cid {agent.spec.cid} is that of {found['name']} already", hint="each machine has one of its own"
    )


def _put_prompt(conn: sqlite3.Connection, agent: Agent) -> None:
    """Writes nothing where it is there already, as with most transitions."""
    spec = agent.spec
    if spec.system_prompt is None and not spec.prewarm_on_start:
        conn.execute("DELETE FROM agent_prompts WHERE agent_id = ?", (agent.id,))
    else:
        conn.execute(_PUT_PROMPT, (agent.id, spec.system_prompt, spec.prewarm_on_start))


def _put_limits(conn: sqlite3.Connection, agent: Agent) -> None:
    """Writes nothing where it is there already, too."""
    limits = [getattr(agent.spec, name) for name in _LIMITS]
    if limits.count(None) == len(limits):
        conn.execute("DELETE FROM agent_limits WHERE agent_id = ?", (agent.id,))
    else:
        conn.execute(_PUT_LIMITS, (agent.id, *limits))


def _row(agent: Agent) -> dict[str, object]:
    spec = agent.spec
    kept: dict[str, object] = msgspec.structs.asdict(spec)
    for field in (*_PROMPT, *_LIMITS, "template"):
        del kept[field]
    return {
        "id": agent.id,
        "name": spec.name,
        "runtime": str(spec.runtime),
        "spec": msgspec.json.encode(kept).decode(),
        "status": str(agent.status),
        "depth": str(agent.depth),
        "depth_goal": str(agent.depth_goal),
        "generation": agent.generation,
        "reason": agent.reason,
        "since": agent.since,
        "tenant": spec.tenant,
        "inference_tier": str(spec.tier),
        "preferred_model": spec.model,
        "restart": str(spec.restart),
        "uid": agent.uid,
        "token_serial": agent.token_serial,
        "created_at": agent.created_at,
        "keep_awake_until": agent.keep_awake_until,
        "stopped_by": agent.stopped_by,
    }


def _agent(row: sqlite3.Row) -> Agent:
    spec = _decode_spec(row["spec"])
    if row["prewarm_on_start"] is not None:  # else it has no row among the prompts
        prompt, ahead = row["system_prompt"], bool(row["prewarm_on_start"])
        spec = msgspec.structs.replace(spec, system_prompt=prompt, prewarm_on_start=ahead)
    if row["template"] is not None:
        spec = msgspec.structs.replace(spec, template=row["template"])
    limits = {name: row[name] for name in _LIMITS if row[name] is not None}
    if limits:
        cloud = {"cloud": CloudUse(limits["cloud"])} if "cloud" in limits else {}
        spec = msgspec.structs.replace(spec, **limits | cloud)
    return Agent(
        id=row["id"],
        spec=spec,
        status=AgentStatus(row["status"]),
        depth=SleepDepth(row["depth"]),
        depth_goal=SleepDepth(row["depth_goal"]),
        generation=row["generation"],
        since=row["since"],
        reason=row["reason"],
        uid=row["uid"],
        token_serial=row["token_serial"],
        tokens_in=row["total_tokens_in"],
        tokens_out=row["total_tokens_out"],
        requests=row["total_requests"],
        last_active_at=row["last_active_at"],
        created_at=row["created_at"],
        keep_awake_until=row["keep_awake_until"],
        stopped_by=row["stopped_by"],
    )
