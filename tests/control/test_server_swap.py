"""`evictModel` at the inference server in use: one job with one approval, and the model that left comes back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import DeploymentState
from hive.errors import NotFound, OpTokenReplayed, OpTokenThreshold, WrongState
from hive.store import deployments, jobs, load_tasks
from hive.store.database import Database
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from hive.store.load_tasks import StoredLoad
from tests.control.box import Box
from tests.control.conftest import box as box  # the fixture
from tests.control.test_governance import (
    AWAKE_WITH_MODELS,
    SIGNERS,
    TWO_OF_THREE,
    Governed,
    asked,
    number_of,
    put,
    token,
)
from tests.control.test_governance import rules as rules  # the fixture
from tests.fakes.programs import fake_ollama
from tests.waiting import until

LOAD = "/v1/models/load"
RESTORES = msgspec.structs.replace(
    AWAKE_WITH_MODELS, registry=msgspec.structs.replace(AWAKE_WITH_MODELS.registry, restore=True)
)
MODELS = ("--embeds", "broken", "tiny", "small", "broken")
"""An Ollama loads none that only embeds with an empty prompt."""


@pytest.fixture
async def served(box: Box, rules: Path) -> AsyncIterator[Governed]:
    with fake_ollama(*MODELS) as ollama:
        await box.everything(AWAKE_WITH_MODELS, backend=("ollama", ollama.address), rules=rules)
        await until(lambda: box.inference()["running"])
        await until(lambda: box.services.pool.pool.has_adopted)
        yield Governed(box, rules)


async def ordered(served: Governed, *names: str, **params: str) -> Any:
    """The body of an order, signed where somebody signs."""
    text = token(served.id, *names, params=params) if names else None
    return {**params, "verifiedOpToken": text} if text else params


async def ended(served: Governed, body: Any) -> Any:
    task = await asked(served.box, "POST", LOAD, body)
    while task["status"] == "loading":
        await served.box.services.jobs.get(task["taskId"].removeprefix("load-"), wait_s=20)
        task = await asked(served.box, "GET", f"{LOAD}/{task['taskId']}")
    return task


async def in_memory(box: Box) -> set[str]:
    return {name.removesuffix(":latest") for name in await box.services.active.loaded() or ()}


def rows(box: Box) -> dict[str, str]:
    return {row["name"].removesuffix(":latest"): row["state"] for row in box.services.deployments.views()}


async def test_a_used_token_and_a_refused_order_move_nobody(served: Governed) -> None:
    """The model was unloaded, with an approval of its own making, before the token was looked at for its use."""
    box = served.box
    put(served.rules, TWO_OF_THREE)
    await ended(served, await ordered(served, "ann", "ben", modelId="small"))
    body = await ordered(served, "ann", "ben", modelId="tiny", evictModel="small")
    assert (await ended(served, body))["status"] == "completed"
    assert await in_memory(box) == {"tiny"}
    assert rows(box) == {"tiny": "loaded", "small": "evicted"}
    await ended(served, await ordered(served, "ann", "ben", modelId="small"))
    await asked(box, "POST", "/api/models/tiny/unload", {"force": False}, X_Hive_Break_Glass="for the test")
    await until(lambda: not box.services.models._going)
    counts = [await number_of(box, table) for table in ("jobs", "load_tasks", "op_nonces")]
    with pytest.raises(OpTokenReplayed):
        await ended(served, body)
    with pytest.raises(NotFound):
        await ended(served, await ordered(served, "ann", "ben", modelId="nobody", evictModel="small"))
    with pytest.raises(WrongState, match="for itself"):
        await ended(served, await ordered(served, "ann", "ben", modelId="tiny", evictModel="tiny"))
    assert await in_memory(box) == {"small"}
    assert [await number_of(box, table) for table in ("jobs", "load_tasks", "op_nonces")] == counts


async def test_the_model_that_left_comes_back_where_the_load_fails(served: Governed) -> None:
    box = served.box
    await ended(served, {"modelId": "small"})
    task = await ended(served, {"modelId": "broken", "evictModel": "small"})
    assert (task["status"], "does not support" in task["error"]) == ("failed", True)
    assert await in_memory(box) == {"small"}
    await until(lambda: rows(box) == {"small": "loaded", "broken": "failed"})


async def test_the_model_that_left_comes_back_where_the_daemon_was_killed(box: Box, rules: Path) -> None:
    """It was never loaded again, and with [registry] restore the one that failed was."""
    with fake_ollama(*MODELS) as ollama:
        backend = ("ollama", ollama.address)
        await box.everything(RESTORES, backend=backend, rules=rules)
        await box.stop_daemon()
        now = time.time()
        job = StoredJob(
            id="j1", kind="model.load", plan={"model": "tiny:latest"}, actor="uid:0", created_at=now, updated_at=now
        )
        load = StoredLoad(job="j1", asked="tiny", model="tiny:latest", evicts="small:latest", begun_at=now)
        row = StoredDeployment(
            id="t@ollama",
            name="tiny:latest",
            backend="ollama",
            deployed_by="uid:0",
            at=now,
            state=DeploymentState.LOADING,
        )
        database = Database.open(box.paths.database)

        def left(conn: sqlite3.Connection) -> None:
            jobs.add(conn, job)
            load_tasks.put(conn, load)
            deployments.put(conn, row)

        await database.write(left)
        database.close()
        await box.start_daemon(RESTORES, backend=backend, rules=rules)
        await until(lambda: rows(box) == {"tiny": "failed"})
        came = await box.services.jobs.get("j1", wait_s=20)
        assert (came.state, came.error and came.error["message"]) == ("failed", "Hive ended before the load did")
        assert await in_memory(box) == {"small"}


# whose word it takes -------------------------------------------------------------------------------------------------

ANN_LOADS = SIGNERS + '[rules.model-load]\nthreshold = 1\nof = ["ann", "ben"]\n'
BEN_UNLOADS = '[rules.model-unload]\nthreshold = 1\nof = ["ben"]\n'


async def test_who_may_not_unload_a_model_does_not_do_it_by_a_load(served: Governed) -> None:
    box = served.box
    await ended(served, {"modelId": "small"})
    wish = {"modelId": "tiny", "evictModel": "small"}
    for text, names in (
        (ANN_LOADS + BEN_UNLOADS, ["ann"]),
        (SIGNERS + BEN_UNLOADS, []),
        (SIGNERS + BEN_UNLOADS, ["ben"]),
    ):
        put(served.rules, text)
        with pytest.raises(OpTokenThreshold, match="small would leave") as refused:
            await ended(served, await ordered(served, *names, **wish))
        assert refused.value.hint == "unload it first: hive model unload small"
    assert (await in_memory(box), await number_of(box, "op_nonces")) == ({"small"}, 0)
    put(served.rules, ANN_LOADS + BEN_UNLOADS)
    assert (await ended(served, await ordered(served, "ben", **wish)))["status"] == "completed"
    assert await in_memory(box) == {"tiny"}
    put(served.rules, ANN_LOADS)
    assert (await ended(served, await ordered(served, "ann", modelId="small", evictModel="tiny")))[
        "status"
    ] == "completed"
