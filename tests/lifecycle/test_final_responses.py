"""Objects of responses that have ended, made from real outputs: once, one at a time for an agent, held in bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hive.domain import JobState
from hive.errors import NotFound
from hive.lifecycle import final_responses
from hive.lifecycle.final_responses import FinalResponses
from hive.lifecycle.job_output import JobOutput, JobOutputReader
from hive.link.jobs import JobWord
from hive.store.jobs import StoredJob

MESSAGE = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}


class Outputs:
    """Outputs of jobs on disk. `opened`: the job of each reading; `most`: readings under way at the same time."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.opened: list[str] = []
        self.is_gone = False
        self.under_way = self.most = 0
        outputs = self

        class Counted(JobOutputReader):
            def __init__(self, path: Path) -> None:
                outputs.opened.append(path.stem)
                super().__init__(path)

        monkeypatch.setattr(final_responses, "JobOutputReader", Counted)
        self.final = FinalResponses(lambda job: directory / f"{job}.out", self._before)

    async def _before(self, job: StoredJob) -> dict[str, Any]:
        if self.is_gone:
            raise NotFound("it is kept no more")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return {"id": f"resp_{job.id}", "status": "queued"}

    def said(self, job: str, *texts: str) -> None:
        added: dict[str, Any] = {"type": "response.output_item.added", "output_index": 0, "item": MESSAGE}
        delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0}
        events = [added, *({**delta, "delta": text} for text in texts)]
        output = JobOutput(self.directory, job)
        output.append([JobWord(0.0, "response", event) for event in events])
        output.close()


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outputs:
    return Outputs(tmp_path / "jobs", monkeypatch)


def ended(job: str, agent: str = "a1", state: JobState = JobState.CANCELLED) -> StoredJob:
    return StoredJob(
        id=job, kind="task", state=state, actor="", created_at=1.0, updated_at=1.0, plan={"agent": agent}, error={}
    )


async def test_it_is_read_once_for_all_that_poll_it(outputs: Outputs) -> None:
    outputs.said("j1", "Hel", "lo")
    told = await asyncio.gather(*(outputs.final.of(ended("j1")) for _ in range(20)))
    told.append(await outputs.final.of(ended("j1")))
    assert len(set(told)) == 1
    found = json.loads(told[0])
    assert (found["id"], found["status"], found["output"][0]["content"][0]["text"]) == (
        "resp_j1",
        "cancelled",
        "Hello",
    )
    assert outputs.opened == ["j1"]


async def test_of_one_agent_one_at_a_time_is_made_and_of_all_a_few(outputs: Outputs) -> None:
    for name in ("j1", "j2", "j3", "j4"):
        outputs.said(name, "a")
    await asyncio.gather(*(outputs.final.of(ended(name)) for name in ("j1", "j2", "j3", "j4")))
    assert (outputs.most, outputs.opened) == (1, ["j1", "j2", "j3", "j4"])
    others = [ended(f"o{number}", agent=f"b{number}") for number in range(6)]
    await asyncio.gather(*map(outputs.final.of, others))
    assert outputs.most <= final_responses.AT_ONCE


async def test_what_is_held_has_a_bound_and_the_last_asked_for_stay(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_responses, "KEPT_BYTES", 3000)
    for name in ("j1", "j2", "j3"):
        outputs.said(name, "x" * 1000)
    for name in ("j1", "j2", "j1", "j3", "j1"):
        await outputs.final.of(ended(name))
    assert outputs.opened == ["j1", "j2", "j3"]
    await outputs.final.of(ended("j2"))
    assert outputs.opened == ["j1", "j2", "j3", "j2"]
    outputs.said("big", "x" * 4000)
    for _ in range(2):
        assert len(await outputs.final.of(ended("big"))) > 4000
    assert outputs.opened[-2:] == ["big", "big"]


async def test_what_is_released_is_held_no_more_also_while_it_is_made(outputs: Outputs) -> None:
    outputs.said("j1", "a")
    await outputs.final.of(ended("j1"))
    outputs.final.forget("j1")
    making = asyncio.ensure_future(outputs.final.of(ended("j1")))
    await asyncio.sleep(0)
    outputs.final.forget("j1")
    await making
    outputs.is_gone = True
    with pytest.raises(NotFound):
        await outputs.final.of(ended("j1"))


async def test_an_output_that_is_kept_no_more_is_an_empty_one(outputs: Outputs) -> None:
    found = json.loads(await outputs.final.of(ended("j9", state=JobState.FAILED)))
    assert (found["status"], found["output"]) == ("failed", [])
