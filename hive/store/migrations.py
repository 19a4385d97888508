"""The tables, as steps that only add, so that a version of Hive runs on the database of the next one.

`PRAGMA user_version` says how many of them code has to know to use the file: code that knows fewer refuses it. The
table `schema_steps` names those that were taken beyond: code that does not know one of these goes on all the same,
because what it added is none of its business.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import NamedTuple

from hive import __version__
from hive.errors import WrongState

log = logging.getLogger("hive.store")

_FIRST = """
CREATE TABLE agents (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    runtime TEXT NOT NULL,
    spec TEXT NOT NULL,
    status TEXT NOT NULL,
    depth TEXT NOT NULL,
    depth_goal TEXT NOT NULL,
    generation INTEGER NOT NULL,
    reason TEXT NOT NULL,
    since REAL NOT NULL,
    tenant TEXT NOT NULL,
    inference_tier TEXT NOT NULL DEFAULT 'medium',
    preferred_model TEXT,
    restart TEXT NOT NULL,
    uid INTEGER,
    token_serial INTEGER NOT NULL,
    total_requests INTEGER NOT NULL DEFAULT 0,
    total_tokens_in INTEGER NOT NULL DEFAULT 0,
    total_tokens_out INTEGER NOT NULL DEFAULT 0,
    last_active_at REAL,
    created_at REAL NOT NULL
) STRICT;

CREATE TABLE inference_usage (
    id TEXT PRIMARY KEY,
    agent_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    backend TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    unit TEXT NOT NULL,
    tokens_in INTEGER,
    tokens_out INTEGER,
    cached_tokens INTEGER,
    estimated INTEGER NOT NULL,
    cut INTEGER NOT NULL,
    queue_ms REAL NOT NULL,
    ttft_ms REAL,
    duration_ms REAL NOT NULL,
    status INTEGER NOT NULL,
    client_request_id TEXT,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX inference_usage_agent ON inference_usage (agent_id, created_at);
CREATE INDEX inference_usage_time ON inference_usage (created_at);

CREATE TABLE usage_marks (
    proxy_epoch TEXT PRIMARY KEY,
    committed_to INTEGER NOT NULL,
    lost INTEGER NOT NULL DEFAULT 0,
    updated_at REAL NOT NULL
) STRICT;

CREATE TABLE runtime_settings (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    actor TEXT NOT NULL,
    updated_at REAL NOT NULL
) STRICT;

CREATE TABLE audit_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    actor TEXT NOT NULL,
    act TEXT NOT NULL,
    target TEXT NOT NULL,
    origin TEXT NOT NULL,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

CREATE TABLE uids (
    uid INTEGER PRIMARY KEY,
    agent_id TEXT NOT NULL,
    freed_at REAL
) STRICT;
"""

_CIDS = "CREATE UNIQUE INDEX agents_cid ON agents (json_extract(spec, '$.cid'))"
"""No two agents have one cid; those that have none (NULL) are as many as there are."""

_SLEEP = """
ALTER TABLE agents ADD COLUMN keep_awake_until REAL;
ALTER TABLE agents ADD COLUMN stopped_by TEXT NOT NULL DEFAULT '';

CREATE TABLE messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    agent_id TEXT NOT NULL,
    text TEXT NOT NULL,
    sender TEXT NOT NULL,
    sent_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    refusals INTEGER NOT NULL DEFAULT 0,
    last_error TEXT NOT NULL DEFAULT '',
    delivered_at REAL,
    refused_at REAL
) STRICT;
CREATE INDEX messages_undelivered ON messages (agent_id, number) WHERE delivered_at IS NULL;
CREATE INDEX messages_delivered ON messages (agent_id, delivered_at) WHERE delivered_at IS NOT NULL;

CREATE TABLE schedules (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    agent_id TEXT NOT NULL,
    at REAL NOT NULL,
    every_s REAL,
    clock TEXT NOT NULL DEFAULT '',
    note TEXT NOT NULL,
    actor TEXT NOT NULL,
    created_at REAL NOT NULL,
    last_at REAL,
    last_outcome TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX schedules_agent ON schedules (agent_id);
"""
"""Messages and schedules go with their agent (`agents.remove`)."""

_JOBS = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    progress TEXT NOT NULL,
    eta_s REAL,
    plan TEXT NOT NULL,
    result TEXT,
    error TEXT,
    actor TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
) STRICT;
CREATE INDEX jobs_time ON jobs (created_at);
"""

_CHAIN = """
ALTER TABLE audit_log ADD COLUMN prev TEXT;
ALTER TABLE audit_log ADD COLUMN hash TEXT;

CREATE TABLE audit_pruned (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id INTEGER NOT NULL,
    hash TEXT NOT NULL
) STRICT;
"""
"""Rows without a hash are taken into the chain by `audit.take_in`; `audit_pruned` has the last one that was pruned."""

_ROLLUPS = """
ALTER TABLE inference_usage ADD COLUMN rolled_up INTEGER NOT NULL DEFAULT 0;
CREATE INDEX inference_usage_unrolled ON inference_usage (created_at) WHERE rolled_up = 0;

ALTER TABLE usage_marks ADD COLUMN ahead TEXT NOT NULL DEFAULT '[]';

CREATE TABLE usage_names (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    last_day INTEGER NOT NULL
) STRICT;

CREATE TABLE usage_hours (
    scope INTEGER NOT NULL,
    begins INTEGER NOT NULL,
    model INTEGER NOT NULL,
    agent INTEGER NOT NULL,
    tenant INTEGER NOT NULL,
    backend INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    unknown INTEGER NOT NULL,
    cut INTEGER NOT NULL,
    PRIMARY KEY (scope, begins, model, agent, tenant, backend)
) STRICT, WITHOUT ROWID;

CREATE TABLE usage_days (
    scope INTEGER NOT NULL,
    begins INTEGER NOT NULL,
    model INTEGER NOT NULL,
    agent INTEGER NOT NULL,
    tenant INTEGER NOT NULL,
    backend INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    unknown INTEGER NOT NULL,
    cut INTEGER NOT NULL,
    PRIMARY KEY (scope, begins, model, agent, tenant, backend)
) STRICT, WITHOUT ROWID;

CREATE TABLE usage_weeks (
    scope INTEGER NOT NULL,
    begins INTEGER NOT NULL,
    model INTEGER NOT NULL,
    agent INTEGER NOT NULL,
    tenant INTEGER NOT NULL,
    backend INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    unknown INTEGER NOT NULL,
    cut INTEGER NOT NULL,
    PRIMARY KEY (scope, begins, model, agent, tenant, backend)
) STRICT, WITHOUT ROWID;

CREATE TABLE usage_kept (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    requests_from INTEGER NOT NULL,
    sums_from INTEGER NOT NULL
) STRICT;
"""
"""The sums of rollups.py. Rows of an older Hive, written before this step or after it, have `rolled_up` 0: by that the
next one knows which of them are in no sum yet."""

_TOKENS = """
CREATE TABLE api_tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL,
    last_used_at REAL
) STRICT;
CREATE INDEX api_tokens_name ON api_tokens (name);
"""

NAME_IN_DETAIL = "CASE WHEN json_valid(detail) THEN json_extract(detail, '$.name') END"
"""The name a row of the audit table tells; a detail that is no JSON, as a forger may leave it, tells none and stops
neither this step nor a query."""

_AUDIT_INDEXES = f"""
CREATE INDEX audit_target ON audit_log (target, id);
CREATE INDEX audit_name ON audit_log ({NAME_IN_DETAIL}, id);
"""

"""So that the rows of one agent are found among a million without a look at all others. To make them then takes some
5 s, once, and 0.1 ms a row."""

_PROMPTS = """
CREATE TABLE agent_prompts (
    agent_id TEXT PRIMARY KEY,
    system_prompt TEXT,
    prewarm_on_start INTEGER NOT NULL DEFAULT 0
) STRICT;
"""
"""Not in the spec's own column: an older Hive refuses a spec with what it does not know, and that row is written with
every transition of its agent, a prompt of 256 KiB hardly ever."""

_UIDS = """
CREATE INDEX uids_agent ON uids (agent_id) WHERE freed_at IS NULL;
CREATE INDEX uids_freed ON uids (uid) WHERE freed_at IS NOT NULL;
"""
"""So that to give a uid out, or back, is no look at every agent's."""

_POOL = """
CREATE TABLE footprints (
    key TEXT PRIMARY KEY,
    data TEXT NOT NULL,
    updated_at REAL NOT NULL
) STRICT;
CREATE TABLE pool_pins (
    model TEXT PRIMARY KEY,
    pinned INTEGER NOT NULL,
    since REAL NOT NULL,
    actor TEXT NOT NULL
) STRICT;
"""
"""`pool_pins`: an operator's word, over what the model's entry says."""

_LEASES = """
CREATE TABLE leases (
    token INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    actor TEXT NOT NULL,
    label TEXT NOT NULL,
    mb INTEGER NOT NULL,
    gpus INTEGER NOT NULL,
    band TEXT NOT NULL,
    preemptible INTEGER NOT NULL,
    is_whole INTEGER NOT NULL,
    grace_s REAL NOT NULL,
    wait_s REAL NOT NULL,
    max_s REAL,
    ttl_s REAL,
    accounts TEXT NOT NULL,
    boot TEXT NOT NULL,
    asked_s REAL NOT NULL,
    granted_s REAL,
    until_s REAL,
    created_at REAL NOT NULL,
    granted_at REAL,
    ended_at REAL,
    why TEXT NOT NULL,
    code TEXT NOT NULL
) STRICT;
CREATE INDEX leases_living ON leases (token) WHERE state != 'ended';
"""
"""`asked_s`, `granted_s`, `until_s`: of the monotonic clock of the run of the machine `boot`."""

_ASKED = """
ALTER TABLE inference_usage ADD COLUMN asked TEXT NOT NULL DEFAULT '';
ALTER TABLE inference_usage ADD COLUMN rung INTEGER;
ALTER TABLE inference_usage ADD COLUMN far INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_hours ADD COLUMN far INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_days ADD COLUMN far INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_weeks ADD COLUMN far INTEGER NOT NULL DEFAULT 0;
"""
"""`asked`: the name that the request had for its model; `rung`: where that is in the list of the task that was asked;
`far`: the request left the box, in the sums: so many did."""

_AGENT_LIMITS = """
CREATE TABLE agent_limits (
    agent_id TEXT PRIMARY KEY,
    cloud TEXT,
    tokens_per_day INTEGER,
    tokens_per_month INTEGER,
    cloud_tokens_per_day INTEGER
) STRICT;
CREATE INDEX inference_usage_far ON inference_usage (created_at) WHERE far = 1;
"""
"""Not in the spec's own column, for the same reason as the prompts. NULL: no limit of its own."""

_GOVERNANCE = """
CREATE TABLE op_nonces (
    nonce TEXT PRIMARY KEY,
    operation TEXT NOT NULL,
    approved_by TEXT NOT NULL,
    used_at REAL NOT NULL,
    keep_until REAL NOT NULL
) STRICT;
CREATE INDEX op_nonces_kept ON op_nonces (keep_until);

CREATE TABLE op_box (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL,
    clock REAL NOT NULL
) STRICT;
"""
"""Tokens of governed operations that were used. `clock`: the latest time this box has seen."""

_BOX_MADE = """
ALTER TABLE op_box ADD COLUMN made_at REAL NOT NULL DEFAULT 0;
UPDATE op_box SET made_at = clock;
"""
"""The id of a box is as old as that: no token that names no box is older."""

_CACHE_EPOCHS = """
CREATE TABLE cache_epochs (
    key TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    at REAL NOT NULL,
    actor TEXT NOT NULL
) STRICT;
"""

_PARKED_SLOTS = """
CREATE TABLE parked_slots (
    agent TEXT PRIMARY KEY,
    cache_group TEXT NOT NULL,
    server TEXT NOT NULL,
    made_for TEXT NOT NULL,
    file TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    tag TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
"""
"""One file for each sleeping agent (hive/store/parked_slots.py)."""

_DEPLOYMENTS = """
CREATE TABLE deployments (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    path TEXT NOT NULL,
    backend TEXT NOT NULL,
    base TEXT NOT NULL,
    signature TEXT NOT NULL,
    deployed_by TEXT NOT NULL,
    at REAL NOT NULL,
    state TEXT NOT NULL,
    last_error TEXT NOT NULL
) STRICT;
"""
"""`kind`: model, adapter or draft."""

_ADAPTERS_LOADED = """
CREATE TABLE adapters_loaded (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    previous TEXT NOT NULL,
    base TEXT NOT NULL,
    loaded_at REAL NOT NULL,
    by TEXT NOT NULL
) STRICT;
"""
"""The digest that answers to the name of each adapter."""

_JOB_TURNS = """
CREATE TABLE job_turns (
    job TEXT NOT NULL,
    n INTEGER NOT NULL,
    answer TEXT NOT NULL,
    thinking TEXT NOT NULL,
    calls TEXT NOT NULL,
    results TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    tokens_in INTEGER,
    tokens_out INTEGER,
    tokens_cached INTEGER,
    at REAL NOT NULL,
    PRIMARY KEY (job, n)
) STRICT, WITHOUT ROWID;
CREATE TABLE job_signals (
    job TEXT NOT NULL,
    n INTEGER NOT NULL,
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,
    turn INTEGER NOT NULL,
    has_ended INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (job, n)
) STRICT, WITHOUT ROWID;
"""
"""Of model jobs, `n` from 1. Tokens are NULL where the server did not tell."""

_LOAD_TASKS = """
CREATE TABLE load_tasks (
    job TEXT PRIMARY KEY,
    asked TEXT NOT NULL,
    model TEXT NOT NULL,
    evicts TEXT NOT NULL,
    state TEXT NOT NULL,
    memory_mb INTEGER,
    took_ms INTEGER,
    error TEXT NOT NULL,
    begun_at REAL NOT NULL,
    ended_at REAL
) STRICT;
"""
"""Loads that were ordered by the runner API. A task is answered for as long as there is this file, a job is not."""

_UNITS = """
ALTER TABLE inference_usage ADD COLUMN amount REAL;
ALTER TABLE inference_usage ADD COLUMN work REAL;
ALTER TABLE usage_hours ADD COLUMN audio_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_hours ADD COLUMN images INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_hours ADD COLUMN pixel_steps INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_days ADD COLUMN audio_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_days ADD COLUMN images INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_days ADD COLUMN pixel_steps INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_weeks ADD COLUMN audio_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_weeks ADD COLUMN images INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage_weeks ADD COLUMN pixel_steps INTEGER NOT NULL DEFAULT 0;
"""
"""`amount`: of the row's `unit`, where that is not tokens; `work`: of images, the pixels of all their steps. The sums
are whole numbers, as they are also subtracted."""

_TEMPLATES = """
CREATE TABLE agent_templates (
    agent_id TEXT PRIMARY KEY,
    template TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE template_uids (
    first_uid INTEGER PRIMARY KEY,
    uids INTEGER NOT NULL,
    template TEXT NOT NULL,
    owner TEXT NOT NULL,
    UNIQUE (template, owner)
) STRICT;
"""
"""The template of an agent is part of its spec, in a table of its own as older code knows no such field. `first_uid`,
`uids`: the block of a template; its first and its last one are held in `uids`, so that older code passes over it."""

STEPS: tuple[str, ...] = (
    _FIRST,
    _CIDS,
    _SLEEP,
    _JOBS,
    _CHAIN,
    _ROLLUPS,
    _TOKENS,
    _AUDIT_INDEXES,
    _PROMPTS,
    _UIDS,
    _POOL,
    _LEASES,
    _ASKED,
    _AGENT_LIMITS,
    _GOVERNANCE,
    _CACHE_EPOCHS,
    _DEPLOYMENTS,
    _LOAD_TASKS,
    _BOX_MADE,
    _PARKED_SLOTS,
    _ADAPTERS_LOADED,
    _JOB_TURNS,
    _UNITS,
    _TEMPLATES,
)
"""A step that has been released is never changed; new ones are appended and only add: tables, columns that are NULL or
have a default, indexes that refuse nothing (tests/store/test_migrations.py)."""

READABLE_FROM = 3
"""Number of steps code has to know. A step that older code cannot live with would raise it to its own number."""

_TAKEN = """
CREATE TABLE IF NOT EXISTS schema_steps (
    number INTEGER PRIMARY KEY,
    hive TEXT NOT NULL,
    taken_at REAL NOT NULL
) STRICT
"""


class SchemaVersion(NamedTuple):
    """`taken`: steps that were taken. `readable_from`: how many code has to know."""

    taken: int
    readable_from: int


def schema_of(conn: sqlite3.Connection) -> SchemaVersion:
    """The schema of a database that Hive wrote; zeros for an empty one. Raises sqlite3.Error."""
    readable_from: int = conn.execute("PRAGMA user_version").fetchone()[0]
    has_table = conn.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'schema_steps'").fetchone()
    last = conn.execute("SELECT max(number) FROM schema_steps").fetchone()[0] if has_table else None
    return SchemaVersion(max(last or 0, readable_from), readable_from)


def refuse_newer(schema: SchemaVersion, known: int = len(STEPS)) -> None:
    """Raises WrongState where code that knows `known` steps cannot use such a database."""
    if schema.readable_from > known:
        raise WrongState(
            f"the database was written by a newer Hive (its version {schema.taken}, known here {known})",
            hint="install that version again, or start with another --state-dir",
        )


def migrate(conn: sqlite3.Connection, steps: tuple[str, ...] = STEPS, *, readable_from: int = READABLE_FROM) -> int:
    """Takes the missing steps; returns how many were taken.

    In one transaction each; a new database takes all of them in one, as each commit waits for the disk.

    Raises WrongState where a newer Hive wrote the file and changed what this one knows, sqlite3.Error as SQLite does.
    """
    schema = schema_of(conn)
    refuse_newer(schema, len(steps))
    if schema.taken > len(steps):
        log.warning(
            "database_newer steps=%d known=%d: what the newer Hive added is left alone", schema.taken, len(steps)
        )
    missing = list(enumerate(steps[schema.taken :], schema.taken + 1))
    for together in [missing] if schema.taken == 0 else [[one] for one in missing]:
        conn.execute("BEGIN IMMEDIATE")
        try:
            for number, step in together:
                _take_step(conn, number, step, readable_from)
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise
    return max(0, len(steps) - schema.taken)


def _take_step(conn: sqlite3.Connection, number: int, step: str, readable_from: int) -> None:
    """Takes one step and writes down that it was taken, in the transaction of the caller."""
    # One by one: executescript() would commit before its first statement.
    for statement in filter(str.strip, step.split(";")):
        conn.execute(statement)
    if number > readable_from:
        conn.execute(_TAKEN)
        conn.execute("INSERT INTO schema_steps VALUES (?, ?, ?)", (number, __version__, time.time()))
    else:
        conn.execute(f"PRAGMA user_version = {number}")
