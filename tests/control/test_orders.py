"""Orders in the audit table, however they end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hive.control.desk import Desk
from hive.control.orders import CUT_SHORT, Order, carried_out
from hive.store.audit import AuditRow


class Told:
    """A desk as far as an order needs one."""

    def __init__(self) -> None:
        self.rows: list[AuditRow] = []

    def meant(self, ref: str) -> tuple[str, str]:
        return ref, ""

    async def ordered(self, row: AuditRow) -> None:
        self.rows.append(row)


async def test_an_order_that_was_cut_short_did_not_end_well() -> None:
    """A daemon that left in the middle of it wrote `ok`."""
    desk: Any = Told()
    order = Order("stop", "uid:7", {"ref": "a1"}, {})
    doing = asyncio.ensure_future(carried_out(cast(Desk, desk), order, asyncio.Event().wait()))
    await asyncio.sleep(0)
    doing.cancel()
    await asyncio.wait([doing])
    assert [(row.act, row.target, row.outcome) for row in desk.rows] == [("order.stop", "a1", CUT_SHORT)]
