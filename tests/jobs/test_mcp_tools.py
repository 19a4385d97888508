"""MCP servers as tools: real programs on real pipes, good ones and rude ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hive.jobs.mcp_transports import OWN_BYTES, MessageRoom
from hive.jobs.open_tools import open_tools
from hive.jobs.order import JobOrder
from hive.jobs.running import Tool, ToolFailed, run_calls
from hive.jobs.toolloop import Fate, JudgedCall, LoopLimits
from hive.worker.dialogue import DialogueFailed
from hive.worker.records import ToolCallText
from tests.jobs.local_programs import AGENT, LocalPrograms
from tests.waiting import until

HERE = Path(__file__).parent
MCP = (str(HERE / "mcp_server.py"),)
TIME = ("-m", "mcp_server_time")


def order_with(*tools: dict[str, Any]) -> JobOrder:
    """An order with these tools."""
    return JobOrder(name="t", model="m", prompt="p", tools=list(tools))


def server(*words: str, **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "agent": AGENT, "command": [sys.executable, *words], **more}


def rude(how: str) -> dict[str, Any]:
    return server(str(HERE / "rude_server.py"), how)


class Opened:
    """Tools of an order, and the programs that run for it."""

    def __init__(self, tools: list[Tool], programs: LocalPrograms) -> None:
        self.programs = programs
        self.by_name = {tool.definition.name: tool for tool in tools}

    async def call(self, name: str, **arguments: Any) -> str:
        (found,) = await self.calls((name, arguments))
        return found

    async def calls(self, *calls: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
        """As a job's loop runs them."""
        judged = [JudgedCall(ToolCallText("", name, ""), Fate.RUN, arguments) for name, arguments in calls]
        runners = {name: tool.runner for name, tool in self.by_name.items()}
        return await run_calls(judged, runners, LoopLimits(tool_timeout_s=10, result_max_bytes=1000))


@asynccontextmanager
async def opened(*entries: dict[str, Any], open_s: float = 30) -> AsyncIterator[Opened]:
    """In the end nothing runs."""
    programs = LocalPrograms()
    tools, close = await open_tools(order_with(*entries), programs.access(), open_s=open_s)
    try:
        yield Opened(tools, programs)
    finally:
        await close()
    assert not programs.running


async def refused(*entries: dict[str, Any], open_s: float = 30) -> str:
    """Reason why they cannot be opened; nothing is left of the try."""
    programs = LocalPrograms()
    with pytest.raises(DialogueFailed) as error:
        await open_tools(order_with(*entries), programs.access(), open_s=open_s)
    assert error.value.reason == "tools_unavailable"
    assert not programs.running
    return str(error.value)


async def test_a_real_server_tells_the_time() -> None:
    async with opened(server(*TIME)) as tools:
        assert list(tools.by_name) == ["get_current_time", "convert_time"]
        assert tools.by_name["get_current_time"].definition.parameters["required"] == ["timezone"]
        told = await tools.call("get_current_time", timezone="Europe/Berlin")
        assert json.loads(told)["timezone"] == "Europe/Berlin"
        assert "Invalid timezone" in json.loads(await tools.call("get_current_time", timezone="Europe/Berlx"))["error"]


async def test_results_are_text_and_what_is_none_is_named() -> None:
    async with opened(server(*MCP)) as tools:
        found = await tools.calls(
            ("add", {"a": 1, "b": 2}), ("picture", {}), ("fail", {}), ("long", {"size": 3000}), ("say", {"text": ""})
        )
    assert found[:2] == ("3", "[image/png: no text, left out]")
    assert found[2].startswith('{"error":"')
    assert found[3] == "x" * 1000 + "\n[cut off after 1000 bytes]"
    assert found[4] == ""


@pytest.mark.wide
async def test_several_servers_have_prefixes_and_the_tools_that_were_chosen() -> None:
    one, two = server(*MCP, names=["add", "say"], prefix="a_"), server(*MCP, prefix="b_", names=["say"])
    async with opened(one, two) as tools:
        assert list(tools.by_name) == ["a_add", "a_say", "b_say"]
        assert await tools.calls(("a_say", {"text": "x"}), ("b_say", {"text": "y"})) == ("x", "y")
    assert "there are two tools of the name say" in await refused(one | {"prefix": ""}, two | {"prefix": ""})
    assert "has no tool sing; it has: add, say" in await refused(server(*MCP, names=["sing"]))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tools", "lists more than 128 tools"),
        ("big-schema", "describes t0 in more than 16384 bytes"),
        ("bad-schema", "lists something that is no list of tools"),
        ("no-list", "lists something that is no list of tools"),
        ("endless-list", "lists its tools on more than 16 pages"),
        ("hang-list", "did not list its tools within 3 s"),
        ("hang-open", "did not list its tools within 3 s"),
        ("dies-at-once", "cannot be used: it ended; its last words: no such model"),
    ],
)
async def test_a_server_without_a_list_that_is_one_cannot_be_used(how: str, words: str) -> None:
    began_at = time.monotonic()
    assert words in await refused(rude(how), open_s=3)
    assert time.monotonic() - began_at < 60


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flood", "it wrote 10000 lines that nobody asked for; the next call opens it anew"),
        ("endless-line", "it wrote 67108864 bytes without an end of the line; the next call opens it anew"),
        ("dies", "it ended; its last words: I am dying; the next call opens it anew"),
        ("long-result", "the result is longer than 4194304 bytes, and nothing of it was kept"),
        ("no-result", "gave no result: content Input should be a valid list"),
        ("wants-input", "gave no result: content Field required"),
        ("surrogate", "is no message of MCP"),
        ("bytes", "is no message of MCP"),
        ("deep", "is no message of MCP"),
    ],
)
async def test_what_is_no_result_costs_its_own_call_alone(how: str, words: str) -> None:
    async with opened(rude(how), server(*MCP, names=["say"])) as tools:
        found, said = await tools.calls(("t0", {}), ("say", {"text": "ok"}))
        assert words in json.loads(found)["error"]
        assert said == "ok"
        assert words in json.loads(await tools.call("t0"))["error"]


@pytest.mark.parametrize(
    ("how", "name", "result"),
    [
        ("noise", "t0", "ok"),
        ("stderr", "t0", "ok"),
        ("asks", "t0", "-32602"),
        ("evil-pattern", "t0", "ok"),
        ("bad-name", "___files_read", "ok"),
        ("long-description", "t0", "ok"),
    ],
)
async def test_what_does_no_harm_is_passed_over(how: str, name: str, result: str) -> None:
    """`evil-pattern`: the package's own check of results would be busy for years with this one."""
    async with opened(rude(how)) as tools:
        assert [await tools.call(name), await tools.call(name)] == [result, result]
        assert len(tools.by_name[name].definition.description) <= 4096


async def test_a_server_that_goes_on_ending_is_given_up() -> None:
    async with opened(rude("dies")) as tools:
        said = [json.loads(await tools.call("t0"))["error"] for _ in range(5)]
        assert len(tools.programs.begun) == 4
    assert "it is not opened again" in said[3]
    assert "has ended 4 times and is not opened again" in said[4]


async def test_a_call_that_hangs_holds_up_no_other_and_no_end() -> None:
    async with opened(server(*MCP)) as tools:
        hanging = asyncio.create_task(tools.call("hang"))
        assert await tools.call("say", text="ok") == "ok"
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await tools.call("say", text="still") == "still"


async def test_calls_under_way_end_with_the_server_and_with_the_job() -> None:
    async with opened(server(*MCP)) as tools:
        hanging = asyncio.create_task(tools.call("hang"))
        await asyncio.sleep(0.1)
        tools.programs.kill()
        assert "is gone: it ended" in json.loads(await hanging)["error"]
        await tools.call("say", text="again")
        left = asyncio.create_task(tools.call("hang"))
        await asyncio.sleep(0.1)
    assert "is gone" in json.loads(await left)["error"]


@pytest.mark.wide
async def test_many_calls_that_lose_one_server_cost_one_start() -> None:
    """The late ones once closed what an early one's next call had opened."""
    async with opened(server(*MCP)) as tools:
        for _ in range(2):
            found = await tools.calls(
                ("die", {}), ("hang", {}), ("hang", {}), ("hang", {}), *[("say", {"text": "a"})] * 4
            )
            assert all("is gone" in one for one in found[:4]), found
            assert all(one == "a" or "is gone" in one for one in found[4:]), found
        assert await tools.call("say", text="b") == "b"
        assert len(tools.programs.begun) <= 4


async def test_a_server_that_does_not_end_by_itself_is_killed() -> None:
    async with opened(rude("stays")) as tools:
        pid = int(await tools.call("t0"))
    assert not psutil.pid_exists(pid)


async def test_a_job_that_is_cancelled_while_it_opens_leaves_nothing() -> None:
    programs = LocalPrograms()
    opening = asyncio.create_task(open_tools(order_with(rude("hang-open")), programs.access()))
    await until(lambda: programs.running)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not programs.running


async def test_a_closed_session_takes_no_call() -> None:
    async with opened(server(*MCP, names=["say"])) as tools:
        runner = tools.by_name["say"].runner
    with pytest.raises(ToolFailed, match="is closed"):
        await runner.run("say", {"text": "x"}, max_bytes=9)


async def test_an_agent_that_is_not_there_is_named() -> None:
    assert "there is no agent nobody" in await refused({**server(*MCP), "agent": "nobody"})


def test_servers_share_the_room_for_messages_that_are_not_whole() -> None:
    room = MessageRoom(10 * OWN_BYTES)
    assert room.hold("a", 9 * OWN_BYTES)
    assert room.hold("b", OWN_BYTES), "each has its own"
    assert not room.hold("c", 2 * OWN_BYTES)
    room.leave("a")
    assert room.hold("c", 2 * OWN_BYTES)


PROGRAM = """
import sys
{imports}
print([name for name in ("mcp", "mcp_types", "httpx2", "pydantic", "anyio", "jsonschema") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import hive.proxy.server, hive.sandbox.server",
        "import hive.daemon",
        "import hive.jobs.process, hive.jobs.open_tools, hive.jobs.model_run",
    ],
    ids=["proxy", "daemon", "jobs"],
)
def test_nothing_loads_mcp_before_a_job_needs_it(imports: str) -> None:
    """The daemon and the proxy never do. Starlette, which the daemon has, brings anyio; nothing else of it is there."""
    program = PROGRAM.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.replace("'", '"'))) <= {"anyio"}
