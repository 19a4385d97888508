"""The columns of every table of `hive.db` and `responses.db`: which may be read with SQL, and which hold a secret.

A column that is in neither list is hidden: a test fails for it (tests/store/test_secret_columns.py), and where a newer
Hive wrote the file nothing of what it added is shown by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Columns(NamedTuple):
    """The columns of one table, by name."""

    open: frozenset[str]
    secret: frozenset[str] = frozenset()

    def is_hidden(self, column: str) -> bool:
        return column not in self.open


NOTHING_KNOWN = Columns(frozenset())


def _columns(open_: str, secret: str = "") -> Columns:
    return Columns(frozenset(open_.split()), frozenset(secret.split()))


_SUMS = _columns(
    "scope begins model agent tenant backend requests tokens_in tokens_out cached_tokens unknown cut far audio_ms"
    " images pixel_steps"
)

TABLES: Mapping[str, Columns] = {
    "adapters_loaded": _columns("name digest previous base loaded_at by"),
    # The serial is no secret: a token is made with the box key, which is in a file of its own.
    "agents": _columns(
        "id name runtime status depth depth_goal generation reason since tenant inference_tier preferred_model restart"
        " uid token_serial total_requests total_tokens_in total_tokens_out last_active_at created_at keep_awake_until"
        " stopped_by",
        secret="spec",  # with the values of the agent's environment
    ),
    "agent_limits": _columns("agent_id cloud tokens_per_day tokens_per_month cloud_tokens_per_day"),
    "agent_prompts": _columns("agent_id prewarm_on_start", secret="system_prompt"),
    "agent_templates": _columns("agent_id template"),
    "api_tokens": _columns(
        "id name role created_by created_at expires_at revoked_at last_used_at",
        secret="digest",
    ),
    "audit_log": _columns("id at actor act target origin outcome detail prev hash"),
    "audit_pruned": _columns("one id hash"),
    "cache_epochs": _columns("key number at actor"),
    "deployments": _columns("id kind name digest path backend base signature deployed_by at state last_error"),
    "footprints": _columns("key data updated_at"),
    "leases": _columns(
        "token kind state actor label mb gpus band preemptible is_whole grace_s wait_s max_s ttl_s accounts boot"
        " asked_s granted_s until_s created_at granted_at ended_at why code"
    ),
    "inference_usage": _columns(
        "id agent_id tenant model backend endpoint unit tokens_in tokens_out cached_tokens estimated cut queue_ms"
        " ttft_ms duration_ms status client_request_id created_at rolled_up asked rung far amount work"
    ),
    "jobs": _columns("id kind state progress eta_s plan result error actor created_at updated_at"),
    "job_signals": _columns("job n name turn has_ended at", secret="arguments"),
    "job_turns": _columns(
        "job n finish_reason tokens_in tokens_out tokens_cached at",
        secret="answer thinking calls results",
    ),
    "load_tasks": _columns("job asked model evicts state memory_mb took_ms error begun_at ended_at"),
    "messages": _columns(
        "number id agent_id sender sent_at attempts refusals last_error delivered_at refused_at",
        secret="text",
    ),
    "op_box": _columns("one id clock made_at"),
    "op_nonces": _columns("nonce operation approved_by used_at keep_until"),
    "parked_slots": _columns("agent cache_group server made_for file bytes tokens tag at"),
    "pool_pins": _columns("model pinned since actor"),
    "runtime_settings": _columns("key value actor updated_at"),
    "schedules": _columns("id agent_id at every_s clock note actor created_at last_at last_outcome"),
    "schema_steps": _columns("number hive taken_at"),
    "template_uids": _columns("first_uid uids template owner"),
    "uids": _columns("uid agent_id freed_at"),
    "usage_days": _SUMS,
    "usage_hours": _SUMS,
    "usage_kept": _columns("one requests_from sums_from"),
    "usage_marks": _columns("proxy_epoch committed_to lost updated_at ahead"),
    "usage_names": _columns("id name last_day"),
    "usage_weeks": _SUMS,
    # responses.db
    "response_items": _columns("agent_id item_id number is_output place"),
    "responses": _columns("number agent_id id previous_id kept_at bytes", secret="items response"),
}


def is_hidden(table: str, column: str) -> bool:
    """Whether a column is NULL for a query that did not ask for secrets.

    >>> is_hidden("api_tokens", "digest"), is_hidden("agents", "name"), is_hidden("agents", "of_a_newer_hive")
    (True, False, True)
    """
    return TABLES.get(table, NOTHING_KNOWN).is_hidden(column)
