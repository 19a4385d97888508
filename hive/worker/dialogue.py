"""Turns of one request: what the server is asked next follows from what it answered.

A tool loop is such a dialogue; it comes from outside, so that this room knows nothing of tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from hive.worker.bios import BiosForm, messages
from hive.worker.records import ModelAnswer, ToolCallText


class DialogueFailed(Exception):
    """The dialogue ends its request as failed. `reason`: for programs; the text: for people."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Dialogue(Protocol):
    """One request's turns. Called from one task, in order: `fields`, `after`, `fields`, …"""

    def fields(self, now: datetime) -> Mapping[str, Any]:
        """Fields of the next body: `messages`, and `tools` where there are some. They win over the caller's params."""
        ...

    async def after(self, answer: ModelAnswer) -> bool:
        """Takes a whole answer; True where there is another turn. What it raises fails the request, with the reason of
        a DialogueFailed. A cancel of the request cancels it."""
        ...

    def is_enough(self, calls: Sequence[ToolCallText]) -> bool:
        """Whether these calls end the request, so that the rest of the answer is not waited for. Asked with the calls
        that are whole, each time that another one begins."""
        ...

    def shown(self, answer: ModelAnswer) -> ModelAnswer:
        """The last answer of a completed request as its caller is to see it."""
        ...

    @property
    def iterations_remaining(self) -> int | None:
        """Turns that tools may still cause; None where there are no tools."""
        ...

    @property
    def signals(self) -> Sequence[Any]:
        """Exit tools called so far."""
        ...


class DialogueMaker(Protocol):
    """Begins the dialogue of one request."""

    def __call__(self, job_name: str, system_prompt: str, user_prompt: str) -> Dialogue: ...


class SingleTurn:
    """One question, one answer."""

    iterations_remaining: int | None = None
    signals: Sequence[Any] = ()

    def __init__(self, system_prompt: str, user_prompt: str, form: BiosForm) -> None:
        self._system_prompt = system_prompt
        self._user_prompt = user_prompt
        self._form = form

    def fields(self, now: datetime) -> Mapping[str, Any]:
        return {"messages": messages(self._system_prompt, self._user_prompt, now, self._form)}

    async def after(self, answer: ModelAnswer) -> bool:  # noqa: ARG002 - there is no second turn
        return False

    def is_enough(self, calls: Sequence[ToolCallText]) -> bool:  # noqa: ARG002 - they are the caller's
        return False

    def shown(self, answer: ModelAnswer) -> ModelAnswer:
        return answer


def single_turns(form: BiosForm) -> Callable[[str, str, str], Dialogue]:
    """Maker of dialogues of one turn."""

    def begin(job_name: str, system_prompt: str, user_prompt: str) -> Dialogue:  # noqa: ARG001 - it is for logs
        return SingleTurn(system_prompt, user_prompt, form)

    return begin
