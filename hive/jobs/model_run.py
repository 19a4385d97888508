"""One job that asks turn by turn: its model at the proxy, its tools through Hive, each step told as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

from hive.dialects.openai_answers import Completion
from hive.errors import BadRequest
from hive.jobs.access import JobAccess
from hive.jobs.call_forms import form_of
from hive.jobs.ending import JobEnding, completed, failed
from hive.jobs.exit_tools import ending_names
from hive.jobs.order import JobOrder, JobWork, exit_definitions
from hive.jobs.running import Tool
from hive.jobs.telling import Telling
from hive.jobs.tool_dialogue import ToolDialogue
from hive.jobs.toolloop import Fate, LoopStep, ToolLoop
from hive.jobs.tools import ToolTable
from hive.worker.dialogue import Dialogue, DialogueFailed, SingleTurn
from hive.worker.judge import FailReason
from hive.worker.records import ModelAnswer
from hive.worker.request import AnswerText, encode
from hive.worker.stream import AnswerFailed, AnswerRefused, Progress, ServerUnreachable, answer

PATIENCE_S = 60.0
"""A turn that is refused before its answer began is asked again for so long: the proxy starts anew, a window or a queue
is full. What says that it takes longer, a budget for example, has failed at once."""
AGAIN_S = 0.5
AGAIN = frozenset({401, 429, 503})
"""401: the daemon has not told the proxy of this job yet."""
UNHEARD_S = 5.0
"""For so long at most it may not have."""
LAST_BYTES_S = 2.0
_WITH_USAGE: Mapping[str, Any] = {"include_usage": True}

Close = Callable[[], Awaitable[None]]


async def run_model(work: JobWork, access: JobAccess, telling: Telling) -> JobEnding:
    """The job, from its first question to its end. Raises what keeps the daemon from keeping what it says."""
    try:
        tools, close = await tools_of(work.order, access)
    except DialogueFailed as error:
        return failed(error.reason, str(error))
    try:
        run = ModelRun(work, access, telling, tools)
        return await run.run()
    except BadRequest as error:
        return failed(error.code, error.message)
    finally:
        await close()


async def tools_of(order: JobOrder, access: JobAccess) -> tuple[list[Tool], Close]:
    """The tools that it names, and how to close them. Raises DialogueFailed where one cannot be had."""
    if not order.tools:
        return [], _nothing
    from hive.jobs.open_tools import open_tools  # most jobs have none

    return await open_tools(order, access)


async def _nothing() -> None:
    """Closes no tools."""


class ModelRun:
    """Hears of its dialogue's turns, as their TurnWatcher."""

    def __init__(self, work: JobWork, access: JobAccess, telling: Telling, tools: Sequence[Tool]) -> None:
        """Raises BadRequest where two tools have one name."""
        self._order = work.order
        self._access = access
        self._telling = telling
        self._turn = 0
        self._text = AnswerText()
        self._told_signals = 0
        self._agents = {one.definition.name: getattr(one.runner, "agent", "") for one in tools}
        exits = exit_definitions(work.order)
        table = ToolTable([one.definition for one in tools], exits)
        ending = ending_names(stop_on_decision_request=work.order.stop_on_decision_request)
        self._loop = ToolLoop(table, iterations=work.limits.max_tool_iterations, ending=ending)
        form = form_of(work.order.tool_form, table, work.order.answer_schema)
        by_name = {one.definition.name: one for one in tools}
        self._dialogue: Dialogue = (
            ToolDialogue(
                work.order.system, work.order.prompt, self._loop, by_name, form, work.limits, work.order.bios, self
            )
            if table or work.order.answer_schema is not None
            else SingleTurn(work.order.system, work.order.prompt, work.order.bios)
        )

    def __repr__(self) -> str:
        return f"<ModelRun {self._order.name} turn {self._turn}, {self._loop!r}>"

    async def run(self) -> JobEnding:
        """Its end. What it raises is the daemon's refusal to keep more."""
        try:
            return await self._turns()
        except AnswerFailed as error:
            return failed(error.code or error.reason.value, str(error), self._text.so_far().text)
        except DialogueFailed as error:
            return failed(error.reason, str(error), self._text.so_far().text)

    async def _turns(self) -> JobEnding:
        while True:
            self._turn += 1
            said = await self._ask()
            await self._tell_turn(said)
            if not await self._dialogue.after(said):
                return completed(self._dialogue.shown(said).text, said.finish_reason)

    # asking the model -------------------------------------------------------------------------------------------------

    async def _ask(self) -> ModelAnswer:
        """One turn: its answer, whole, or as much of it as its dialogue needs. Raises AnswerFailed."""
        body = self._body()
        begun_at = time.monotonic()
        while True:
            self._text = AnswerText()
            try:
                await self._stream(body)
                return self._text.so_far()
            except AnswerFailed as error:
                wait_s = again_in_s(error, time.monotonic() - begun_at)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    def _body(self) -> bytes:
        order = self._order
        fields = self._dialogue.fields(datetime.now().astimezone())
        named = {"model": order.model} if order.model else {}
        return encode({**order.params, **named, **fields, "stream": True, "stream_options": _WITH_USAGE})

    async def _stream(self, body: bytes) -> None:
        access, calls = self._access, 1
        progress = Progress(time.monotonic)
        chunks_of = answer(access.socket, body, progress, fields=access.fields, last_bytes_s=LAST_BYTES_S)
        async with aclosing(chunks_of) as chunks:
            async for chunk in chunks:
                why = self._text.take(chunk)
                await self._tell_pieces(chunk)
                if why:
                    raise AnswerFailed(FailReason.REPEATED_LINE_LOOP, why)
                if self._text.calls_begun > calls:
                    calls = self._text.calls_begun
                    if self._dialogue.is_enough(self._text.whole_calls()):
                        return

    # telling ----------------------------------------------------------------------------------------------------------

    async def _tell_pieces(self, chunk: Completion) -> None:
        delta = chunk.choices[0].delta if chunk.choices else None
        if delta is None:
            return
        if delta.thinking:
            await self._telling.say("thinking", {"turn": self._turn, "text": delta.thinking})
        if delta.text:
            await self._telling.say("delta", {"turn": self._turn, "text": delta.text})

    async def _tell_turn(self, said: ModelAnswer) -> None:
        told = {
            "turn": self._turn,
            "answer": said.text,
            "thinking": said.thinking,
            "finish_reason": said.finish_reason or "",
            "calls": [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in said.tool_calls],
            "tokens_in": said.prompt_tokens,
            "tokens_out": said.completion_tokens,
            "tokens_cached": said.cached_tokens,
        }
        await self._telling.say("turn", told)
        await self._telling.flush()

    async def judged(self, step: LoopStep) -> None:
        """Tells what is about to be called, and waits until that is kept: a job of an agent is known by the call that
        began it."""
        for signal in self._loop.signals[self._told_signals :]:
            about = {"name": signal.name, "turn": signal.turn, "has_ended": signal.has_ended}
            await self._telling.say("signal", {**about, "arguments": signal.arguments})
        self._told_signals = len(self._loop.signals)
        if not step.is_last and step.failure is None:
            for one in step.calls:
                if one.fate is Fate.RUN:
                    told = {"turn": self._turn, "id": one.call.id, "name": one.call.name}
                    agent = self._agents.get(one.call.name, "")
                    await self._telling.say("tool_call", {**told, "arguments": one.call.arguments, "agent": agent})
        await self._telling.flush()

    async def carried_out(self, step: LoopStep, results: Sequence[str]) -> None:
        for one, result in zip(step.calls, results, strict=True):
            told = {"turn": self._turn, "id": one.call.id, "name": one.call.name}
            await self._telling.say("tool_result", {**told, "result": result})
        await self._telling.flush()


def again_in_s(error: AnswerFailed, asked_for_s: float) -> float | None:
    """Seconds until a turn that failed so is asked again; None where it is not: its answer had begun, or that would
    take too long. `asked_for_s`: since it was asked first.

    >>> again_in_s(AnswerRefused(503, b"", 1.0), 2.0), again_in_s(AnswerRefused(429, b"", 3600.0), 2.0)
    (1.0, None)
    >>> again_in_s(AnswerFailed(FailReason.STREAM_INCOMPLETE, "cut"), 2.0), again_in_s(AnswerRefused(400, b"", None), 0)
    (None, None)
    """
    if isinstance(error, ServerUnreachable):
        return AGAIN_S if asked_for_s < PATIENCE_S else None
    if not isinstance(error, AnswerRefused) or error.status not in AGAIN:
        return None
    if error.status == 401:
        return AGAIN_S if asked_for_s < UNHEARD_S else None
    wait_s = max(AGAIN_S, error.retry_after_s or AGAIN_S)
    return wait_s if asked_for_s + wait_s <= PATIENCE_S else None
