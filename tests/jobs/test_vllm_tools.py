"""The tool loop on a real vLLM with a tiny random model: what its grammars make of calls, and its prefix cache."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

import httpx
import pytest

from hive.dialects.openai_answers import read
from hive.dialects.sse import SseReader
from hive.jobs.call_forms import ToolForm, form_of
from hive.jobs.callables import tool_of
from hive.jobs.tool_dialogue import ToolDialogue
from hive.jobs.toolloop import LoopLimits, ToolLoop
from hive.jobs.tools import ToolTable
from hive.worker.bios import BiosForm
from hive.worker.dialogue import DialogueFailed
from hive.worker.records import ModelAnswer
from hive.worker.request import AnswerText
from tests.vllm import MODEL, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
BLOCK = 32
"""Tokens of a block of its cache, as tests/vllm.py starts it."""
SEEDS = range(60)


def look(where: Literal["north", "south"], step: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]) -> str:
    """Look around."""
    return f"bees fly {where}, {step} of them"


def dialogue(form: ToolForm, prompt: str, iterations: int = 8) -> ToolDialogue:
    tool, limits = tool_of(look), LoopLimits(max_tool_iterations=iterations)
    table = ToolTable([tool.definition])
    loop = ToolLoop(table, iterations=limits.max_tool_iterations)
    made = form_of(form, table, {"const": "x"} if form is ToolForm.SCHEMA else None)
    return ToolDialogue("Be short.", prompt, loop, {"look": tool}, made, limits, BiosForm.ONE_MESSAGE)


async def answer(server: VllmServer, body: dict[str, Any]) -> ModelAnswer:
    """One turn, as a worker asks for it."""
    told = {"model": MODEL, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
    found, events = AnswerText(), SseReader()
    async with (
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=told | body) as call,
    ):
        assert call.status_code == 200, await call.aread()
        async for piece in call.aiter_bytes():
            for payload in events.feed(piece):
                if payload != b"[DONE]":
                    found.take(read(payload))
    return found.so_far()


async def turns_of(
    server: VllmServer, talk: ToolDialogue, **params: Any
) -> tuple[list[ModelAnswer], DialogueFailed | None]:
    """All turns of a request, and its failure."""
    found: list[ModelAnswer] = []
    while True:
        found.append(await answer(server, params | dict(talk.fields(datetime.now().astimezone()))))
        try:
            if not await talk.after(found[-1]):
                return found, None
        except DialogueFailed as failed:
            return found, failed


async def test_by_schema_it_calls_and_each_prompt_is_read_once(vllm_server: VllmServer) -> None:
    """Cached tokens of turn n + 1 are those of turn n at least, but for one block."""
    most = 0
    for seed in SEEDS:
        talk = dialogue(ToolForm.SCHEMA, f"Bees, number {seed}?")
        found, failed = await turns_of(vllm_server, talk, temperature=2.0, seed=seed)
        assert failed is None or failed.reason in ("repeated_tool_call", "tool_iterations_exhausted"), failed
        for turn, following in pairwise(found):
            assert turn.prompt_tokens is not None
            assert following.cached_tokens is not None
            assert following.cached_tokens >= turn.prompt_tokens - BLOCK
        most = max(most, len(found))
        if most >= 3:
            return
    raise AssertionError(f"{most} turns at most")


async def test_a_call_that_is_no_object_is_malformed_and_twice_it_fails(vllm_server: VllmServer) -> None:
    """vLLM does not hold the arguments of a named tool to its schema: `true` was seen."""
    named = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    for seed in SEEDS:
        talk = dialogue(ToolForm.NATIVE, f"Bees, number {seed}?")
        found, failed = await turns_of(vllm_server, talk, temperature=2.0, seed=seed, max_tokens=40, **named)
        if failed is not None and failed.reason == "malformed_tool_call":
            assert "The model wrote: look(" in str(failed)
            assert len(found) >= 2
            return
    raise AssertionError("no call was malformed")
