"""Leases in Redis: a mirror that the daemon writes, and by which nobody is granted anything."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import msgspec
import pytest

from hive.audit.auth import Person
from hive.domain import Role
from hive.settings.pool import PoolSection
from hive.store.leases import StoredLease
from tests.approvals import TAKE
from tests.control.box import AWAKE, Box
from tests.waiting import until

pytestmark = [pytest.mark.redis]
ROOT = Person("uid:0", Role.ADMIN)
SETTINGS = msgspec.structs.replace(AWAKE, pool=PoolSection(cpu_mb=1000, reserve_mb=0))


def order(mb: int) -> StoredLease:
    return StoredLease(
        kind="held",
        state="waiting",
        actor=ROOT.name,
        label="a container",
        mb=mb,
        is_whole=True,
        wait_s=0.0,
        ttl_s=60.0,
        boot="",
        asked_s=0.0,
        created_at=0.0,
    )


async def test_redis_shows_who_holds_what_and_grants_nobody_anything(box: Box, redis_server: Any) -> None:
    import redis.asyncio as aioredis

    os.symlink(redis_server.socket, box.paths.redis_socket)
    await box.everything(SETTINGS)
    desk = box.services.leases
    async with aioredis.Redis(unix_socket_path=str(redis_server.socket), decode_responses=True) as client:
        await client.set("hive:gpu:lease:l-9", json.dumps({"gpus": ["cpu"], "mb": 900, "token": 9}))
        lease = await desk.ask(order(800), ROOT, approval=TAKE)  # what somebody wrote there takes no memory

        async def shown() -> dict[str, Any]:
            return json.loads(await client.get(f"hive:gpu:lease:{lease.id}") or "{}")  # type: ignore[no-any-return]

        told = await _until_told(shown)
        assert (told["gpus"], told["mb"], told["token"]) == (["cpu"], 800, lease.row.token)
        assert told["holder"] == "a container"
        assert 0 < await client.ttl(f"hive:gpu:lease:{lease.id}") <= 30
        await desk.release(lease.id, lease.row.token, ROOT)
        await until(lambda: desk.leases.get(lease.id) is None)
        assert await _until_gone(shown)


async def _until_told(shown: Any) -> dict[str, Any]:
    for _ in range(1000):
        if told := await shown():
            return told  # type: ignore[no-any-return]
        await asyncio.sleep(0.02)
    raise AssertionError("it is not told")


async def _until_gone(shown: Any) -> bool:
    for _ in range(1000):
        if not await shown():
            return True
        await asyncio.sleep(0.02)
    return False


async def test_without_redis_leases_are_granted_and_renewed_all_the_same(box: Box) -> None:
    await box.everything(SETTINGS)
    assert not box.daemon._live.up  # type: ignore[union-attr]
    desk = box.services.leases
    lease = await desk.ask(order(800), ROOT, approval=TAKE)
    await desk.renew(lease.id, lease.row.token, 60.0, ROOT)
    await desk.release(lease.id, lease.row.token, ROOT)
    await until(lambda: desk.leases.get(lease.id) is None)
