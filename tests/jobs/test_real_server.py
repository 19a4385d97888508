"""Tools on a real llama-server with a tiny random model, in both forms: grammars make it write real calls.

What it calls is chance, so each test goes through seeds until it has met what it is about.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from hive.jobs import llama_worker
from hive.jobs.call_forms import ToolForm
from hive.jobs.exit_tools import Signal
from hive.jobs.toolloop import LoopLimits
from hive.worker.profile import TimeoutProfile
from hive.worker.records import ModelAnswer, RequestResult, RequestState
from hive.worker.worker import LlamaWorker
from tests.worker.scripted import ask, outcome, ready_again
from tests.worker.test_worker import launched, model, servers

__all__ = ["model"]

pytestmark = pytest.mark.llama
BLOCK = 16
"""Tokens of a block of vLLM's cache; llama-server's has none, and reads the last token again."""
SEEDS = range(60)
OTHER_DICE = {"seed": -1}
"""With one seed all turns of a request begin alike: it calls in each, or answers in the first."""
ENDS = ("repeated_tool_call", "tool_iterations_exhausted", "malformed_tool_call", None)
HOT = {"temperature": 30.0, "top_k": 0, "top_p": 1, "min_p": 0}
"""Else its weights, random as they are, want one thing only."""
REQUIRED = {"tool_choice": "required", "temperature": 5.0}
TEMPLATES = {
    # The tiny model's own template feeds the beginning of an answer to the grammar, which fails.
    ToolForm.SCHEMA: ("--no-jinja", "--chat-template", "chatml"),
    ToolForm.NATIVE: ("--jinja", "--chat-template-file", str(Path(__file__).with_name("calls.jinja"))),
}


@asynccontextmanager
async def tool_worker(
    model: Path, folder: Path, form: ToolForm = ToolForm.SCHEMA, **more: Any
) -> AsyncIterator[LlamaWorker]:
    launch = launched(model, folder, llama_context=16384)
    launch = replace(launch, command=(*launch.command, *TEMPLATES[form]))
    told: dict[str, Any] = {"slots": 2, "form": form, "exit_tools": (), "max_tokens": 300} | more
    if form is ToolForm.SCHEMA:
        told |= {"answer_schema": {"const": "x"}}
    found = llama_worker(launch, **told)
    try:
        await found.start()
        yield found
    finally:
        await found.stop()
    assert not servers(folder)


class Bees:
    """A tool that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def look(self, where: Literal["north", "south"], step: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]) -> str:
        """Look around."""
        self.calls.append((where, step))
        return f"{len(self.calls)} bees fly {where}"


async def first(
    found: LlamaWorker, is_so: Callable[[RequestResult], object], **more: Any
) -> tuple[RequestResult, list[RequestResult]]:
    """The first request of which it is so, and all until then."""
    seen: list[RequestResult] = []
    for seed in SEEDS:
        params = HOT | {"seed": seed} | more
        seen.append(await outcome(found, await ask(found, "Where are the bees?", **params)))
        assert seen[-1].reason in ENDS, seen[-1]
        if is_so(seen[-1]):
            return seen[-1], seen
    raise AssertionError(f"{len(seen)} requests, none of them so: {seen}")


def assert_read_once(turns: Sequence[ModelAnswer]) -> None:
    """Each turn finds in the cache what the one before read. What that wrote is there too, where it is tokenized again
    as it was written; a random model writes other tokens than the tokenizer would."""
    for turn, following in pairwise(turns):
        assert turn.prompt_tokens is not None
        assert following.cached_tokens is not None
        assert following.cached_tokens >= turn.prompt_tokens - BLOCK


@pytest.mark.parametrize("form", ToolForm)
async def test_real_calls_are_run_and_each_prompt_is_read_once(model: Path, tmp_path: Path, form: ToolForm) -> None:
    """Cached tokens of turn n + 1 are those of turn n at least, but for one block."""
    bees = Bees()
    limits = LoopLimits(max_tool_iterations=4)
    choice = REQUIRED if form is ToolForm.NATIVE else {}
    async with tool_worker(model, tmp_path, form, tools=[bees.look], limits=limits) as found:
        long, seen = await first(found, lambda ended: len(ended.turns) >= 4, **choice)
        for ended in seen:
            assert_read_once(ended.turns)
        assert (long.turns[-1].cached_tokens or 0) > (long.turns[0].prompt_tokens or 0)
        assert bees.calls
        assert all(where in ("north", "south") and 1 <= step <= 9 for where, step in bees.calls)


async def test_two_loops_at_once_keep_their_own_prompts(model: Path, tmp_path: Path) -> None:
    bees = Bees()
    async with tool_worker(model, tmp_path, tools=[bees.look]) as found:
        for seed in SEEDS:
            both = [await ask(found, f"Bees of {name}?", seed=seed, **HOT) for name in ("Ann", "Bob")]
            ended = [await outcome(found, request) for request in both]
            for one in ended:
                assert_read_once(one.turns)
            if all(len(one.turns) >= 2 for one in ended):
                return
        raise AssertionError("no two loops at once")


async def test_a_real_answer_comes_out_of_its_object(model: Path, tmp_path: Path) -> None:
    bees = Bees()
    async with tool_worker(model, tmp_path, tools=[bees.look]) as found:
        ended, _ = await first(
            found, lambda ended: ended.state is RequestState.COMPLETED and len(ended.turns) > 1, **OTHER_DICE
        )
        assert (ended.answer.text, ended.reason) == ("x", None)
        assert len(bees.calls) >= len(ended.turns) - 1


async def test_a_real_call_that_was_cut_off_is_malformed_and_the_server_takes_the_conversation_on(
    model: Path, tmp_path: Path
) -> None:
    """Half a call in a history would be a 500 of llama-server; so would a result for no call."""
    bees = Bees()
    async with tool_worker(model, tmp_path, ToolForm.NATIVE, tools=[bees.look], max_tokens=90) as found:
        ended, seen = await first(found, lambda ended: ended.reason == "malformed_tool_call", **REQUIRED)
        assert len(ended.turns) >= 2
        assert "The model wrote: look(" in ended.detail
        assert {one.finish_reason for one in ended.turns[-2:]} == {"length"}
        assert not [one for one in seen if one.reason == "backend_error"]


async def test_a_real_exit_call_is_a_signal_and_ends_its_request(model: Path, tmp_path: Path) -> None:
    risk = {
        "type": "object",
        "properties": {"risk": {"enum": ["low", "high"]}},
        "required": ["risk"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "POLICY_RISK", "description": "", "parameters": risk}}]
    async with tool_worker(model, tmp_path, exit_tools=tools) as found:
        ended, _ = await first(found, lambda ended: ended.signals)
        assert ended.state is RequestState.COMPLETED
        (signal,) = ended.signals
        assert signal == Signal("POLICY_RISK", signal.arguments, 1, has_ended=True)
        assert signal.arguments["risk"] in ("low", "high")
        assert len(ended.turns) == 1


async def test_a_real_server_killed_in_turn_3_fails_the_request_and_nothing_is_run_twice(
    model: Path, tmp_path: Path
) -> None:
    """It is killed by the second call, so it is gone when turn 3 is to be asked for, or while it answers it."""
    calls: list[int] = []
    pids: list[int] = []

    def look(where: Literal["north", "south"]) -> str:
        """Look around."""
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(pids[-1], signal.SIGKILL)
        return where

    profile = TimeoutProfile(backoff_first_s=0.05, backoff_longest_s=0.05)
    async with tool_worker(model, tmp_path, tools=[look], profile=profile) as found:
        for seed in SEEDS:
            calls.clear()
            pid = (await found.get_worker_status()).pid
            assert pid is not None
            pids.append(pid)
            ended = await outcome(found, await ask(found, "Where are the bees?", seed=seed, **HOT))
            if len(calls) < 2:
                continue
            assert (ended.state, ended.reason) == (RequestState.FAILED, "server_died")
            assert (len(ended.turns), calls) == (2, [0, 1])
            after = await ready_again(found)
            assert after.pid not in (None, pid)
            assert len(calls) == 2
            return
        raise AssertionError("no request came to a second call")


async def test_a_cancel_while_a_tool_runs_leaves_the_real_server_free(model: Path, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def wait(where: Literal["north", "south"]) -> str:
        """Wait."""
        begun.set()
        await asyncio.sleep(600)
        return where

    async with tool_worker(model, tmp_path, tools=[wait], slots=1) as found:
        for seed in SEEDS:
            asked = await ask(found, "Where are the bees?", seed=seed, **HOT)
            ended = asyncio.create_task(outcome(found, asked))
            called = asyncio.create_task(begun.wait())
            await asyncio.wait({ended, called}, return_when=asyncio.FIRST_COMPLETED)
            called.cancel()
            if not begun.is_set():
                continue
            assert await found.cancel(asked)
            assert ((await ended).state, len((await ended).turns)) == (RequestState.CANCELED, 1)
            answered = await outcome(found, await ask(found, "Hi", max_tokens=1))
            assert answered.reason != "backend_error"
            return
        raise AssertionError("no request came to a call")
