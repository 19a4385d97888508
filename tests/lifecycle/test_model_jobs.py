"""Model jobs in a daemon: a real proxy, a real process of jobs, a real llama-server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from hive.domain import BackendKind, JobState
from hive.errors import (
    BadRequest,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    ResultNotReady,
    StoreFull,
    WrongState,
)
from hive.jobs.call_forms import ToolForm
from hive.jobs.order import JobEvent, JobOrder
from hive.lifecycle.job_runs import JobEnd
from hive.link.jobs import JobWord
from hive.settings.jobs import JobsSection
from hive.settings.table import Settings
from hive.store.jobs import StoredJob
from tests.control.box import AWAKE, Box, is_alive
from tests.jobs.test_real_server import HOT
from tests.llama import MODEL, LlamaServer, serve
from tests.waiting import until

pytestmark = pytest.mark.llama
ME = "uid:0"
HI: dict[str, Any] = {"name": "hi", "model": MODEL, "prompt": "Say hello.", "params": {"max_tokens": 20}}
LONG = HI | {"params": {"max_tokens": 4000, "ignore_eos": True}}
"""For seconds of a tiny model."""
QUICK = msgspec.structs.replace(AWAKE, daemon=msgspec.structs.replace(AWAKE.daemon, backend_check_s=0.2))


def with_jobs(**fields: Any) -> Settings:
    return msgspec.structs.replace(QUICK, jobs=JobsSection(**fields))


async def with_model(box: Box, server: LlamaServer, settings: Settings = QUICK) -> None:
    await box.start_helper()
    await box.start_daemon(settings, backend=(BackendKind.LLAMA, server.address))
    await box.start_real_proxy()
    await until(lambda: box.inference()["running"])


async def begun(box: Box, **order: Any) -> StoredJob:
    return await box.services.model_jobs.begin(JobOrder(**order), actor=ME)


async def said(box: Box, job: StoredJob, **more: Any) -> list[JobEvent]:
    """All its events, once it has ended."""
    return [event async for event in box.services.model_jobs.events(job.id, follow=True, **more)]


async def ended(box: Box, job: StoredJob) -> StoredJob:
    await said(box, job)
    return await box.services.jobs.get(job.id)


async def on_record_as_ended(box: Box, job: str) -> StoredJob:
    """The job, once its end is on record; the daemon notes one at its start a moment after it is up."""
    for _ in range(500):
        if (found := await box.services.jobs.get(job)).ended:
            break
        await asyncio.sleep(0.02)
    return found


async def until_it_writes(box: Box, job: StoredJob) -> None:
    async for event in box.services.model_jobs.events(job.id, follow=True):
        if event.event == "delta":
            return


def process_of_jobs() -> psutil.Process | None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one of another test, over and not yet waited for
            if "--link-fd" in child.cmdline():
                return child
    return None


async def one(box: Box) -> psutil.Process:
    await until(process_of_jobs)
    found = process_of_jobs()
    assert found is not None
    return found


async def test_a_job_asks_the_model_and_what_it_said_is_kept(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    job = await begun(box, **HI)
    assert jobs.status_of(job) in ("queued", "in_progress")
    events = await said(box, job)
    assert [event.n for event in events] == list(range(1, len(events) + 1))
    assert [event.event for event in events][-2:] == ["turn", "ended"]
    text = "".join(event.data["text"] for event in events if event.event == "delta")
    job = await box.services.jobs.get(job.id)
    assert (job.kind, job.state, jobs.status_of(job)) == ("task", JobState.DONE, "incomplete")
    result = await jobs.result(job.id)
    assert (result["answer"], result["reason"]) == (text, "length")
    (turn,) = result["turns"]
    assert (turn["answer"], turn["tokens_out"], result["usage"]["tokens_out"]) == (text, 20, 20)
    assert await said(box, job, after=events[-2].n) == events[-1:]
    assert (await jobs.order(job.id)).prompt == HI["prompt"]
    assert not any("Say hello" in str(row) for row in (job.plan, job.result))


async def test_its_usage_is_metered_as_that_of_any_request(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    view = await box.create("scribe")
    await box.create("guest", tenant="other")
    for order in (HI | {"agent": "scribe"}, HI | {"tenant": "other", "priority": "low"}):
        job = await begun(box, **order)
        result = await ended(box, job)
        assert result.state is JobState.DONE, result
        usage = (result.result or {})["usage"]
        whose = view["id"] if "agent" in order else "operator"
        row = await metered(box, whose, order.get("tenant", "default"))
        assert (row["tokens_in"], row["tokens_out"]) == (usage["tokens_in"], usage["tokens_out"])
        assert (row["endpoint"], row["cut"]) == ("/v1/chat/completions", 0)


async def until_rows(box: Box, count: int) -> list[dict[str, Any]]:
    """All rows of usage, once there are so many."""
    found: list[dict[str, Any]] = []
    for _ in range(500):
        found = await box.services.audit_log._database.read(
            lambda conn: [dict(row) for row in conn.execute("SELECT * FROM inference_usage")]
        )
        if len(found) >= count:
            return found
        await asyncio.sleep(0.02)
    return found


async def metered(box: Box, agent: str, tenant: str) -> dict[str, Any]:
    """The row of usage of the only request of this agent for this tenant."""
    found: list[dict[str, Any]] = []
    for _ in range(1000):
        found = await box.services.audit_log._database.read(
            lambda conn: [
                dict(row)
                for row in conn.execute(
                    "SELECT * FROM inference_usage WHERE agent_id = ? AND tenant = ?", (agent, tenant)
                )
            ]
        )
        if found:
            break
        await asyncio.sleep(0.02)
    (row,) = found
    return row


async def test_a_job_of_a_sleeping_agent_goes_on_and_wakes_nobody(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    await box.create("scribe")
    await box.start("scribe", ME)
    await box.pause("scribe", timeout_s=10, now=True, actor=ME)
    assert (await ended(box, await begun(box, **HI, agent="scribe"))).state is JobState.DONE
    assert (await box.view("scribe"))["status"] == "paused"


async def test_a_job_is_held_to_what_holds_its_agent(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    await box.create("poor", tokens_per_day=1)
    first = await ended(box, await begun(box, **HI, agent="poor"))
    job = await ended(box, await begun(box, **HI, agent="poor"))
    assert {first.state, job.state} <= {JobState.DONE, JobState.FAILED}
    assert job.error is not None
    assert job.error["code"] == "budget_exceeded", job
    missing = await ended(box, await begun(box, **HI | {"model": "nobody"}))
    assert missing.error is not None
    assert missing.error["code"] == "model_not_found"


async def test_an_order_that_may_not_be_is_refused_before_anything_is_on_record(box: Box) -> None:
    await box.everything(QUICK)
    await box.create("scribe", tenant="other")
    tool = {"type": "function", "agent": "scribe", "function": {"name": "look"}}
    with pytest.raises(NotPermitted, match="of the tenant other"):
        await begun(box, **HI, tools=[tool])
    with pytest.raises(NotFound):
        await begun(box, **HI, agent="nobody")
    with pytest.raises(NotFound):
        await begun(box, **HI, tools=[tool | {"agent": "nobody"}])
    with pytest.raises(BadRequest, match="messages"):
        await begun(box, **HI | {"params": {"messages": []}})
    assert await box.services.jobs.recent(10) == []
    await box.stop_daemon()
    await box.start_daemon(with_jobs(enabled=False))
    with pytest.raises(NotSupported, match="off"):
        await begun(box, **HI)


@pytest.mark.parametrize("when", ["waiting", "running", "ended"])
async def test_a_job_can_be_cancelled_in_every_state(box: Box, llama_server_on_socket: LlamaServer, when: str) -> None:
    await with_model(box, llama_server_on_socket, with_jobs(at_once=1))
    jobs = box.services.model_jobs
    first = await begun(box, **LONG)
    await until_it_writes(box, first)
    job = await begun(box, **LONG) if when == "waiting" else first
    if when == "ended":
        await jobs.cancel(first.id)
    found = await jobs.cancel(job.id, actor=ME)
    assert (found.state, jobs.status_of(found)) == (JobState.CANCELLED, "cancelled")
    result = await jobs.result(job.id)
    assert (result["reason"], bool(result["answer"])) == ("cancelled", when != "waiting")
    await until(lambda: proxy_asks_nothing(box) or when == "waiting")
    await jobs.cancel(first.id)
    assert (await said(box, job))[-1].data["status"] == "cancelled"


def proxy_asks_nothing(box: Box) -> bool:
    return not box.services.model_jobs._runs


async def test_jobs_beyond_at_once_wait_and_go_on_in_their_order(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket, with_jobs(at_once=1))
    jobs = box.services.model_jobs
    first = await begun(box, **LONG)
    await until_it_writes(box, first)
    others = [await begun(box, **HI) for _ in range(3)]
    assert [jobs.status_of(job) for job in others] == ["queued"] * 3
    assert jobs.metrics()["jobs_running"] == {("in_progress",): 1, ("queued",): 3}
    await jobs.cancel(first.id)
    ends = [await ended(box, job) for job in others]
    assert [job.state for job in ends] == [JobState.DONE] * 3
    assert sorted(ends, key=lambda job: job.updated_at) == ends
    assert jobs.metrics()["jobs"] == {("cancelled",): 1, ("incomplete",): 3}


async def test_a_job_that_runs_has_no_result_and_is_not_released(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    job = await begun(box, **LONG)
    with pytest.raises(ResultNotReady):
        await jobs.result(job.id)
    with pytest.raises(WrongState):
        await jobs.release(job.id)
    await until_it_writes(box, job)
    await jobs.cancel(job.id)
    await jobs.release(job.id, actor=ME)
    assert list(box.paths.jobs.iterdir()) == []
    kept = await box.services.jobs.get(job.id)
    assert (kept.state, kept.plan, kept.result) == (
        JobState.CANCELLED,
        {"name": "hi", "released": True},
        {"status": "cancelled"},
    )
    for question in (jobs.result(job.id), jobs.order(job.id), said(box, job)):
        with pytest.raises(NotFound):
            await question
    acts = [row.act for row in await box.audited()] if hasattr(box, "audited") else []
    assert acts == [] or "job.released" in acts


async def test_the_process_of_jobs_comes_with_the_first_job_and_goes_when_there_is_none(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket, with_jobs(idle_exit_s=0.3))
    assert process_of_jobs() is None
    await ended(box, await begun(box, **HI))
    process = await one(box)
    await until(lambda: not is_alive(process.pid))
    assert (await ended(box, await begun(box, **HI))).state is JobState.DONE


# --- what dies ---------------------------------------------------------------------------------------------------


async def test_kill_9_of_the_process_of_jobs_fails_what_it_had_and_the_next_job_has_another(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    lost = [await begun(box, **LONG) for _ in range(2)]
    for job in lost:
        await until_it_writes(box, job)
    (await one(box)).kill()
    for job in lost:
        found = await ended(box, job)
        assert found.error is not None
        assert (found.state, found.error["code"]) == (JobState.FAILED, "worker_restarted")
        assert (await jobs.result(job.id))["answer"]
    assert (await ended(box, await begun(box, **HI))).state is JobState.DONE


@pytest.mark.wide
async def test_a_process_of_jobs_that_hangs_is_ended_by_the_first_cancel(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.lifecycle.model_jobs.STOPPED_S", 0.5)
    await with_model(box, llama_server_on_socket)
    jobs = [await begun(box, **LONG) for _ in range(2)]
    for job in jobs:
        await until_it_writes(box, job)
    process = await one(box)
    process.suspend()
    assert (await box.services.model_jobs.cancel(jobs[0].id)).state is JobState.CANCELLED
    assert (await ended(box, jobs[1])).state is JobState.FAILED
    await until(lambda: not is_alive(process.pid))
    assert (await ended(box, await begun(box, **HI))).state is JobState.DONE


async def test_jobs_that_agents_begin_while_they_answer_a_call_are_three_deep_at_most(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    """The agent here is one that has a call under way: by the events of its caller, as the process tells them."""
    await with_model(box, llama_server_on_socket)
    jobs, agent = box.services.model_jobs, box.life("bob").agent if await box.create("bob") else None
    assert agent is not None
    call = JobWord(0.0, "tool_call", {"turn": 1, "id": "a", "name": "look", "arguments": "{}", "agent": "bob"})
    found = []
    for depth in range(1, 4):
        job = await jobs.begin(JobOrder(**LONG), actor=ME, agent=agent)
        await until_it_writes(box, job)
        await jobs._write(jobs._runs[job.id], [call])
        found.append(job)
        assert jobs._runs[job.id].depth == depth
    assert [job.plan["parent"] for job in found] == ["", found[0].id, found[1].id]
    assert set(jobs.between_turns()) == {(agent.id, MODEL)}, "the pool counts who will ask again"
    with pytest.raises(NotPermitted, match="3 deep"):
        await jobs.begin(JobOrder(**HI), actor=ME, agent=agent)
    turn = {"turn": 1, "answer": "", "calls": [{"id": "b", "name": "look", "arguments": "{}"}]}
    for number in range(2, 8):  # each of the two below took one of the 8 when it began
        await jobs._write(jobs._runs[found[0].id], [JobWord(0.0, "turn", turn | {"turn": number})])
    await jobs.cancel(found[2].id)
    with pytest.raises(NotPermitted, match="used up their turns"):
        await jobs.begin(JobOrder(**HI), actor=ME, agent=agent)
    with pytest.raises(HiveError, match="used up their turns"):
        await jobs._write(jobs._runs[found[1].id], [JobWord(0.0, "turn", turn)])
    await jobs.cancel(found[0].id)
    for job in found:  # those below end with the first
        assert (await jobs._jobs.get(job.id, wait_s=10)).ended


async def test_kill_9_of_the_daemon_fails_its_jobs_at_the_next_start_with_what_they_said(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    """A daemon that is closed without ceremony leaves what one that is killed leaves; test_jobs_up kills a real one."""
    await with_model(box, llama_server_on_socket)
    job = await begun(box, **LONG)
    await until_it_writes(box, job)
    process = await one(box)
    before = box.paths.jobs.joinpath(f"{job.id}.out").read_bytes()
    await box.stop_daemon()
    await until(lambda: not is_alive(process.pid))
    box.paths.jobs.joinpath(f"{job.id}.out").write_bytes(before + b'{"n": 1000, "at')
    put_running(box.paths.database, job.id)
    await box.start_daemon(QUICK, backend=(BackendKind.LLAMA, llama_server_on_socket.address))
    found = await box.services.jobs.get(job.id)
    assert found.error is not None
    assert (found.state, found.error["code"]) == (JobState.FAILED, "worker_restarted")
    events = await said(box, job)
    assert [event.n for event in events] == list(range(1, len(events) + 1))
    assert events[-1].data["answer"] == "".join(e.data["text"] for e in events if e.event == "delta")


def put_running(database: Path, job: str) -> None:
    with sqlite3.connect(database) as conn:
        conn.execute("UPDATE jobs SET state = 'running', result = NULL, error = NULL WHERE id = ?", (job,))


async def test_an_end_that_the_database_had_no_room_for_is_written_once_it_has(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.lifecycle.model_jobs.END_AGAIN_S", 0.05)
    await with_model(box, llama_server_on_socket)
    jobs, end, is_full = box.services.model_jobs, box.services.jobs.end, [True]

    async def ends(*given: Any, **more: Any) -> StoredJob:
        if is_full[0]:
            raise StoreFull
        return await end(*given, **more)

    monkeypatch.setattr(box.services.jobs, "end", ends)
    job = await begun(box, **LONG)
    await until_it_writes(box, job)
    assert (await jobs.cancel(job.id)).state is JobState.RUNNING
    is_full.clear()
    is_full.append(False)
    assert (await on_record_as_ended(box, job.id)).state is JobState.CANCELLED
    assert (await jobs.result(job.id))["status"] == "cancelled"


@pytest.mark.wide
async def test_an_end_that_was_written_only_to_the_output_is_the_end_after_a_start(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    job = await begun(box, **HI)
    was = await ended(box, job)
    await box.stop_daemon()
    put_running(box.paths.database, job.id)
    await box.start_daemon(QUICK, backend=(BackendKind.LLAMA, llama_server_on_socket.address))
    found = await on_record_as_ended(box, job.id)
    assert (found.state, found.result) == (was.state, was.result)


async def test_a_proxy_that_is_killed_fails_what_was_being_answered_and_serves_the_next(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    job = await begun(box, **LONG)
    await until_it_writes(box, job)
    await box.kill_real_proxy()
    found = await ended(box, job)
    assert found.error is not None
    assert found.error["code"] == "stream_incomplete"
    waiting = await begun(box, **HI)  # asked while there is no proxy
    await asyncio.sleep(0.3)
    box.spawn_real_proxy()
    assert (await ended(box, waiting)).state is JobState.DONE


@pytest.mark.wide
async def test_output_over_its_limit_fails_the_job_and_keeps_what_there_was(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_model(box, llama_server_on_socket)
    monkeypatch.setattr("hive.lifecycle.model_jobs.MIB", 512)  # 16 of them are the limit
    job = await begun(box, **LONG)
    found = await ended(box, job)
    assert found.error is not None
    assert (found.state, found.error["code"]) == (JobState.FAILED, "too_large")
    assert (await box.services.model_jobs.result(job.id))["answer"]


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, apart from the box's."""
    told = ["mount", "-t", "tmpfs", "-o", "size=1m", "hive-test", str(tmp_path)]
    mounted = subprocess.run(told, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(directory: Path) -> None:
    with directory.joinpath("rest").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk_fails_the_job_and_leaves_no_half_line(
    box: Box, llama_server_on_socket: LlamaServer, full_soon: Path
) -> None:
    await with_model(box, llama_server_on_socket)
    box.paths.jobs.symlink_to(full_soon)
    job = await begun(box, **LONG)
    await until_it_writes(box, job)
    fill(full_soon)
    found = await ended(box, job)
    assert found.error is not None
    assert (found.state, found.error["code"]) == (JobState.FAILED, "disk_full")
    events = await said(box, job)
    assert [event.n for event in events] == list(range(1, len(events) + 1))
    assert events[-1].event == "ended"
    with pytest.raises(StoreFull):
        await begun(box, **HI)
    full_soon.joinpath("rest").unlink()
    assert (await ended(box, await begun(box, **HI))).state is JobState.DONE


async def test_the_oldest_output_goes_beyond_what_is_kept(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    old = await begun(box, **HI)
    await ended(box, old)
    os.truncate(box.paths.jobs / f"{old.id}.out", 257 * 1024 * 1024)
    new = await begun(box, **HI)
    await ended(box, new)
    await until(lambda: not box.paths.jobs.joinpath(f"{old.id}.out").exists())
    with pytest.raises(NotFound, match="not kept any more"):
        await said(box, old)
    assert await jobs.result(new.id)


async def test_exit_tools_are_signals_of_the_job(box: Box, tmp_path: Path) -> None:
    """By schema a tiny random model calls what it may call: one exit tool, or answers."""
    only = {"type": "function", "function": {"name": "POLICY_RISK", "parameters": {"type": "object"}}}
    with serve(tmp_path, on_socket=True, more=("--no-jinja", "--chat-template", "chatml")) as server:
        await with_model(box, server)
        jobs = box.services.model_jobs
        for seed in range(40):
            order = HI | {"params": HOT | {"max_tokens": 300, "seed": seed}, "answer_schema": {"const": "x"}}
            job = await begun(box, **order, exit_tools=[only], tool_form=ToolForm.SCHEMA)
            events = await said(box, job)
            result = await jobs.result(job.id)
            if result["signals"]:
                break
        assert [event.event for event in events if event.event != "delta"][-3:] == ["turn", "signal", "ended"]
        (signal,) = result["signals"]
        turns = result["usage"]["turns"]
        assert (signal["name"], signal["turn"], signal["has_ended"]) == ("POLICY_RISK", turns, True)
        assert result["status"] == "completed"


def test_the_process_of_jobs_is_small() -> None:
    """Nothing of the daemon, of Typer or of MCP is loaded in it before a job needs that."""
    code = "import hive.jobs.process, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "mcp", "pydantic", "uvloop", "sqlite3", "starlette", "redis", "httpx"} & set(loaded)


@pytest.mark.wide
async def test_the_output_of_each_job_is_there_however_many_end_at_once(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    ended_jobs = []
    for _ in range(5):
        jobs = [await begun(box, **HI | {"params": {"max_tokens": 1}}) for _ in range(12)]
        ended_jobs += await asyncio.gather(*(ended(box, job) for job in jobs))
    await asyncio.sleep(0.2)
    assert all(job.state is JobState.DONE for job in ended_jobs)
    for job in ended_jobs:
        assert [event.event for event in await said(box, job)][-1] == "ended"
        assert (await box.services.model_jobs.order(job.id)).name == "hi"


async def test_a_job_whose_output_cannot_be_opened_keeps_no_daemon_from_its_start(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    jobs = [await begun(box, **HI) for _ in range(2)]
    for job in jobs:
        await ended(box, job)
    await box.stop_daemon()
    spoilt, gone = (box.paths.jobs / f"{job.id}.out" for job in jobs)
    spoilt.write_bytes(b'{"n": 1, "at": 1.0, "event": "turn", "data": {}}\n')
    gone.unlink()
    gone.mkdir()
    for job in jobs:
        put_running(box.paths.database, job.id)
    await box.start_daemon(QUICK, backend=(BackendKind.LLAMA, llama_server_on_socket.address))
    for job in jobs:
        found = await on_record_as_ended(box, job.id)
        assert found.error is not None
        assert (found.state, found.error["code"]) == (JobState.FAILED, "worker_restarted")


def test_what_a_model_wrote_is_in_no_row_that_viewers_read() -> None:
    end = JobEnd.failed("malformed_tool_call", "look(WHAT IT WROTE")
    assert end.error is not None
    assert "WHAT IT WROTE" not in str((end.error, end.row))
    assert end.data["detail"] == "look(WHAT IT WROTE"


async def test_of_a_released_job_only_the_code_of_its_error_is_left(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_model(box, llama_server_on_socket)
    job = await ended(box, await begun(box, **HI | {"model": "nosuch"}))
    assert job.error is not None
    assert "nosuch" in job.error["message"]
    await box.services.model_jobs.release(job.id)
    found = await box.services.jobs.get(job.id)
    assert found.error is not None
    assert (found.error["code"], found.error["message"]) == (job.error["code"], "")
