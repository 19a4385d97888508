"""Model jobs in a daemon: a real proxy, a real process of jobs, a real llama-server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hive.domain import BackendKind, JobState
from hive.jobs.order import JobEvent, JobOrder
from hive.settings.table import Settings
from hive.store.jobs import StoredJob
from tests.control.box import AWAKE, Box, until
from tests.llama import MODEL, LlamaServer

pytestmark = pytest.mark.llama
ME = "uid:0"
HI: dict[str, Any] = {"name": "hi", "model": MODEL, "prompt": "Say hello.", "params": {"max_tokens": 20}}
QUICK = msgspec.structs.replace(AWAKE, daemon=msgspec.structs.replace(AWAKE.daemon, backend_check_s=0.2))


async def with_model(box: Box, server: LlamaServer, settings: Settings = QUICK) -> None:
    await box.start_helper()
    await box.start_daemon(settings, backend=(BackendKind.LLAMA, server.address))
    await box.start_real_proxy()
    await until(lambda: box.inference()["running"])


async def ended(box: Box, job: StoredJob) -> StoredJob:
    await said(box, job)
    return await box.services.jobs.get(job.id)


async def said(box: Box, job: StoredJob, **more: Any) -> list[JobEvent]:
    """All its events, once it has ended."""
    return [event async for event in box.services.model_jobs.events(job.id, follow=True, **more)]


async def test_a_job_asks_the_model_and_what_it_said_is_kept(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    job = await jobs.begin(JobOrder(**HI), actor=ME)
    events = await said(box, job)
    print(events)
    assert [event.n for event in events] == list(range(1, len(events) + 1))
    end = events[-1]
    job = await box.services.jobs.get(job.id)
    print(job)
    result = await jobs.result(job.id)
    print(result)
    assert job.state is JobState.DONE
