"""One request's turns with tools: asks the loop's decider what to do, has it done, and writes the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from hive.jobs.call_forms import CallForm, Message
from hive.jobs.exit_tools import Signal
from hive.jobs.running import Tool, run_calls
from hive.jobs.toolloop import LoopLimits, LoopStep, ToolLoop
from hive.jobs.tools import ToolTable
from hive.worker.bios import BiosForm, messages
from hive.worker.dialogue import Dialogue, DialogueFailed, DialogueMaker
from hive.worker.records import ModelAnswer, ToolCallText


class TurnWatcher(Protocol):
    """Hears of each turn's calls. What it raises ends the request."""

    async def judged(self, step: LoopStep) -> None:
        """Before the calls of a turn are carried out, and for a turn that is the last."""
        ...

    async def carried_out(self, step: LoopStep, results: Sequence[str]) -> None:
        """The result of each call, in their order."""
        ...


class ToolDialogue:
    """Turns of one request. Messages are only ever appended, and the first ones never change."""

    def __init__(
        self,
        system_prompt: str,
        user_prompt: str,
        loop: ToolLoop,
        tools: Mapping[str, Tool],
        form: CallForm,
        limits: LoopLimits,
        bios: BiosForm,
        watcher: TurnWatcher | None = None,
    ) -> None:
        self._watcher = watcher
        self._system_prompt = system_prompt
        self._user_prompt = user_prompt
        self._loop = loop
        self._runners = {name: tool.runner for name, tool in tools.items()}
        self._form = form
        self._limits = limits
        self._bios = bios
        self._messages: list[Message] = []
        self._turn: tuple[ModelAnswer, tuple[ToolCallText, ...], tuple[str, ...], str] | None = None

    def __repr__(self) -> str:
        return f"<ToolDialogue {len(self._messages)} messages, {self._loop!r}>"

    @property
    def iterations_remaining(self) -> int | None:
        return self._loop.left

    @property
    def signals(self) -> Sequence[Signal]:
        return self._loop.signals

    def fields(self, now: datetime) -> Mapping[str, Any]:
        if not self._messages:
            rules = self._form.rules
            self._messages += messages(self._system_prompt, self._user_prompt, now, self._bios, rules=rules)
        elif self._turn is not None:
            answer, calls, results, warning = self._turn
            note = budget_note(now, self._loop.left, warning)
            self._messages += self._form.turn(answer, calls, [f"{result}\n\n{note}" for result in results])
            self._turn = None
        return {**self._form.fields, "messages": self._messages}

    async def after(self, answer: ModelAnswer) -> bool:
        calls = self._form.calls_of(answer)
        step = self._loop.take(calls, is_cut=answer.finish_reason == "length")
        if self._watcher is not None:
            await self._watcher.judged(step)
        if step.failure is not None:
            raise DialogueFailed(step.failure.value, step.detail)
        if step.is_last:
            return False
        results = await run_calls(step.calls, self._runners, self._limits)
        if self._watcher is not None:
            await self._watcher.carried_out(step, results)
        self._turn = answer, calls, results, step.warning
        return True

    def is_enough(self, calls: Sequence[ToolCallText]) -> bool:
        return self._loop.ends_with(calls)

    def shown(self, answer: ModelAnswer) -> ModelAnswer:
        return self._form.shown(answer)


def budget_note(now: datetime, left: int, warning: str = "") -> str:
    """The part of the BIOS that changes from turn to turn. It stands behind each result, not in the head: there it
    would have the server read the whole conversation again.

    >>> from datetime import UTC
    >>> budget_note(datetime(2026, 11, 23, 19, 5, tzinfo=UTC), 7)
    '[It is 19:05. 7 more turns with calls are permitted.]'
    >>> budget_note(datetime(2026, 11, 23, 19, 5, tzinfo=UTC), 0)
    '[It is 19:05. No more calls are permitted: answer now.]'
    """
    said = "No more calls are permitted: answer now."
    if left:
        said = f"{left} more turn{'s' if left > 1 else ''} with calls {'are' if left > 1 else 'is'} permitted."
    return f"[It is {now:%H:%M}. {said}{' ' if warning else ''}{warning}]"


def tool_dialogues(
    tools: Iterable[Tool],
    table: ToolTable,
    form: CallForm,
    limits: LoopLimits,
    *,
    ending: frozenset[str],
    bios: BiosForm,
) -> DialogueMaker:
    """Maker of dialogues with these tools."""
    by_name = {tool.definition.name: tool for tool in tools}

    def begin(job_name: str, system_prompt: str, user_prompt: str) -> Dialogue:  # noqa: ARG001 - it is for logs
        loop = ToolLoop(table, iterations=limits.max_tool_iterations, ending=ending)
        return ToolDialogue(system_prompt, user_prompt, loop, by_name, form, limits, bios)

    return begin
