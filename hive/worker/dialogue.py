"""Turns of one request: what the server is asked next follows from what it answered.

A tool loop is such a dialogue; it comes from outside, so that this room knows nothing of tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from hive.worker.bios import BiosForm, messages
from hive.worker.records import ModelAnswer


class Dialogue(Protocol):
    """One request's turns. Called from one task, in order: `fields`, `after`, `fields`, …"""

    def fields(self, now: datetime) -> Mapping[str, Any]:
        """Fields of the next body: `messages`, and `tools` where there are some. They win over the caller's params."""
        ...

    async def after(self, answer: ModelAnswer) -> bool:
        """Takes a whole answer; True where there is another turn. What it raises fails the request."""
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


def single_turns(form: BiosForm) -> Callable[[str, str, str], Dialogue]:
    """Maker of dialogues of one turn."""

    def begin(job_name: str, system_prompt: str, user_prompt: str) -> Dialogue:  # noqa: ARG001 - it is for logs
        return SingleTurn(system_prompt, user_prompt, form)

    return begin
