"""A helper, a holder and their lease of an ordinary user, who has no control group: held by a session, and said so."""

from __future__ import annotations

import json

import pytest

from tests.nobody import run_as_nobody

PROGRAM = """
import asyncio, json, os, signal, sys, tempfile
from pathlib import Path
from hive.link.leases import HolderState
from hive.settings.table import Paths
from tests.sandbox.harness import alive
from tests.sandbox.lease_callers import LEASE, LeaseHelper, connected, end_incomers, gone

DOUBLE = (
    "import os, time, sys\\nif os.fork() == 0:\\n os.setsid()\\n if os.fork(): os._exit(0)\\n"
    " print(os.getpid(), flush=True)\\n time.sleep(1000)\\nos.wait()\\ntime.sleep(1000)"
)

async def main():
    top = Path(tempfile.mkdtemp(prefix="hive-"))
    paths = Paths(state=top / "d", runtime=top / "r")
    paths.state.mkdir()
    found = {"uid": os.getuid()}
    helper = LeaseHelper(paths, "cgroup")
    async with connected(paths) as daemon:
        incomer = await daemon.holding("python3", "-S", "-c", DOUBLE)
        left = int(await incomer.line())
        now = (await daemon.client.leases())[LEASE]
        found["held by"] = now.held_by
        found["family"] = sorted(now.pids) == sorted([incomer.pid, left])
        found["bytes"] = now.bytes
        incomer.process.kill()
        await incomer.ended()
        now = (await daemon.client.leases())[LEASE]
        found["left"] = [str(now.state), now.pids == [left]]
    helper.kill()
    helper = LeaseHelper(paths, "cgroup")
    async with connected(paths) as daemon:
        now = (await daemon.client.leases())[LEASE]
        found["adopted"] = [str(now.state), now.pids == [left]]
        await daemon.client.lease_end(LEASE, "over", grace_s=20)
        found["why"] = (await gone(daemon)).why
        found["alive"] = alive(left)
    helper.leave()
    end_incomers(paths)
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.mark.root
def test_a_lease_of_an_ordinary_user_is_held_by_a_session() -> None:
    found = json.loads(run_as_nobody(PROGRAM))
    assert found.pop("uid") > 0
    assert found.pop("bytes") > 1 << 20
    assert found == {
        "held by": "session",
        "family": True,
        "left": ["running", True],
        "adopted": ["running", True],
        "why": "over",
        "alive": False,
    }
