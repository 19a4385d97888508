"""Tools of model jobs in a daemon: real agents, real MCP servers, a real proxy and process of jobs; the model's calls
are scripted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hive.domain import BackendKind, JobState
from hive.errors import BadRequest, NotFound, NotPermitted
from hive.jobs.order import JobEvent, JobOrder
from hive.settings.table import Settings
from tests.control.box import AWAKE, Box, is_alive, until
from tests.ports import free_port
from tests.worker.scripted import Folder

TESTS = Path(__file__).parents[1]
MCP = [sys.executable, str(TESTS / "jobs" / "mcp_server.py")]
RUDE = [sys.executable, str(TESTS / "jobs" / "rude_server.py")]
TIME = [sys.executable, "-m", "mcp_server_time"]
ME = "uid:0"


class ToolBox:
    """A daemon with everything around it, and the job it was given last."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.last = ""

    @property
    def jobs(self) -> Any:
        return self.box.services.model_jobs

    async def begin(self, script: str, *tools: dict[str, Any], **more: Any) -> str:
        order = JobOrder(name="t", model="scripted", prompt=script, tools=list(tools), exit_tools=[], **more)
        self.last = (await self.jobs.begin(order, actor=ME)).id
        return self.last

    async def events(self, job: str) -> list[JobEvent]:
        """All of it, once it has ended."""
        return [event async for event in self.jobs.events(job, follow=True)]

    async def results(self, script: str, *tools: dict[str, Any], **more: Any) -> list[str]:
        """Results of the calls of a job, once it has ended."""
        events = await self.events(await self.begin(script, *tools, **more))
        assert events[-1].data["status"] in ("completed", "incomplete"), events[-1]
        return [event.data["result"] for event in events if event.event == "tool_result"]

    async def end(self, script: str, *tools: dict[str, Any], **more: Any) -> dict[str, Any]:
        return (await self.events(await self.begin(script, *tools, **more)))[-1].data


def function(name: str, agent: str = "scribe", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "agent": agent, "function": {"name": name, "parameters": parameters}}


def mcp(*command: str, agent: str = "scribe", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "agent": agent, "command": list(command), **more}


@pytest.fixture
async def tools(box: Box, tmp_path: Path) -> AsyncIterator[ToolBox]:
    """With the agent `scribe`, which runs tool_agent.py."""
    model = Folder(tmp_path)
    launch = model.launch()
    process = subprocess.Popen(launch.command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(model.socket.exists)
        await box.start_helper()
        await box.start_daemon(AWAKE, backend=(BackendKind.LLAMA, str(model.socket)))
        await box.start_real_proxy()
        await until(lambda: box.inference()["running"])
        port = free_port()
        await box.create("scribe", [sys.executable, str(TESTS / "jobs" / "tool_agent.py"), str(port)], port=port)
        await box.start("scribe", ME)
        yield ToolBox(box)
    finally:
        process.kill()
        process.wait()


async def test_an_agent_answers_a_call_and_learns_of_which_job_it_is(tools: ToolBox) -> None:
    said = await tools.results('call echo={"a":[1,"b"]} | call fields={} | data 1', function("echo"), function("fields"))
    assert json.loads(said[0]) == {"a": [1, "b"]}
    fields = json.loads(said[1])
    assert (fields["x-hive-job"], "authorization" in fields) == (tools.last, False)


async def test_a_real_mcp_server_runs_inside_the_agent(tools: ToolBox) -> None:
    said = await tools.results('call get_current_time={"timezone":"Europe/Berlin"} | data 1', mcp(*TIME))
    assert json.loads(said[0])["timezone"] == "Europe/Berlin"
