"""Python functions as tools: what they are told to be, and what they do to those who wait for them."""

# ruff: noqa: ASYNC110 - a tool that blocks is the case

from __future__ import annotations

import asyncio
import functools
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest
from hive.jobs.callables import HANGING_MAX, tool_of
from hive.jobs.running import FRAME_BYTES, NOTED, ToolFailed, cut, error_text, run_calls
from hive.jobs.toolloop import Fate, JudgedCall, LoopLimits
from hive.worker.records import ToolCallText
from tests.worker.scripted import OfItsOwnKind

LIMITS = LoopLimits(result_max_bytes=1000, tool_timeout_s=0.5)


class Place(msgspec.Struct):
    city: str
    floor: int = 0


async def results_of(
    *calls: tuple[Callable[..., Any], Mapping[str, Any]], limits: LoopLimits = LIMITS
) -> tuple[str, ...]:
    tools = {f"t{number}": tool_of(function, name=f"t{number}") for number, (function, _) in enumerate(calls)}
    judged = [
        JudgedCall(ToolCallText("", name, ""), Fate.RUN, arguments)
        for name, (_, arguments) in zip(tools, calls, strict=True)
    ]
    return await run_calls(judged, {name: tool.runner for name, tool in tools.items()}, limits)


async def result_of(function: Callable[..., Any], limits: LoopLimits = LIMITS, **arguments: Any) -> str:
    return (await results_of((function, arguments), limits=limits))[0]


def test_the_definition_comes_from_the_signature() -> None:
    def look_up(  # type: ignore[no-untyped-def]  # one is left out on purpose
        where: Place, kind: Literal["a", "b"] = "a", *, limit: Annotated[int, msgspec.Meta(ge=1)] = 5, anything=None
    ) -> str:
        """Look something
        up.

        This is for people.
        """
        return ""

    definition = tool_of(look_up).definition
    assert (definition.name, definition.description) == ("look_up", "Look something up.")
    assert definition.parameters["properties"] == {
        "where": {"$ref": "#/$defs/Place"},
        "kind": {"enum": ["a", "b"]},
        "limit": {"type": "integer", "minimum": 1},
        "anything": {},
    }
    assert definition.parameters["required"] == ["where"]
    assert definition.parameters["$defs"]["Place"]["required"] == ["city"]
    assert definition.raw["type"] == "function"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ({"type": "function", "function": {"name": "a"}}, "a tool is a function, or Tool"),
        (lambda *words: 0, "named parameters only"),
        (lambda **words: 0, "named parameters only"),
        (lambda a: 0, "tool name '<lambda>'"),
        (len, "named parameters only"),
    ],
)
def test_a_function_that_can_be_no_tool_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        tool_of(function)


async def test_arguments_arrive_as_their_types_and_results_leave_as_text() -> None:
    def climb(to: Place) -> dict[str, int]:
        return {to.city: to.floor + 1}

    async def slowly(to: Place) -> Place:
        await asyncio.sleep(0.01)
        return to

    assert await result_of(climb, to={"city": "Rome"}) == '{"Rome":1}'
    assert await result_of(slowly, to={"city": "Rome", "floor": 2}) == '{"city":"Rome","floor":2}'
    assert "Expected `int`" in await result_of(climb, to={"city": "Rome", "floor": "x"})


# --- tools that misbehave ----------------------------------------------------------------------------------------


async def test_a_tool_that_hangs_is_given_up_and_its_neighbour_has_its_result() -> None:
    async def hangs() -> str:
        await asyncio.sleep(60)
        return ""

    async def hangs_on() -> str:
        while True:
            try:
                await asyncio.sleep(0.6)
            except asyncio.CancelledError:
                if done.is_set():
                    raise

    def blocks() -> str:
        done.wait(60)
        return ""

    done = threading.Event()
    try:
        found = await results_of((hangs, {}), (hangs_on, {}), (blocks, {}), (lambda: "here", {}))
        assert found[:3] == tuple(f'{{"error":"t{n} gave no result within 0.5 s"}}' for n in range(3))
        assert found[3] == "here"
    finally:
        done.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def test_a_function_whose_calls_all_hang_is_not_called_for_ever() -> None:
    def blocks() -> str:
        done.wait(60)
        return ""

    done = threading.Event()
    tool = tool_of(blocks)
    limits = LoopLimits(tool_timeout_s=0.05, parallel=HANGING_MAX)
    call = JudgedCall(ToolCallText("", "blocks", ""), Fate.RUN)
    try:
        await run_calls([call] * HANGING_MAX, {"blocks": tool.runner}, limits)
        (refused,) = await run_calls([call], {"blocks": tool.runner}, limits)
        assert refused == '{"error":"16 earlier calls of blocks have not ended"}'
    finally:
        done.set()
    while (found := await run_calls([call], {"blocks": tool.runner}, limits)) != ("",):
        assert "have not ended" in found[0]
        await asyncio.sleep(0.01)


async def test_a_tool_that_floods_is_stopped_when_there_is_enough() -> None:
    closed = []

    def floods() -> Iterator[str]:
        try:
            while True:
                yield "spam " * 10
        finally:
            closed.append("thread")

    async def floods_too() -> AsyncIterator[str]:
        try:
            while True:
                yield "spam " * 10
        finally:
            closed.append("task")

    for found in await results_of((floods, {}), (floods_too, {}), limits=LoopLimits(result_max_bytes=1000)):
        assert found == ("spam " * 200) + "\n[cut off after 1000 bytes]"
    assert sorted(closed) == ["task", "thread"]


async def test_a_tool_that_returns_10_mb_has_its_64_kib() -> None:
    limits = LoopLimits()
    for text, kept in (("x" * 10_000_000, 65536), ("ä" * 5_000_000, 65536), ("a" + "ä" * 5_000_000, 65535)):
        found = await result_of(lambda text=text: text, limits)
        assert len(found.encode()) == kept + len("\n[cut off after 65536 bytes]")
        assert found.endswith("\n[cut off after 65536 bytes]")


async def test_a_tool_that_raises_tells_the_model_why() -> None:
    def divides(by: int) -> float:
        return 1 / by

    async def refuses() -> str:
        raise ToolFailed("no such city")

    def leaves() -> None:
        raise SystemExit(3)

    async def leaves_too() -> None:
        raise SystemExit(3)

    def stops() -> None:
        raise StopIteration

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    assert await result_of(divides, by=0) == '{"error":"ZeroDivisionError: division by zero"}'
    assert await result_of(refuses) == '{"error":"no such city"}'
    assert await result_of(leaves) == '{"error":"SystemExit: 3"}'
    assert await result_of(leaves_too) == '{"error":"SystemExit: 3"}'
    assert await result_of(stops) == '{"error":"StopIteration: "}'
    assert await result_of(is_cancelled) == '{"error":"t0 was cancelled"}'
    assert await result_of(lambda: "half \ud83d") == "half ?"
    assert "error" in await result_of(lambda: {"half": "\ud83d"})


# --- several at once ---------------------------------------------------------------------------------------------


async def test_results_come_in_the_order_of_the_calls_and_four_run_at_a_time() -> None:
    running, most = 0, 0

    async def waits(number: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02 * (9 - number))
        running -= 1
        return str(number)

    calls = [(waits, {"number": number}) for number in range(9)]
    assert await results_of(*calls, limits=LoopLimits()) == tuple("012345678")
    assert most == 4


async def test_the_time_of_a_call_begins_when_it_runs() -> None:
    async def waits() -> str:
        await asyncio.sleep(0.1)
        return "done"

    limits = LoopLimits(parallel=1, tool_timeout_s=0.4)
    assert await results_of(*[(waits, {})] * 8, limits=limits) == ("done",) * 8


async def test_a_cancel_ends_all_that_runs_and_starts_nothing_more() -> None:
    ended: list[int] = []
    begun: list[int] = []

    async def waits(number: int) -> str:
        begun.append(number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)
        return ""

    calls = [(waits, {"number": number}) for number in range(6)]
    running = asyncio.create_task(results_of(*calls, limits=LoopLimits(parallel=2)))
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    while len(ended) < 2:
        await asyncio.sleep(0.01)
    assert (begun, sorted(ended)) == ([0, 1], [0, 1])


async def test_what_is_not_run_has_a_result_too() -> None:
    refused = JudgedCall(ToolCallText("", "rm", ""), Fate.REFUSE, why="no")
    noted = JudgedCall(ToolCallText("", "LOW_CONFIDENCE", ""), Fate.NOTE)
    assert await run_calls([refused, noted], {}, LIMITS) == ('{"error":"no"}', NOTED)


PROGRAM = """
import asyncio, time
from hive.jobs.callables import tool_of
from hive.jobs.running import run_calls
from hive.jobs.toolloop import Fate, JudgedCall, LoopLimits
from hive.worker.records import ToolCallText
from tests.worker.scripted import OfItsOwnKind
tool = tool_of(lambda: time.sleep(600), name="blocks")
call = JudgedCall(ToolCallText("", "blocks", ""), Fate.RUN)
print(asyncio.run(run_calls([call], {"blocks": tool.runner}, LoopLimits(tool_timeout_s=0.05))))
"""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_whatever_a_coroutine_raises_is_its_own_result_alone() -> None:
    """An exception that was none of Exception, or had no words, ended the request and left its neighbours running."""

    async def odd() -> str:
        raise OfItsOwnKind("x")

    async def speechless() -> str:
        raise Speechless

    async def leaves() -> str:
        raise GeneratorExit

    async def fine() -> str:
        return "fine"

    found = await results_of((odd, {}), (speechless, {}), (leaves, {}), (fine, {}))
    assert found == ('{"error":"OfItsOwnKind: x"}', '{"error":"Speechless"}', '{"error":"GeneratorExit: "}', "fine")


async def test_an_error_of_10_mb_has_its_64_kib_as_json_too() -> None:
    """JSON writes a control character in six bytes: it was 384 KiB."""

    def fails() -> str:
        raise ValueError("\1" * 10_000_000)

    async def fails_here() -> str:
        raise ValueError("\1" * 10_000_000)

    for found in await results_of((fails, {}), (fails_here, {}), limits=LoopLimits()):
        assert 65000 < len(found) <= 65536 + FRAME_BYTES
        assert "cut off" in msgspec.json.decode(found)["error"]


async def test_a_coroutine_and_a_generator_behind_a_decorator_are_awaited() -> None:
    """The model was told "<coroutine object ...>"."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**arguments: Any) -> Any:
            return function(**arguments)

        return wrapper

    async def waits(text: str) -> str:
        await asyncio.sleep(0)
        return text

    async def pieces(text: str) -> AsyncIterator[str]:
        yield text
        yield text

    given = {"text": "a"}
    assert await results_of((decorated(waits), given), (decorated(pieces), given)) == ("a", "aa")


async def test_a_coroutine_that_comes_too_late_is_closed() -> None:
    go_on, made = threading.Event(), []

    async def never() -> str:
        return ""

    def late() -> Any:
        go_on.wait()
        made.append(never())
        return made[0]

    assert "no result within" in await result_of(late)
    go_on.set()
    while not made or inspect.getcoroutinestate(made[0]) != inspect.CORO_CLOSED:
        await asyncio.sleep(0.01)


async def test_many_calls_at_once_are_all_run() -> None:
    """Calls that were waited for counted as hanging: a worker of five requests had some refused."""
    all_run = threading.Barrier(HANGING_MAX + 8)

    def meet() -> str:
        all_run.wait()
        return "met"

    tool = tool_of(meet)
    call = JudgedCall(ToolCallText("", "meet", ""), Fate.RUN)
    at_once = (run_calls([call] * 4, {"meet": tool.runner}, LoopLimits()) for _ in range((HANGING_MAX + 8) // 4))
    assert {result for results in await asyncio.gather(*at_once) for result in results} == {"met"}


async def test_keys_and_whole_numbers_arrive_as_json_means_them() -> None:
    def count(of: dict[int, str], step: int, part: float) -> str:
        return f"{of} {step!r} {part!r}"

    assert await result_of(count, of={"1": "a"}, step=2.0, part=3.0) == "{1: 'a'} 2 3.0"
    assert "do not match" in await result_of(count, of={"1": "a"}, step=2.5, part=3.0)


def test_a_function_that_hangs_keeps_no_program_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "gave no result within 0.05 s" in ended.stdout


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_cut_never_splits_a_character(size: int) -> None:
    text = "aä€😀" * 3
    assert cut(text, size).startswith(text.encode()[:size].decode(errors="ignore"))
    assert cut(text, 10_000) == text


@given(st.text(max_size=400) | st.text('\1\n\\"a', max_size=400), st.integers(1, 300))
def test_an_error_keeps_to_its_size_whatever_json_makes_of_it(text: str, size: int) -> None:
    found = error_text(text, size)
    assert len(found.encode()) <= size + FRAME_BYTES
    assert set(msgspec.json.decode(found)) == {"error"}


def test_a_result_has_no_nul() -> None:
    """A llama-server without jinja read nothing behind it: the turns that are left were never told."""
    assert cut("a\0b", 10) == "a?b"
