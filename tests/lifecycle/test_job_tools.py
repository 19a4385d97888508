"""Tools of model jobs in a daemon: real agents, real MCP servers, a real proxy and process of jobs; the model's calls
are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hive.domain import BackendKind, JobState
from hive.errors import BadRequest, NotFound, NotPermitted
from hive.host.process import ProcessTable
from hive.jobs.call_forms import ToolForm
from hive.jobs.order import JobEvent, JobOrder
from hive.link.jobs import AskExecIn
from hive.link.message import LinkMessage
from hive.link.messages import Failed
from hive.settings.jobs import JobsSection
from hive.store.audit import Filter
from tests import llama
from tests.control.box import AWAKE, Box, is_alive
from tests.fakes.raw_vmm import listens
from tests.ports import free_port
from tests.waiting import until
from tests.worker.scripted import Folder

JOBS = Path(__file__).parents[1] / "jobs"
MCP = [sys.executable, str(JOBS / "mcp_server.py")]
RUDE = [sys.executable, str(JOBS / "rude_server.py")]
TIME = [sys.executable, "-m", "mcp_server_time"]
ME = "uid:0"
HURRIED = msgspec.structs.replace(AWAKE, jobs=JobsSection(tool_timeout_s=6))


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

    def turns(self, job: str) -> int:
        """Turns that it has told."""
        run = self.jobs._runs.get(job)
        assert run is not None, "it has ended"
        return len(run.turns)

    async def told(self, message: AskExecIn) -> LinkMessage:
        """The daemon's answer to what the process of jobs asks."""
        answered: asyncio.Future[LinkMessage] = asyncio.get_running_loop().create_future()

        def reply(message: LinkMessage, descriptors: Sequence[int] = ()) -> None:
            answered.set_result(message)

        self.jobs._hear(message, reply)
        return await answered

    async def until_results(self, job: str, count: int) -> None:
        """Returns when so many calls have theirs."""
        async for event in self.jobs.events(job, follow=True):
            count -= event.event == "tool_result"
            if not count:
                return

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


@asynccontextmanager
async def tool_box(box: Box, model: str) -> AsyncIterator[ToolBox]:
    """With the agent `scribe`, which runs tool_agent.py, and the model at that socket."""
    await box.start_helper()
    await box.start_daemon(HURRIED, backend=(BackendKind.LLAMA, model))
    await box.start_real_proxy()
    await until(lambda: box.inference()["running"])
    await agent(box, "scribe", "tool_agent.py")
    found = ToolBox(box)
    yield found
    await found.jobs.close()
    await until(lambda: found.jobs.process_id is None)


@pytest.fixture
async def tools(box: Box, tmp_path: Path) -> AsyncIterator[ToolBox]:
    """A model that calls what it is told to."""
    model = Folder(tmp_path)
    process = subprocess.Popen(model.launch().command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await until(lambda: listens(model.socket))
        async with tool_box(box, str(model.socket)) as found:
            yield found
    finally:
        process.kill()
        process.wait()


async def agent(box: Box, name: str, program: str, *words: str, **more: Any) -> None:
    """An agent that runs a program of tests/jobs at a port of its own; its `words` end with that."""
    port = free_port()
    await box.create(name, [sys.executable, str(JOBS / program), *words, str(port)], port=port, **more)
    await box.start(name, ME)


async def test_an_agent_answers_a_call_and_learns_of_which_job_it_is(tools: ToolBox) -> None:
    said = await tools.results(
        'call echo={"a":[1,"b"]} | call fields={} | data 1', function("echo"), function("fields")
    )
    assert json.loads(said[0]) == {"a": [1, "b"]}
    fields = json.loads(said[1])
    assert (fields["x-hive-job"], "authorization" in fields) == (tools.last, False)


async def test_a_caller_cannot_pass_itself_off_as_a_job(tools: ToolBox) -> None:
    port, token = tools.box.services.proxy_link.ingress_port, tools.box.tokens("scribe")["ingress"]
    fields = {"X-Hive-Token": token, "X-Hive-Job": "mine", "Authorization": "Bearer mine"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/agents/scribe") as client:
        found = (await client.post("/tools/fields", json={}, headers=fields)).json()
    assert ("x-hive-job" in found, found["authorization"]) == (False, "Bearer mine")


async def test_a_call_that_comes_to_nothing_says_why_and_the_job_goes_on(tools: ToolBox) -> None:
    names = ("fail", "missing", "hang", "cut", "bytes", "empty", "long", "endless", "die", "echo")
    script = " | ".join(" ".join(f"call {name}={{}}" for name in some) for some in (names[:6], names[6:8], names[8:]))
    said = await tools.results(f"{script} | data 1", *map(function, names))
    found = dict(zip(names, said, strict=True))
    assert "answered 500: the shelf is empty" in found["fail"]
    assert "agent scribe has no tool missing (404)" in found["missing"]
    assert "hang gave no result within 6 s" in found["hang"]
    assert found["cut"].startswith('{"error":"agent scribe did not answer')
    assert (found["bytes"], found["empty"]) == ("\ufffd?\ufffd", "")
    for name, letter in (("long", "x"), ("endless", "y")):
        assert found[name] == letter * 65536 + "\n[cut off after 65536 bytes]"
    assert found["die"].startswith('{"error":"agent scribe')
    assert found["echo"].startswith('{"error":"agent scribe')


async def test_a_sleeping_agent_is_woken_by_a_call(tools: ToolBox) -> None:
    await tools.box.life("scribe").fall_asleep("idle")
    assert (await tools.box.view("scribe"))["status"] == "paused"
    assert await tools.results('call echo={"n":1} | data 1', function("echo")) == ['{"n": 1}']


async def test_a_real_mcp_server_runs_inside_the_agent_which_stays_awake_for_it(tools: ToolBox) -> None:
    job = await tools.begin('call get_current_time={"timezone":"Europe/Berlin"} | wait 2 data 1', mcp(*TIME))
    await until(lambda: tools.box.life("scribe").held == 1)
    events = await tools.events(job)
    result = next(event.data["result"] for event in events if event.event == "tool_result")
    assert json.loads(result)["timezone"] == "Europe/Berlin"
    call = next(event.data for event in events if event.event == "tool_call")
    assert (call["name"], call["agent"]) == ("get_current_time", "scribe")
    assert tools.box.life("scribe").held == 0


async def test_the_server_has_the_environment_of_its_agent_and_ends_with_its_job(tools: ToolBox) -> None:
    (said,) = await tools.results("call s_pid={} | data 1", mcp(*MCP, names=["pid"], prefix="s_"))
    pid, _, home = said.split()
    assert home == str(tools.box.paths.home(tools.box.life("scribe").agent.id))
    assert not is_alive(int(pid))
    rows = await tools.box.audit(Filter(act="agent.exec_ended"))
    assert [row["detail"]["command"] for row in rows] == [MCP]


@pytest.mark.wide
async def test_a_server_that_dies_is_started_anew_by_the_next_call(tools: ToolBox) -> None:
    script = 'call say={"text":"a"} | call die={} | call say={"text":"b"} | data 1'
    first, died, second = await tools.results(script, mcp(*MCP))
    assert (first, second) == ("a", "b")
    assert "I am dying; the next call opens it anew" in died


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--stateless",), marks=pytest.mark.wide)], ids=["session", "stateless"]
)
async def test_a_server_at_the_agents_port_is_spoken_to_through_ingress(tools: ToolBox, words: tuple[str, ...]) -> None:
    await agent(tools.box, "mcp", "mcp_server.py", *words, "--port")
    script = 'call add={"a":2,"b":3} | wait 2 call hang={} | call fail={} | call long={"size":9000000} | '
    script += 'call say={"text":"x"}'
    entry = {"type": "mcp", "agent": "mcp", "path": "/mcp"}
    job = await tools.begin(script, entry)
    await tools.until_results(job, 1)
    await tools.box.life("mcp").fall_asleep("idle")
    assert (await tools.box.view("mcp"))["status"] == "paused", "nothing of a session keeps it awake"
    events = await tools.events(job)
    said = [event.data["result"] for event in events if event.event == "tool_result"]
    assert said[0] == "5", said
    assert ("hang gave no result within 6 s" in said[1], "cannot" in said[2] or "fail" in said[2]) == (True, True), said
    assert ("longer than 4194304 bytes" in said[3], said[4]) == (True, "x"), said


@pytest.mark.wide
async def test_tools_that_are_not_there_fail_the_job_before_its_first_turn(tools: ToolBox) -> None:
    for entry, words in (
        (mcp(*RUDE, "dies-at-once"), "its last words: no such model"),
        (mcp("/no/such/program"), "no such"),
        (mcp(*MCP, names=["nothing"]), "has no tool nothing; it has: add, say"),
        ({"type": "mcp", "agent": "scribe", "path": "/mcp"}, "the MCP server /mcp of agent scribe cannot be used"),
    ):
        end = await tools.end("data 1", entry)
        assert (end["status"], end["reason"], words in end["detail"]) == ("failed", "tools_unavailable", True), end
        assert end["usage"]["turns"] == 0
    assert tools.box.life("scribe").held == 0


async def test_an_order_names_agents_that_are_there_and_of_its_tenant(tools: ToolBox) -> None:
    await agent(tools.box, "other", "tool_agent.py", tenant="acme")
    for entry, refusal in (
        (function("echo", "nobody"), NotFound),
        (function("echo", "other"), NotPermitted),
        (mcp(*TIME, agent="other"), NotPermitted),
        ({"type": "mcp", "agent": "scribe", "url": "http://elsewhere"}, BadRequest),
        ({"type": "mcp", "agent": "scribe", "path": "/../other"}, BadRequest),
    ):
        with pytest.raises(refusal):
            await tools.begin("data 1", entry)
    assert await tools.results("call echo={} | data 1", function("echo", "other"), tenant="acme") == ["{}"]


@pytest.mark.wide
async def test_an_agent_that_is_removed_in_mid_job_is_gone_for_its_tools(tools: ToolBox) -> None:
    """Also where another one has its name since."""
    script = (
        'call say={"text":"a"} | wait 2 call say={"text":"b"} call echo={} | wait 3 call say={} call echo={} | data 1'
    )
    job = await tools.begin(script, mcp(*MCP), function("echo"))
    await tools.until_results(job, 1)
    await tools.box.services.agents.remove("scribe", ME)
    await tools.until_results(job, 3)
    await agent(tools.box, "scribe", "tool_agent.py")
    said = [event.data["result"] for event in await tools.events(job) if event.event == "tool_result"]
    assert said[0] == "a"
    assert all(one.startswith('{"error":') for one in said[1:]), said
    assert "may not" in said[-1], said


@pytest.mark.wide
async def test_a_job_that_is_cancelled_leaves_nothing_inside_agents(tools: ToolBox) -> None:
    job = await tools.begin("call hang={} | data 1", mcp(*MCP), mcp(*RUDE, "stays", prefix="r_"))
    await until(lambda: tools.box.life("scribe").held == 2)
    await until(lambda: tools.turns(job) >= 1)
    assert (await tools.jobs.cancel(job)).state is JobState.CANCELLED
    await until(lambda: tools.box.life("scribe").held == 0)
    assert not marked(tools.box)


@pytest.mark.wide
async def test_a_process_of_jobs_that_is_killed_leaves_nothing_inside_agents(tools: ToolBox) -> None:
    job = await tools.begin("call hang={} | data 1", mcp(*MCP))
    await until(lambda: tools.turns(job) >= 1)
    os.kill(tools.jobs.process_id, signal.SIGKILL)
    assert (await tools.events(job))[-1].data["reason"] == "worker_restarted"
    await until(lambda: tools.box.life("scribe").held == 0)
    assert not marked(tools.box)


async def test_the_daemon_runs_nothing_that_the_order_does_not_name(tools: ToolBox) -> None:
    """Asked by one who has taken the process of jobs over, it refuses."""
    job = await tools.begin("call hang={} | data 1", mcp(*MCP))
    await until(lambda: tools.turns(job) >= 1)
    for agent_name, command in (("scribe", ["/bin/sh", "-c", "id"]), ("scribe", MCP[:1]), ("nobody", MCP)):
        answer = await tools.told(AskExecIn(job=job, agent=agent_name, command=command))
        assert isinstance(answer, Failed), answer
    assert tools.box.life("scribe").held == 1


@pytest.mark.wide
@pytest.mark.llama
async def test_a_real_model_calls_a_real_mcp_server(box: Box, tmp_path: Path) -> None:
    """Its weights are random and its calls are chance, in the form that a schema gives them."""
    flags = ("--no-jinja", "--chat-template", "chatml")
    params = {"temperature": 30.0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": -1, "max_tokens": 300}
    more: dict[str, Any] = {
        "tool_form": ToolForm.SCHEMA,
        "params": params,
        "answer_schema": {"const": "x"},
        "exit_tools": [],
    }
    with llama.serve(tmp_path, on_socket=True, more=flags) as server:
        async with tool_box(box, server.address) as tools:
            for _ in range(40):
                order = JobOrder(name="t", model=llama.MODEL, prompt="Who?", tools=[mcp(*MCP, names=["pid"])], **more)
                events = await tools.events((await tools.jobs.begin(order, actor=ME)).id)
                results = [event.data["result"] for event in events if event.event == "tool_result"]
                if results and results[0].split()[0].isdecimal():
                    break
            else:
                raise AssertionError("it never called")
            turns = [event.data for event in events if event.event == "turn"]
            assert len(turns) >= 2, turns
            assert turns[1]["tokens_cached"] >= turns[0]["tokens_in"] - 1, turns


def marked(box: Box) -> list[int]:
    """Processes that run inside agents of this box for somebody."""
    home = f"HOME={box.paths.state}".encode()
    return [
        pid
        for pid, entries in ProcessTable().environments.items()
        if any(one.startswith(b"HIVE_EXEC=") for one in entries) and any(one.startswith(home) for one in entries)
    ]
