"""Orders in the audit table, however they end."""

from __future__ import annotations

import asyncio
from typing import Any

from hive.api.order_audit import CUT_SHORT, AuditedOrder, carried_out
from hive.store.audit import AuditRecord
from tests.api.described import ROWS

ACTS = (
    "access apply ask_lease begin_job cancel_job cancel_request cancel_schedule change_cloud change_config create "
    "create_token delete_responses drop_message end_lease exec flush_cache keep_awake load_adapter load_model "
    "pause pin_model pull_adapter pull_model query_database refresh_models release_job remove remove_adapter "
    "remove_many remove_model renew_lease restart restart_template resume revoke_key revoke_token runner_flush "
    "runner_load runner_load_adapter runner_unload schedule send shutdown start stop switch tokens trust_key "
    "unload_adapter unload_model unpin_model"
)
"""Of the orders, as the audit table has them since its beginning: filters and reports go by them."""


def test_an_act_keeps_its_name() -> None:
    assert sorted(row.name for row in ROWS if row.is_order) == ACTS.split()


class Told:
    """Roster and audit log, as far as an order needs them."""

    def __init__(self) -> None:
        self.rows: list[AuditRecord] = []

    def identified(self, ref: str) -> tuple[str, str]:
        return ref, ""

    async def record(self, row: AuditRecord) -> None:
        self.rows.append(row)


async def test_an_order_that_was_cut_short_did_not_end_well() -> None:
    """A daemon that left in the middle of it wrote `ok`."""
    told: Any = Told()
    order = AuditedOrder("stop", "uid:7", {"ref": "a1"}, {})
    doing = asyncio.ensure_future(carried_out(told, told, order, asyncio.Event().wait()))
    await asyncio.sleep(0)
    doing.cancel()
    await asyncio.wait([doing])
    assert [(row.act, row.target, row.outcome) for row in told.rows] == [("order.stop", "a1", CUT_SHORT)]
