"""Model jobs of a whole Hive while its parts are killed: each ends once, as failed where it did not go on, and tells
what it had said. Nothing is asked or called twice."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hive.errors import HiveError
from tests.jobs.test_real_server import HOT, OTHER_DICE
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
LOOK = {
    "type": "function",
    "agent": "guide",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["north", "south"]}, "step": {"enum": list(range(1, 10))}},
            "required": ["where", "step"],
            "additionalProperties": False,
        },
    },
}
CALLING = {
    "model": MODEL,
    "prompt": "Where are the bees?",
    "tools": [LOOK],
    "exit_tools": [],
    "tool_form": "schema",
    "answer_schema": {"const": "x"},
    "params": {**HOT, **OTHER_DICE, "max_tokens": 300},
}
"""A grammar makes a random model call or answer in each turn, as chance has it."""
LONG = {"model": MODEL, "prompt": "Go on.", "params": {"max_tokens": 60000, "ignore_eos": True}, "exit_tools": []}
SHORT = {"model": MODEL, "prompt": "Hello.", "params": {"max_tokens": 12, "ignore_eos": True}, "exit_tools": []}
BLOCK = 16
"""Tokens that a server may read again."""
KILLS = int(os.environ.get("HIVE_CHAOS_KILLS", "8"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with calling_server(tmp_path_factory.mktemp("llama-jobs")) as server:
        yield server


def calling_server(folder: Path) -> Any:
    """One whose grammars hold from the first token of an answer."""
    return serve(folder, more=("-c", "262144", "--no-jinja", "--chat-template", "chatml"))


@contextmanager
def with_guide(server: LlamaServer) -> Iterator[Stack]:
    with stack(url=server.url, config="") as hive:
        hive.create("guide", "guide.py", port=8700 + random.SystemRandom().randrange(200))
        yield hive


@pytest.fixture(scope="module")
def hive(llama: LlamaServer) -> Iterator[Stack]:
    with with_guide(llama) as hive:
        yield hive


def begin(hive: Stack, order: dict[str, Any], **more: Any) -> str:
    return str(hive.post("/api/jobs", {"name": "n", **order, **more})["id"])


def output(hive: Stack, job: str) -> list[dict[str, Any]]:
    path = hive.state / "jobs" / f"{job}.out"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def has(hive: Stack, job: str, event: str, turn: int = 1) -> bool:
    return any(one["event"] == event and one["data"].get("turn") == turn for one in output(hive, job))


def ended(hive: Stack, job: str) -> Any:
    return until(
        lambda: (now := hive.get(f"/api/jobs/{job}"))["state"] != "running" and now, within_s=60, what=f"{job} ended"
    )


def result(hive: Stack, job: str) -> Any:
    return hive.get(f"/api/jobs/{job}/result")


def calls_of(hive: Stack, job: str) -> int:
    """Counts the calls of the agent that were made for it."""
    return sum(line.get("job") == job for line in hive.agent_lines("guide"))


def check_whole(hive: Stack, job: str) -> None:
    """Its output is numbered from 1, ends once, and agrees with what the database has of its turns."""
    events = output(hive, job)
    assert [event["n"] for event in events] == list(range(1, len(events) + 1))
    assert [event["event"] for event in events].count("ended") == 1
    assert events[-1]["event"] == "ended"
    told = result(hive, job)
    assert [turn["n"] for turn in told["turns"]] == [e["data"]["turn"] for e in events if e["event"] == "turn"]
    results = [one for turn in told["turns"] for one in turn["results"]]
    assert len(results) == sum(event["event"] == "tool_result" for event in events)


def test_a_job_calls_an_agent_through_its_turns_and_its_cache_holds(hive: Stack) -> None:
    """A random model calls by chance: jobs are begun until one had three turns."""
    for _ in range(80):
        job = begin(hive, CALLING)
        ended(hive, job)
        told = result(hive, job)
        check_whole(hive, job)
        calls = [event for event in output(hive, job) if event["event"] == "tool_call"]
        assert calls_of(hive, job) == len(calls)
        if len(told["turns"]) >= 3 and calls:
            break
    before, *after = told["turns"]
    assert len(after) >= 2
    for turn in after:
        assert turn["tokens_cached"] >= before["tokens_in"] - BLOCK
        before = turn


def test_a_server_that_is_killed_in_turn_3_fails_the_job_and_nothing_is_called_twice(tmp_path: Path) -> None:
    """The server is stopped at the end of turn 2, and killed if it had not ended turn 3 by then."""
    with calling_server(tmp_path) as server, with_guide(server) as hive:
        for _ in range(80):
            job = begin(hive, CALLING)
            until(partial(is_so_far, hive, job), within_s=60, what="two turns")
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            if has(hive, job, "tool_result", 2) and not has(hive, job, "turn", 3) and not is_over(hive, job):
                break
            server.process.send_signal(signal.SIGCONT)
            ended(hive, job)
        else:
            pytest.fail("no job was in its third turn")
        server.process.kill()
        found = ended(hive, job)
        told = result(hive, job)
        check_whole(hive, job)
        assert found["status"] == "failed"
        assert told["reason"] in ("stream_incomplete", "backend_unavailable"), told
        assert [turn["n"] for turn in told["turns"]] == [1, 2]
        runs = [event for event in output(hive, job) if event["event"] == "tool_call"]
        assert calls_of(hive, job) == len(runs)


def is_so_far(hive: Stack, job: str) -> bool:
    """Whether its second turn is over, or all of it."""
    return has(hive, job, "tool_result", 2) or is_over(hive, job)


def is_over(hive: Stack, job: str) -> bool:
    return bool(output(hive, job)[-1:] and output(hive, job)[-1]["event"] == "ended")


def test_kill_9_of_every_part_at_any_step_ends_each_job_once(hive: Stack) -> None:
    chance = random.Random(21)
    jobs = []
    for number in range(KILLS):
        part = ("daemon", "jobs", "proxy")[number % 3]
        job = begin(hive, (LONG, CALLING)[number % 2])
        jobs.append(job)
        time.sleep(chance.uniform(0.0, 0.5))
        kill(hive, part)
        found = ended(hive, job)
        told = result(hive, job)
        check_whole(hive, job)
        if found["status"] == "failed":
            assert told["reason"], told
        calls = [event for event in output(hive, job) if event["event"] == "tool_call"]
        assert calls_of(hive, job) <= len(calls)
    assert ended(hive, begin(hive, SHORT))["state"] == "done"
    with closing(sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT id, state FROM jobs WHERE kind = 'task'").fetchall()
    assert {job for job, _ in rows} >= set(jobs)
    assert "running" not in {state for _, state in rows}


def kill(hive: Stack, part: str) -> None:
    if part != "jobs":
        hive.restart(part)
        return
    for pid in processes_of_jobs(hive):
        os.kill(pid, signal.SIGKILL)


def processes_of_jobs(hive: Stack) -> list[int]:
    assert hive.process is not None
    below = psutil.Process(hive.process.pid).children(recursive=True)
    return [child.pid for child in below if child.is_running() and "--link-fd" in words_of(child)]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_the_process_of_jobs_is_light_and_ends_with_its_hive(llama: LlamaServer) -> None:
    with stack(url=llama.url, config="") as hive:
        ended(hive, begin(hive, SHORT))
        (pid,) = processes_of_jobs(hive)
        memory = psutil.Process(pid).memory_full_info()
        assert memory.pss < 40 * 1024 * 1024
        print(f"\nprocess of jobs: PSS {memory.pss / 1e6:.1f} MB, private {memory.uss / 1e6:.1f} MB")
        long = begin(hive, LONG)
        until(lambda: has(hive, long, "delta"), within_s=30, what="it writes")
        hive.kill_up()
        until(lambda: not psutil.pid_exists(pid), within_s=30, what="the process of jobs has ended")


def test_a_job_is_refused_where_its_agent_would_be(hive: Stack) -> None:
    with pytest.raises(HiveError) as refused:
        hive.post("/api/jobs", {"name": "n", **SHORT, "agent": "nobody"})
    assert refused.value.code == "not_found"
